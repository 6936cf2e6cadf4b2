"""A schedule for a run: built by its name, or read from a file and fitted to the run."""

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Unpack

from megapipe.config.files import read_text
from megapipe.schedules.actions import GROUP, KIND, SLOT, UNIT, VERSION, Kind
from megapipe.schedules.building_blocks import EQUAL_TIMES, split_backwards
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.lowering import Spans, lower
from megapipe.schedules.memory import NOTHING, Offload
from megapipe.schedules.parameters import UNKNOWN, FileParameters
from megapipe.schedules.registry import Options, find_generator
from megapipe.schedules.schedule import Header, Mode, Schedule, Sections, StagePlace
from megapipe.schedules.states import WHOLE_STATES, StateTable
from megapipe.schedules.text import has_parameters, loads, loads_header
from megapipe.schedules.validation import check_compute, check_stages, validate
from megapipe.schedules.vocabulary import vocabulary_shards, with_vocabulary

MOST_FORWARDS = 4_000_000
"""Largest number of forwards of all stages in a step. A larger schedule takes minutes and gigabytes to lower and to
simulate."""
MOST_RANKS = isqrt(MOST_FORWARDS)
"""Largest number of pipeline ranks of a lowered schedule: in its collectives, every rank waits for every other one,
so the number of waits grows with the square of the ranks."""


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    mode: Mode = "train",
    units_per_stage: Sequence[int] | None = None,
    tied_groups: Sequence[Sequence[int]] = (),
    data_parallel: bool = False,
    states: StateTable = WHOLE_STATES,
    receive_ahead: int = 1,
    recompute: Spans = (),
    offload: Offload = NOTHING,
    vocabulary: int = 0,
    **options: Unpack[Options],
) -> Schedule:
    """Generate and lower the schedule that has this name.

    Args:
        name: a key of ``GENERATORS``.
        num_ranks: pipeline ranks.
        num_microbatches: micro-batches of one optimizer step on this pipeline.
        mode: "train", or "forward" for evaluation: forwards and activation transfers alone.
        units_per_stage: units of each stage, ascending by stage; one each by default.
        tied_groups: per tied weight, the stages that use it.
        data_parallel: reduce gradients unit by unit: over data-parallel replicas, or tensor ranks that shard tokens.
        states: the state units of each stage, and which state of each is sharded (ZeRO); by default each layer is one
            unit that is kept whole.
        receive_ahead: maximum number of compute actions between the posting of a receive and its use.
        recompute: per stage, ranges of units whose forwards keep only their input and are recomputed before the
            backward; nothing by default.
        offload: tensors that go to host memory between their uses; none by default.
        vocabulary: 1 or 2 to split output layer and input embedding over all ranks, with this variant of their passes:
            each rank gets two more stages, its shards (`with_vocabulary`). 0 keeps both layers whole, on the last and
            the first stage.
        options: further options of the named schedule, see :class:`Options`.

    Raises:
        ScheduleError: an unknown name or option, or sizes that the schedule cannot run.

    Example:
        >>> from megapipe import build
        >>> build("interleaved_1f1b", 2, 4, chunks=2).header.stage_ranks.tolist()
        [0, 1, 0, 1]
    """
    check_ranks(name, num_ranks)
    compute = order(
        name, num_ranks, num_microbatches, mode=mode, units_per_stage=units_per_stage, tied_groups=tied_groups,
        data_parallel=data_parallel, states=states, vocabulary=vocabulary, **options,
    )  # fmt: skip
    generator = find_generator(name)
    # `order` has checked the actions of other generators, but not with shards of the vocabulary.
    checked = generator.built_in or not vocabulary
    lowered = lower(compute, receive_ahead=receive_ahead, recompute=recompute, offload=offload, checked=checked)
    if not generator.built_in:  # tests validate the built-in ones, and this takes time
        validate(lowered)
    return lowered


def order(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    mode: Mode = "train",
    units_per_stage: Sequence[int] | None = None,
    tied_groups: Sequence[Sequence[int]] = (),
    data_parallel: bool = False,
    states: StateTable = WHOLE_STATES,
    vocabulary: int = 0,
    **options: Unpack[Options],
) -> Schedule:
    """Return the named schedule's compute actions alone, ready for lowering; arguments as in :func:`build`."""
    check_microbatches(name, num_ranks, num_microbatches, **options)
    generator = find_generator(name)
    placement = generator.placed(num_ranks, options)
    arguments = generator.arguments(generator.order_options, options)
    policy = generator.policy_of(num_ranks, num_microbatches, options)
    shards = vocabulary_shards(len(placement.stages), num_ranks) if vocabulary else ()
    stages = (*placement.stages, *shards)
    units = (1,) * len(stages) if units_per_stage is None else tuple(units_per_stage)
    header = Header(
        name=name,
        mode="train",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches * generator.number_of_slices(options),
        stages=stages,
        routes=placement.routes,
        units_per_stage=units,
        numerical_class="C" if vocabulary else generator.numerical_class,
        versions_per_stage=tuple(policy.versions_by_rank[place.rank] for place in stages),
        tied_groups=tuple(map(tuple, tied_groups)),
        data_parallel=data_parallel,
        updates_per_step=policy.updates_per_step,
        gradient_buffers=policy.gradient_buffers,
        slices=generator.number_of_slices(options),
        vocabulary=tuple(place.part for place in shards),
    )
    check_stages(header)
    header = replace(header, states=states.checked(name, units))
    sections = generator.order(num_ranks, num_microbatches, **arguments)
    if not generator.built_in and not vocabulary:
        check_compute(Schedule(header, sections))
    if not generator.splits and any((rows[:, KIND] == Kind.BACKWARD_INPUT).any() for rows in sections.body):
        raise ScheduleError(f"schedule {name} splits backwards; register it with splits=True ({generator.source})")
    if options.get("two_bp", False):
        sections = split_backwards(sections, placement, options.get("times", EQUAL_TIMES), options.get("max_pending"))
    schedule = Schedule(header, sections)
    schedule = forward_only(schedule) if mode == "forward" else schedule
    return with_vocabulary(schedule, vocabulary) if vocabulary else schedule


def check_microbatches(name: str, num_ranks: int, num_microbatches: int, **options: Unpack[Options]) -> None:
    """Raise ScheduleError if the named schedule cannot run that many micro-batches on that many ranks."""
    generator = find_generator(name)
    generator.check_options(options)
    for what, value in (("pipeline ranks", num_ranks), ("micro-batches", num_microbatches)):
        if value < 1:
            raise ScheduleError(f"the number of {what} of {name} is {value}; it must be at least 1")
    slices = num_microbatches * generator.number_of_slices(options)
    _check_size(name, num_ranks * generator.number_of_chunks(options), slices)
    if "group_size" in options and options["group_size"] < 1:
        raise ScheduleError(f"{name} needs a group of at least 1 micro-batch, got {options['group_size']}")
    if generator.check is not None:
        generator.check(name, num_ranks, num_microbatches)


def _check_size(name: str, num_stages: int, num_microbatches: int) -> None:
    if num_stages * num_microbatches > MOST_FORWARDS:
        raise ScheduleError(
            f"{name} with {num_stages:,} stages and {num_microbatches:,} micro-batches "
            f"has {num_stages * num_microbatches:,} forwards per step; the maximum "
            f"is {MOST_FORWARDS:,}: use fewer stages, or fewer, larger micro-batches"
        )


def check_ranks(name: str, num_ranks: int) -> None:
    """Raise ScheduleError if a schedule has too many pipeline ranks to be lowered."""
    if num_ranks > MOST_RANKS:
        raise ScheduleError(
            f"{name} has {num_ranks:,} pipeline ranks; with their "
            f"communication, the maximum is {MOST_RANKS:,}: use fewer ranks"
        )


def forward_only(schedule: Schedule) -> Schedule:
    """Return a schedule of the forwards of one step in their order, for evaluation on the newest weights: whole
    chunks, as a generator would write them, without what lowering added."""
    body = []
    for rows in schedule.expand(1):
        whole = rows[(rows[:, KIND] == Kind.FORWARD) & (rows[:, UNIT] <= 0)]
        whole[:, [UNIT, VERSION, SLOT, GROUP]] = -1
        body.append(whole)
    header = replace(
        schedule.header,
        mode="forward",
        lowered=False,
        activation_slots=(),
        gradient_slots=(),
        versions_per_stage=(1,) * len(schedule.header.stages),
        updates_per_step=1,
        gradient_buffers=1,
    )
    return Schedule(header, Sections.flushing(body), schedule.origin)


def read_file(path: Path, sizes: FileParameters = UNKNOWN) -> Schedule:
    """Return the schedule in a text file as written: compute actions alone, or lowered.

    sizes: of the run, for a file with parameters. Raises ScheduleError for a file that cannot be read, with line and
    column for text that is not a schedule.
    """
    text = _read_text(path)
    _check_size(str(path), sizes.ranks, sizes.microbatches)
    schedule = loads(text, str(path), sizes)
    _check_size(str(path), len(schedule.header.stages), schedule.header.num_microbatches)
    return schedule


def read_file_header(path: Path, sizes: FileParameters) -> Header:
    """Return the header of the schedule in a text file; the file may refuse a run of these sizes."""
    return loads_header(_read_text(path), str(path), sizes)


def is_for_all_sizes(path: Path) -> bool:
    """Return whether a schedule file has parameters instead of numbers of ranks and micro-batches."""
    return has_parameters(_read_text(path))


def _read_text(path: Path) -> str:
    return read_text(path, ScheduleError, "choose a text file with a schedule")


def load_file(path: Path, sizes: FileParameters = UNKNOWN) -> Schedule:
    """Return the schedule in a text file, lowered if it is not yet. Raises ScheduleError; a file that has a lowered
    schedule is not validated."""
    schedule = read_file(path, sizes)
    check_ranks(str(path), schedule.header.num_ranks)
    if schedule.header.lowered:
        return schedule
    return lower(schedule)


def fit_for_training(
    schedule: Schedule,
    num_ranks: int,
    num_microbatches: int,
    *,
    mode: Mode = "train",
    units_per_stage: Sequence[int],
    tied_groups: Sequence[Sequence[int]] = (),
    data_parallel: bool = False,
    states: StateTable = WHOLE_STATES,
    receive_ahead: int = 1,
    recompute: Spans = (),
    offload: Offload = NOTHING,
) -> Schedule:
    """Return the valid, lowered schedule of a run from that of a file, as :func:`build` does for a name.

    A schedule with only compute actions need not name units, tied weights and replicas: those of the run are filled in
    before it is lowered, so that one file can be used for models of any depth. A lowered schedule must name exactly
    the run's.

    Args:
        schedule: as :func:`read_file` gives it.
        num_ranks: pipeline ranks.
        num_microbatches: micro-batches of one optimizer step on this pipeline.
        mode: "train", or "forward" for its forwards alone, on the newest weights.
        units_per_stage: units (layers) of each stage, ascending by stage.
        tied_groups: per tied weight, the stages that use it.
        data_parallel: whether gradients are reduced over replicas, or over tensor ranks that shard the tokens.
        states: the state units of each stage, and which state of each is sharded.
        receive_ahead: as in :func:`megapipe.schedules.build`; a lowered file has its own receives.
        recompute: as in :func:`megapipe.schedules.build`; a lowered file has its own recomputed forwards.
        offload: as in :func:`megapipe.schedules.build`; a lowered file has its own offloads.

    Raises:
        ScheduleError: the schedule is not valid, or does not fit the run.
    """
    header = schedule.header
    if header.mode != "train":
        raise _mismatch(header, f"it is of mode {header.mode!r}", "training needs mode 'train'")
    _check_route(header)
    _check_equal(header, "pipeline ranks", header.num_ranks, num_ranks)
    _check_equal(header, "micro-batches per step", header.whole_microbatches, num_microbatches)
    units, tied = tuple(units_per_stage), tuple(tuple(group) for group in tied_groups)
    states = states.checked(header.name, units)
    _check_equal(header, "stages", len(header.stages), len(units))
    for name, stated, wanted, default in (
        ("units (layers) by stage", header.units_per_stage, units, (1,) * len(units)),
        ("tied groups", header.tied_groups, tied, ()),
        ("sums of gradients over shards of the tokens or replicas", header.data_parallel, data_parallel, False),
        ("weight_pool", header.states.weight_pool, states.weight_pool, 0),
        ("gradient_pool", header.states.gradient_pool, states.gradient_pool, 0),
        ("state units", header.states.units, states.units, ()),
    ):
        if header.lowered or stated != default:
            _check_equal(header, name, stated, wanted)
    if mode == "forward":
        schedule = forward_only(schedule)
    if not schedule.header.lowered:
        filled = replace(
            schedule.header,
            units_per_stage=units,
            tied_groups=tied,
            data_parallel=data_parallel,
            states=states,
        )
        schedule = replace(schedule, header=filled)
        schedule = lower(schedule, receive_ahead=receive_ahead, recompute=recompute, offload=offload)
    validate(schedule)
    return schedule


def check_one_route(name: str, num_routes: int) -> None:
    """Raise ScheduleError if training cannot run a schedule, because its micro-batches take several routes."""
    if num_routes > 1:
        raise ScheduleError(
            f"{name} runs micro-batches on {num_routes} routes, over copies of the "
            "model; training does not sum the gradients of copies, but schedules "
            "can be simulated, validated and drawn; choose one with a single route"
        )


def _check_route(header: Header) -> None:
    """Raise ScheduleError unless a file's route is the one of training, which cuts the model into stages in their
    order and runs each micro-batch through all of them."""
    if header.vocabulary:
        raise _mismatch(
            header,
            f"stages {list(header.vocabulary)} are shards of the vocabulary",
            "training adds these itself to the order of a named schedule (parallel.vocabulary pipeline)",
        )
    if any(place.replica for place in header.stages):
        raise _mismatch(
            header,
            "it runs several copies of the model through one pipeline",
            "training does not sum the gradients of copies; set replica 0 for every stage",
        )
    stages = tuple(range(len(header.stages)))
    moved = [stage for stage, place in enumerate(header.stages) if place != StagePlace(stage, 0, place.rank)]
    if header.routes != (stages,) or moved:
        raise _mismatch(
            header,
            f"it has routes {[list(route) for route in header.routes]} and parts {[p.part for p in header.stages]}",
            f"training runs every micro-batch through stages 0 to {stages[-1]} "
            "in order, stage n being part n; leave out routes, parts and replicas",
        )


def _check_equal(header: Header, name: str, stated: object, wanted: object) -> None:
    if stated != wanted:
        raise _mismatch(header, f"it was made for {name} {_shown(stated)}", f"this run has {_shown(wanted)}")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return str([list(each) if isinstance(each, tuple) else each for each in value])
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _mismatch(header: Header, problem: str, rule: str) -> ScheduleError:
    return ScheduleError(
        f"schedule {header.name} from a file does not fit this run: {problem}, but {rule}. "
        "Change the file or the run (megapipe schedule write prints a file to start from)"
    )
