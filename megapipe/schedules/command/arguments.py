"""The flags of ``megapipe schedule``, and the schedules and costs that they select."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, cast

from megapipe.config.command_line import finite, positive, tool_parser, with_hyphens
from megapipe.config.field_types import real_number, whole_number
from megapipe.config.parallel import ScheduleConfig, is_schedule_file
from megapipe.schedules.actions import COMPUTE_KINDS, Kind
from megapipe.schedules.build import (
    MOST_FORWARDS,
    build,
    check_microbatches,
    check_ranks,
    load_file,
    order,
    read_file,
)
from megapipe.schedules.building_blocks import Times
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.memory import Offload, with_snapshots
from megapipe.schedules.parameters import OPTIONS, FileParameters
from megapipe.schedules.registry import GENERATORS, Options, find_generator
from megapipe.schedules.schedule import Header, Schedule
from megapipe.schedules.simulation import Costs, Link, Simulation, rank_costs
from megapipe.schedules.states import StateTable
from megapipe.schedules.vocabulary import PASS_SECONDS

NEVER_FLUSHING_STEPS = 4
"""Default number of simulated steps of a schedule that never flushes."""
DEFAULT_SIZES: Final = {"ranks": 4, "microbatches": 8}
STAGE_TIMES: Final = {kind.name.lower(): kind for kind in (*COMPUTE_KINDS, Kind.UPDATE)}
"""Compute actions by the flag that sets their time."""
LOWERING_FLAGS = "receive_ahead", "recompute", "offload", "prefetch", "offload_state", "offload_weights", "snapshot"
"""Flags that change what lowering adds to the compute actions."""
TIMES_OF_ACTIONS: Final = {
    "recompute_time": ("recompute",),
    "vocabulary_time": ("vocabulary",),
    "gather_time": ("weight_buffers", "offload_weights"),
    "offload_time": ("offload",),
    "offload_state_time": ("offload_state", "offload_weights"),
    "snapshot_time": ("snapshot",),
}
"""Flags of the times of actions, and the flags that add such actions to a named schedule."""
ORDER_TIMES: Final[dict[str, tuple[float | None, str | None]]] = {
    "forward": (1.0, None),
    "backward": (None, "whole backward (default: the sum of its halves, or twice the forward)"),
    "backward_input": (None, None),
    "backward_weight": (None, None),
    "latency": (0.0, "latency of a message between ranks"),
}
"""Flags of the times on which an order can depend, their defaults and help."""
HEADER_FLAGS = "units", "vocabulary", "weight_buffers", "whole_gradients"
"""Flags that change the header of compute actions. A file for all sizes has no such header."""
NAMED_FLAGS = (
    *(name for name in LOWERING_FLAGS if name != "snapshot"), *HEADER_FLAGS,
    "slices", "update", "vertical_sync", "two_bp", "memory_limit", "placement",
)  # fmt: skip
"""Flags that only named schedules have. A file defines these things itself."""
JSON: Final = ("json", "machine-readable output")
DESCRIPTION = "Pipeline schedules: list, show, validate, simulate, compare, draw, overlay."
EXAMPLES = """\
examples:
  megapipe schedule show --schedule 1f1b --ranks 4 --microbatches 8
  megapipe schedule compare --ranks 4 --microbatches 16
  megapipe schedule draw --schedule zb_h1 --ranks 4 --microbatches 8 --output zb_h1.svg
  megapipe schedule overlay runs/2bw/trace --output timeline.html

docs/schedules.md explains what each schedule is for.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = tool_parser("megapipe schedule", DESCRIPTION, EXAMPLES)
    commands = top.add_subparsers(dest="command", required=True)
    _switch(commands.add_parser("list", help="every schedule, its numerical class and its source"), *JSON)
    check = commands.add_parser("validate", help="check a schedule file")
    check.add_argument("file", type=Path, help="schedule file; one with compute actions only is lowered first")
    _sizes(check)
    _switch(check, *JSON)
    for name, text in (
        ("show", "text timeline"),
        ("simulate", "makespan, bubble, activations, weight versions"),
        ("draw", "SVG, interactive HTML or Chrome/Perfetto trace"),
        ("write", "the schedule as a text file to edit, where possible one for all ranks and micro-batches"),
    ):
        command = commands.add_parser(name, help=text)
        help_text = f"one of {', '.join(GENERATORS)}, or a schedule file such as ./mine.txt"
        command.add_argument("--schedule", default=ScheduleConfig.name, help=help_text)
        _flags(command, simulated=name != "write")
        if name == "draw":
            command.add_argument("-o", "--output", type=Path, required=True, help=".svg, .html or .json (trace)")
        if name == "write":
            _switch(command, "lowered", "with all sends, receives, reductions and updates")
        if name == "show":
            command.add_argument("--width", type=positive, default=120, help="maximum characters per line")
    compare = commands.add_parser("compare", help="a table over schedules")
    compare.add_argument("--schedule", default=",".join(GENERATORS), help="names and files, separated by commas")
    _flags(compare)
    overlay = commands.add_parser("overlay", help="compare a trace with its prediction")
    _add_overlay(overlay)
    _switch(overlay, *JSON)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return top


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line; underscores in flags count as hyphens. ``changed``: the flags with other values
    than their defaults."""
    flags = parser().parse_args(with_hyphens(arguments))
    flags.changed = {name for name, value in vars(flags).items() if value != flags.parser.get_default(name)}
    flags.given_sizes = {name: getattr(flags, name, None) for name in DEFAULT_SIZES}
    for name, default in DEFAULT_SIZES.items():
        setattr(flags, name, default if flags.given_sizes[name] is None else flags.given_sizes[name])
    return flags


def _whole(group: Any, name: str, text: str, default: int | None = None, **keywords: Any) -> None:
    group.add_argument(f"--{name}", type=whole_number, default=default, help=text, **keywords)


def _finite(group: Any, name: str, text: str | None = None, default: float | None = None) -> None:
    group.add_argument(f"--{name}", type=finite, default=default, help=text)


def _switch(group: Any, name: str, text: str, default: bool | None = False) -> None:
    group.add_argument(f"--{name}", action="store_true", default=default, help=text)


def _sizes(command: Any) -> None:
    for name, what in (("ranks", "pipeline ranks"), ("microbatches", "micro-batches per step")):
        _whole(command, name, f"{what} (default {DEFAULT_SIZES[name]})")
    _whole(command, "chunks", "stages on each rank (default 2 for schedules with several, 1 for seq1f1b)")


def _flags(command: argparse.ArgumentParser, *, simulated: bool = True) -> None:
    """Add the flags of a schedule. simulated: with those that only a simulation uses."""
    _switch(command, *JSON)
    shape = command.add_argument_group("shape")
    _sizes(shape)
    if simulated:
        _whole(shape, "steps", "optimizer steps (default 1; 4 for schedules that never flush)")
    _whole(shape, "units", "units (layers) in each stage (default 1)", 1)
    _whole(shape, "weight-buffers", "sharded weights: maximum number of gathered units on a rank", 0)
    _whole(shape, "whole-gradients", "sharded gradients: maximum number of whole units on a rank", 0)
    _whole(shape, "recompute", "keep only the input of every K units and recompute the rest", metavar="K")
    _whole(shape, "offload", "move the activations of every K-th unit to host memory and back", metavar="K")
    _whole(shape, "prefetch", "actions between a reload and its backward (default 1)", 1)
    _switch(shape, "offload-state", "keep optimizer state on the device only around updates")
    in_host = "weights and optimizer state in host memory: maximum number of units with weights on the device"
    _whole(shape, "offload-weights", in_host, 0, metavar="N")
    _switch(shape, "snapshot", "copy the state for a checkpoint during the step")
    _whole(shape, "receive-ahead", "actions between a receive and its use (default 1)", 1)
    sharded = (
        "shard output layer and word embeddings over all ranks, by this variant "
        "of their passes (parallel.vocabulary pipeline or pipeline_2; default 1)"
    )
    _whole(shape, "vocabulary", sharded, 0, nargs="?", choices=(1, 2), const=1)
    options = command.add_argument_group("options of particular schedules")
    groups = "consecutive micro-batches that pass a chunk (default: see docs/schedules.md)"
    _whole(options, "group-size", f"interleaved_1f1b and gis: {groups}")
    _whole(options, "slices", "seq1f1b: parts of each sequence (default 4)")
    options.add_argument("--update", choices=("eager", "lazy"), help="2bw: when the optimizer steps")
    _switch(options, "vertical-sync", "pipedream: use one weight version on all ranks", None)
    _switch(options, "two-bp", "split backwards and run weight halves in idle time", None)
    _whole(options, "max-pending", "with --two-bp: maximum number of postponed weight halves")
    _finite(options, "memory-limit", "zb_auto and v_auto: maximum number of micro-batches that a rank holds")
    options.add_argument("--placement", help="fail unless stages are placed like this: linear, round_robin or v_shape")
    _add_times(command, simulated)


def _add_times(command: argparse.ArgumentParser, simulated: bool) -> None:
    """Add the flags of times. Without a simulation, only an order that depends on times uses some of them."""
    what = "" if simulated else ", for zb_auto, v_min/v_half/v_auto and --two-bp"
    times = command.add_argument_group(f"times of one rank's share of the model, in any unit{what}")
    for name, (default, text) in ORDER_TIMES.items():
        _finite(times, name.replace("_", "-"), text, default)
    if not simulated:
        command.set_defaults(reduce_time=0.0)
        return
    _finite(times, "recompute-time", "recomputation (default: as the forward)")
    _finite(times, "bandwidth", "bytes per time unit between two ranks; needs --message")
    _finite(times, "message", "bytes of a micro-batch's activations; needs --bandwidth")
    _switch(times, "blocking-sends", "a send blocks its rank until the message has arrived")
    shard = "pass of a rank's shard of the output layer, in forwards (default 0.25)"
    _finite(times, "vocabulary-time", f"with --vocabulary: {shard}", PASS_SECONDS)
    _finite(times, "update-time", "optimizer step of a rank's share", 0.0)
    _finite(times, "reduce-time", "gradient reduction of a rank's share", 0.0)
    _finite(times, "gather-time", "gathering or copying in the weights of a rank's share", 0.0)
    overlapped = "time of overlapped actions over the sum of their own times (default 1)"
    _finite(times, "group-time", overlapped, 1.0)
    _finite(times, "offload-time", "copy of a micro-batch's activations, one way", 0.0)
    _finite(times, "offload-state-time", "copy of the optimizer state, one way", 0.0)
    _finite(times, "snapshot-time", "copy of a rank's state for a checkpoint", 0.0)
    _finite(times, "scalars-time", "global norm and finite flag over all ranks", 0.0)


def _add_overlay(command: argparse.ArgumentParser) -> None:
    """Add the flags of `overlay`."""
    command.add_argument("directory", type=Path, help="folder of the recording, set by --profile.trace")
    command.add_argument("-o", "--output", type=Path, help="picture: .html, .svg or .json (Chrome/Perfetto trace)")
    _whole(command, "step", "step to show, numbered as in the log (default: a typical one)")
    _whole(command, "pipeline", "replica of the pipeline to show (default 0)", 0)
    times = command.add_argument_group(
        "times in milliseconds, for a rank's share of the model, that replace measured medians"
    )
    for name in STAGE_TIMES:
        times.add_argument(f"--{name.replace('_', '-')}" + "-time" * (name == "update"), dest=name, type=real_number)
    times.add_argument("--latency", type=real_number, help="of a message between ranks")
    times.add_argument("--scalars-time", type=real_number, help="global norm and finite flag over all ranks")


def order_of(flags: argparse.Namespace, name: str) -> Schedule:
    """Return the compute actions of the schedule that the flags ask for, named or read from a file."""
    for flag in LOWERING_FLAGS:
        if flag in flags.changed:
            shown = f"--{flag.replace('_', '-')}"
            raise ScheduleError(f"{shown} only changes the actions that lowering adds; pass --lowered, or omit it")
    if is_schedule_file(name):
        schedule = file_of(flags, Path(name), read_file)
        if schedule.header.lowered:
            raise ScheduleError(f"{name} is already lowered; pass --lowered to print it")
        return schedule
    return order(name, flags.ranks, flags.microbatches, **_arguments(flags, name))


def schedule_of(flags: argparse.Namespace, name: str) -> Schedule:
    """Return the schedule that the flags ask for, named or read from a file; lowered."""
    if is_schedule_file(name):
        schedule = file_of(flags, Path(name), load_file)
    else:
        check_ranks(name, flags.ranks)
        _check_times_used(flags)
        arguments = _arguments(flags, name)
        stages = len(arguments["units_per_stage"])
        arguments |= {"recompute": _spans(flags, stages), "offload": _offload(flags, stages)}
        schedule = build(name, flags.ranks, flags.microbatches, receive_ahead=flags.receive_ahead, **arguments)
    return with_snapshots(schedule) if flags.snapshot else schedule


def file_of(
    flags: argparse.Namespace, path: Path, read: Callable[[Path, FileParameters], Schedule] = load_file
) -> Schedule:
    """Return the schedule in a file. Raises ScheduleError for flags that a file does not use, and for sizes that it
    does not have."""
    for name in NAMED_FLAGS:
        if name in flags.changed:
            raise ScheduleError(
                f"--{name.replace('_', '-')} only changes named schedules, but {path} "
                "is a file, which defines this itself; leave it out, or name a schedule"
            )
    schedule = read(path, sizes_of(flags))
    header = schedule.header
    for name, size in (("ranks", header.num_ranks), ("microbatches", header.whole_microbatches)):
        if (given := flags.given_sizes[name]) is not None and given != size:
            raise ScheduleError(
                f"--{name} is {given}, but {path} is for {size}; leave "
                "it out, or write a file with parameters (format 3)"
            )
    return schedule


def is_short(flags: argparse.Namespace) -> bool:
    """Return whether `write` prints a file for all ranks and micro-batches: no flag asks for particular ones."""
    particular = flags.changed & {*DEFAULT_SIZES, *OPTIONS, *HEADER_FLAGS, "two_bp", "lowered"}
    return not particular and not is_schedule_file(flags.schedule)


def sizes_of(flags: argparse.Namespace) -> FileParameters:
    """Return the ranks, micro-batches and options that the flags give to a file with parameters."""
    options = {name: getattr(flags, name, None) for name in OPTIONS}
    values = {name: value for name, value in options.items() if value is not None}
    return FileParameters(flags.ranks, flags.microbatches, values)


def _arguments(flags: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the keyword arguments of :func:`order` for the named schedule."""
    generator = find_generator(name)
    placement = generator.placement.__name__
    if flags.placement not in (None, placement):
        raise ScheduleError(f"{name} places its stages {placement}, not {flags.placement}; leave --placement out")
    costs = _times(flags)  # refuses wrong times of any schedule
    options: dict[str, object] = {
        key: getattr(flags, key)
        for key in Options.__annotations__
        if key != "times" and getattr(flags, key) is not None
    }
    if "times" in generator.order_options or options.get("two_bp"):
        options["times"] = costs
    check_microbatches(name, flags.ranks, flags.microbatches, **cast(Options, options))
    in_host = getattr(flags, "offload_weights", 0)
    if in_host and flags.weight_buffers:
        raise ScheduleError("--offload-weights and --weight-buffers exclude each other; leave one of the two out")
    routed = flags.ranks * generator.number_of_chunks(cast(Options, options))
    units = [flags.units] * routed + [1] * _num_shards(flags)
    return {
        "vocabulary": flags.vocabulary,
        "units_per_stage": units,
        "data_parallel": flags.reduce_time > 0 or flags.weight_buffers > 0 or flags.whole_gradients > 0,
        "states": StateTable.uniform(
            units,
            weight_pool=in_host or flags.weight_buffers,
            gradient_pool=flags.whole_gradients,
            weights="host" if in_host else "sharded",
        ),
        **options,
    }


def _check_times_used(flags: argparse.Namespace) -> None:
    """Raise ScheduleError for the time of an action that no flag adds to a named schedule."""
    for name, adding in TIMES_OF_ACTIONS.items():
        if name in flags.changed and not any(getattr(flags, flag) for flag in adding):
            needed = " or ".join(f"--{flag.replace('_', '-')}" for flag in adding)
            shown = f"--{name.replace('_', '-')} is {getattr(flags, name):g}"
            raise ScheduleError(f"{shown}, but needs {needed}; pass both or neither")


def check_order_times(flags: argparse.Namespace, name: str) -> None:
    """Raise ScheduleError for the time of an action if the order of the schedule depends on no times."""
    if not is_schedule_file(name) and (flags.two_bp or "times" in find_generator(name).order_options):
        return
    for flag in ORDER_TIMES:
        if flag in flags.changed:
            shown = f"--{flag.replace('_', '-')} is {getattr(flags, flag):g}"
            raise ScheduleError(f"{shown}, but the order of {name} depends on no times; leave it out")


def check_group_time(flags: argparse.Namespace, simulations: Iterable[Simulation]) -> None:
    """Raise ScheduleError for a time of overlapped actions if no simulation has any."""
    if flags.group_time != 1.0 and not any((each.table.group >= 0).any() for each in simulations):
        raise ScheduleError(
            f"--group-time is {flags.group_time:g}, but {flags.schedule} overlaps no "
            "actions; leave it out, or choose a schedule that does (docs/schedules.md)"
        )


def _num_shards(flags: argparse.Namespace) -> int:
    return 2 * flags.ranks if flags.vocabulary else 0


def _check_positive(flags: argparse.Namespace, name: str) -> None:
    if (value := getattr(flags, name)) is not None and value < 1:
        raise ScheduleError(f"--{name} is {value}; it must be at least 1, or left out to keep all activations")


def _spans(flags: argparse.Namespace, num_stages: int) -> list[list[range]]:
    _check_positive(flags, "recompute")
    if flags.recompute is None:
        return []
    units, shards = range(flags.units), _num_shards(flags)
    spans = [units[at : at + flags.recompute] for at in units[:: flags.recompute]]
    return [spans] * (num_stages - shards) + [[] for _ in range(shards)]


def _offload(flags: argparse.Namespace, num_stages: int) -> Offload:
    _check_positive(flags, "offload")
    shards = _num_shards(flags)
    if flags.offload is None and flags.prefetch != 1:
        raise ScheduleError(f"--prefetch is {flags.prefetch}, but needs --offload; pass both, or leave it out")
    moved: tuple[int, ...] = () if flags.offload is None else tuple(range(0, flags.units, flags.offload))
    units = () if flags.offload is None else (moved,) * (num_stages - shards) + ((),) * shards
    state = flags.offload_state or flags.offload_weights > 0
    return Offload(units, flags.prefetch, state)


def _times(flags: argparse.Namespace) -> Times:
    whole = flags.backward if flags.backward is not None else 2.0 * flags.forward
    halves = [flags.backward_input, flags.backward_weight]
    of_input, of_weight = (whole / 2.0 if half is None else half for half in halves)
    return Times(flags.forward, of_input, of_weight, flags.latency)


def costs_of(flags: argparse.Namespace, header: Header) -> Costs:
    """Return the times of the flags for the stages of a schedule."""
    if (flags.bandwidth is None) != (flags.message is None):
        raise ScheduleError("--bandwidth (bytes per time unit) and --message need each other; pass both or neither")
    if flags.bandwidth is not None and flags.bandwidth <= 0:
        raise ScheduleError(f"--bandwidth is {flags.bandwidth:g}; it must be above 0")
    transfer = 0.0 if flags.bandwidth is None else flags.message / flags.bandwidth
    return rank_costs(
        header, forward=flags.forward, recompute=flags.recompute_time, backward=flags.backward,
        backward_input=flags.backward_input, backward_weight=flags.backward_weight, update=flags.update_time,
        reduce_gradients=flags.reduce_time, gather_weights=flags.gather_time, reduce_scalars=flags.scalars_time,
        link=Link(flags.latency, transfer), blocking_sends=flags.blocking_sends, offload=flags.offload_time,
        offload_state=flags.offload_state_time, snapshot=flags.snapshot_time, group=flags.group_time,
        vocabulary=flags.vocabulary_time,
    )  # fmt: skip


def steps_of(flags: argparse.Namespace, schedule: Schedule) -> int:
    """Return the number of optimizer steps to simulate."""
    steps: int = flags.steps if flags.steps is not None else 1 if schedule.flushes else NEVER_FLUSHING_STEPS
    if steps < 1:
        raise ScheduleError(f"--steps is {steps}; it must be at least 1")
    forwards = schedule.header.num_microbatches * len(schedule.header.stages)
    if steps * forwards > MOST_FORWARDS:
        raise ScheduleError(
            f"--steps is {steps} with {forwards:,} forwards per step; the "
            f"maximum to simulate is {max(1, MOST_FORWARDS // forwards):,} steps"
        )
    return steps
