"""Shared functions of the commands: the configuration to plan, the machine, the cost of training, printed text and
files."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, Literal

import yaml

from megapipe.config import ConfigError
from megapipe.config.command_line import DAY, HOUR, aligned, bytes_text, count_text, duration_text, seconds_text
from megapipe.config.memory import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Efficiency, Hardware, load_hardware, with_named_precision
from megapipe.layout.scheduling import schedule_name
from megapipe.layout.stages import num_parameters
from megapipe.planner.command.main import NO_DATA, Request
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.measured import MeasuredTimes, is_measured


def layout_cells(config: PretrainConfig) -> dict[str, str]:
    """Return the table cells of a layout, by column."""
    parallel = config.parallel
    return {
        "data": "open" if parallel.data is None else str(parallel.data),
        "pipeline": str(parallel.pipeline),
        "context": str(parallel.context),
        "tensor": f"{parallel.tensor}{f' + {sequence_text(config)}' if parallel.sequence else ''}",
        "micro-batch": str(config.batch.micro_size),
        "schedule": schedule_text(config),
        "ZeRO": str(config.zero.stage),
        "recompute": recompute_text(config.recompute),
    }


def sequence_text(config: PretrainConfig) -> str:
    """Return `sequence`, or `sequence x 4` if its traffic overlaps with products in four chunks."""
    chunks = config.parallel.sequence_chunks
    return f"sequence x {chunks}" if chunks > 1 else "sequence"


def schedule_text(config: PretrainConfig) -> str:
    """Return the name of the schedule, with its chunks if they are set, such as `interleaved_1f1b x 2`."""
    name, chunks = schedule_name(config), config.schedule.chunks
    return f"{name} x {chunks}" if chunks is not None else name


def recompute_text(recompute: RecomputeConfig) -> str:
    """Return the method and, if not everything is recomputed, its parts or number of blocks, such as `full x 2`."""
    if recompute.method == "selective" and set(recompute.parts) != set(RecomputeConfig().parts):
        return f"selective {' + '.join(recompute.parts)}"
    if recompute.method == "full" and recompute.num_blocks is not None:
        return f"full x {recompute.num_blocks}"
    return recompute.method


def layout_text(config: PretrainConfig) -> str:
    """Return a layout in one line, without features that are off."""
    parallel = config.parallel
    names = ("data", "pipeline", "context", "tensor")
    sizes = [(name, getattr(parallel, name) or 1) for name in names]  # data may be None
    parts = [f"{name} {size}" for name, size in sizes if size > 1] or ["one rank"]
    if parallel.pipeline > 1:
        parts.append(schedule_text(config))
    if parallel.sequence:
        parts.append(sequence_text(config))
    if config.zero.stage:
        parts.append(f"ZeRO {config.zero.stage}")
    if config.recompute.method != "none":
        parts.append(f"recompute {recompute_text(config.recompute)}")
    return ", ".join([*parts, f"micro-batch {config.batch.micro_size}"])


def figures_cells(estimate: Estimate) -> dict[str, str]:
    """Return the table cells of an estimate, by column."""
    figures = estimate.as_json()
    return {
        "step": seconds_text(estimate.step_seconds),
        "tokens/s/device": f"{figures['tokens_per_s_per_device']:,.0f}",
        "TFLOP/s/device": f"{figures['model_tflops_per_device']:.1f}",
        "memory": bytes_text(estimate.peak_bytes),
        "fits": "yes" if estimate.fits else f"no, by {bytes_text(estimate.missing_bytes)}",
    }


def terms_cells(estimate: Estimate) -> list[dict[str, str]]:
    """Return the table cells of each term of a step, by column, with the source of the term."""
    return [
        {
            "term": term.name,
            "time": seconds_text(term.seconds),
            "of the step": f"{term.seconds / estimate.step_seconds:.1%}",
            "source": term.source,
        }
        for term in estimate.terms
    ]


def print_cells(rows: Sequence[Mapping[str, str]], title: str = "") -> None:
    """Print rows with `print_table`; the keys of the first row are the columns."""
    print_table(list(rows[0]), [list(row.values()) for row in rows], title)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table: with rich on a terminal, otherwise as plain text with one line per row."""
    if not sys.stdout.isatty():
        print(plain_table(columns, rows, title))
        return
    # Imported here, because the import takes longer than printing.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name, *cells in zip(columns, *rows, strict=True):
        table.add_column(name, justify="right" if _are_numbers(cells) else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Return the table as text, with numbers aligned to the right."""
    lines = aligned([columns, *rows], _are_numbers)
    return "\n".join([title, *lines] if title else lines)


def _are_numbers(cells: Sequence[str]) -> bool:
    """Return whether all cells that are not empty, at least one, start with a digit or a sign."""
    starts = [cell[0] for cell in cells if cell]
    return bool(starts) and all(start.isdigit() or start in "+-" for start in starts)


FITTED_PRESETS = ("a100-80", "h100")
"""Presets whose efficiency was fitted to published runs; other presets of these chips have the same."""
PREFERRED: Final[tuple[Literal["bf16", "fp16", "fp32"], ...]] = ("bf16", "fp16", "fp32")
"""Precisions in order of preference."""


def provenance(hardware: Hardware) -> str:
    """Return one line that describes the source of the times in an output."""
    if hardware.measured is not None:
        others = any(each.device is not hardware.groups[0].device for each in hardware.groups)
        also = ", and those of layers if a run also uses other devices" if others else ""
        return f"times of layers were measured on one node of this machine; all other times are predicted{also}"
    fitted = {load_hardware(name).groups[0].device.efficiency: name for name in FITTED_PRESETS}
    devices = {group.device.name: group.device.efficiency for group in hardware.groups}
    parts = []
    for device, efficiency in devices.items():
        if efficiency == Efficiency():
            parts.append(
                f"the efficiency of {device} is unknown, so its speeds are upper bounds "
                "(megapipe plan profile measures it, megapipe plan fit derives it from runs)"
            )
        elif efficiency in fitted:
            parts.append(f"{device} is fitted to Megatron-LM's published runs on {fitted[efficiency]}")
        else:
            parts.append(f"the efficiency of {device} is that of the hardware file")
    return f"predicted times, not measured with megapipe; {'; '.join(parts)}"


def planned_config(
    request: Request, hardware: Hardware, *, layout_open: bool = False
) -> tuple[PretrainConfig, list[str]]:
    """Return the configuration to plan, and remarks on the values that this function chose.

    If neither a file nor a flag sets the model, the default model is used. If neither sets the precision, it is the
    first of `PREFERRED` that all devices support; with --config, it is fp32, because training would run that file in
    fp32. Precision auto is resolved by the devices' peaks.

    Raises ConfigError like `check_fields`, unless layout_open, because a search sets and checks the layout.
    """
    config, remarks, from_file = request.config, [], request.flags.get("config")
    if not from_file and not any(path.partition(".")[0] == "model" for path in request.given):
        remarks.append(
            f"no model was given, so this is the default model with {config.model.num_layers} layers of hidden size "
            f"{config.model.hidden_size}; set another with --model FILE or --model.FIELD VALUE"
        )
    devices = [group.device for group in hardware.groups]
    common = [name for name in PREFERRED if all(name in each.peak_flops for each in devices)]
    if "training.precision" not in request.given and from_file:
        remarks.append(
            f"training.precision is {config.training.precision}, the default of training, because the configuration "
            "does not set it; --training.precision bf16 plans mixed precision"
        )
    elif "training.precision" not in request.given and common:
        config = replace(config, training=replace(config.training, precision=common[0]))
        remarks.append(
            f"training.precision was not given, so it is {common[0]}, the "
            f"first of {', '.join(PREFERRED)} that all devices support"
        )
    config, remark = with_named_precision(config, devices)
    remarks += [] if remark is None else [remark]
    if not layout_open:
        check_fields(config)
    remarks.append(provenance(hardware))
    if reserved := request.default_reserve():
        remarks.append(
            f"{reserved:.0%} of each device's memory is reserved for CUDA, "
            "NCCL and fragmentation; --memory_reserve GB sets another amount"
        )
    return config, remarks


def check_fields(config: PretrainConfig) -> None:
    """Raise ConfigError with every rule that a single field breaks. data.prefix may be missing."""
    data = config.data if config.data.prefixes[0] else replace(config.data, prefix=NO_DATA)
    if problems := config.model.problems() + replace(config, data=data).problems():
        raise ConfigError(problems)


def measured_times(hardware: Hardware, devices: int) -> LayerTimes | None:
    """Return the measured times of layers if all ranks are on nodes like the measured one, otherwise None for the
    roofline."""
    return MeasuredTimes(hardware) if is_measured(hardware, devices) else None


def run_line(config: PretrainConfig, hardware: Hardware, devices: int) -> str:
    """Return one line that describes model, machine and batch."""
    nodes = hardware.nodes(devices)
    names = ", ".join(dict.fromkeys(node.device.name for node in nodes))
    return (
        f"{config.kind.upper()} of {count_text(num_parameters(config))} parameters on "
        f"{devices:,} x {names} ({len(nodes):,} node{'s' if len(nodes) > 1 else ''}); "
        f"a step is {config.batch.global_size:,} samples of "
        f"{config.data.sequence_length:,} tokens, in {config.training.precision}"
    )


def priced(hardware: Hardware, price: float | None) -> Hardware:
    """Return the machine with the price of --price_per_hour for each node, if it is given. Raises ConfigError if there
    are several kinds of nodes."""
    if price is None:
        return hardware
    if len(hardware.groups) > 1:
        raise ConfigError(
            f"--price_per_hour sets one price, but hardware {hardware.name!r} has {len(hardware.groups)} kinds of "
            "nodes; write price_per_hour into each group of the hardware file"
        )
    return replace(hardware, groups=(replace(hardware.groups[0], price_per_hour=price),))


def training_facts(request: Request, answer: Estimate, hardware: Hardware) -> tuple[dict[str, Any], list[str]]:
    """Return the duration and price of a whole training run at an estimate's speed, as JSON data and as lines.

    training: steps, days and cost of --tokens, without evaluation, saves and restarts; the cost is for all
    occupied nodes, None if one has no price. checkpoint: how often to save, if the flags about failures are given.

    Raises ConfigError if only one of the flags about failures is given.
    """
    tokens, config, lines = request.flags["tokens"], answer.config, []
    training, saves = None, _checkpoint(request, answer.step_seconds)
    if tokens is not None:
        steps = math.ceil(tokens / (config.batch.global_size * config.data.sequence_length))
        seconds = steps * answer.step_seconds
        price = hardware.price_per_hour(answer.world_size)
        cost = None if price is None else seconds / HOUR * price
        training = {"tokens": tokens, "steps": steps, "days": seconds / DAY, "cost": cost}
        lines.append(
            f"{count_text(tokens)} tokens: {steps:,} steps (--training.steps {steps}), "
            f"{duration_text(seconds)}{'' if cost is None else f', price {cost:,.0f}'}; "
            "evaluation, saves and restarts not counted"
        )
    if saves is not None:
        lines.append(
            f"save every {duration_text(saves['interval_s'])} (--checkpoint.every "
            f"{saves['interval_steps']:.0f}): saves and repeated work take "
            f"{saves['lost_share']:.1%} of the time (Young 1974, Daly 2006)"
        )
    return {"checkpoint": saves, "training": training}, lines


def _checkpoint(request: Request, step_seconds: float) -> dict[str, float] | None:
    """Return how often to save, by Young's and Daly's rule; None without the flags about failures."""
    hours, save = request.flags["mean_time_between_failures"], request.flags["save_seconds"]
    if hours is None and save is None:
        return None
    if hours is None or save is None:
        missing = "save_seconds" if save is None else "mean_time_between_failures"
        raise ConfigError(
            f"--{missing} is missing; how often to save depends on both the time "
            "between failures and the time of a save; set both, or leave both out"
        )
    interval = save_interval(save, hours * HOUR)
    steps = max(1.0, round(interval / step_seconds))
    lost = lost_share(interval, save, hours * HOUR)
    return {"interval_s": interval, "interval_steps": steps, "lost_share": lost}


def save_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Return the seconds between saves that minimize the time for saves and repeated work: sqrt(2 C M).

    Young, "A first order approximation to the optimum checkpoint interval" (Communications of the ACM, 1974); Daly
    2006 (Future Generation Computer Systems 22) shows that this is the first term of the exact interval, and accurate
    if a save takes much less than the time between failures.

    save_seconds: C, time that a save adds. seconds_between_failures: M, mean time between failures of the whole job.
    """
    return math.sqrt(2 * save_seconds * seconds_between_failures)


def lost_share(interval_seconds: float, save_seconds: float, seconds_between_failures: float) -> float:
    """Return the fraction of the training time for saves and repeated work, to first order: half an interval per
    failure. interval_seconds: time between saves. See `save_interval` for the other arguments."""
    return save_seconds / interval_seconds + interval_seconds / (2 * seconds_between_failures)


ALWAYS_WRITTEN = frozenset({
    "parallel.data", "parallel.tensor", "parallel.pipeline", "parallel.context",
    "parallel.sequence", "batch.global_size", "batch.micro_size", "data.sequence_length",
    "schedule.name", "zero.stage", "recompute.method", "training.precision",
})  # fmt: skip
"""Fields that `config_yaml` writes even if they have their defaults."""


def config_yaml(config: PretrainConfig) -> str:
    """Return a configuration as YAML, with the whole layout and all fields that differ from their defaults."""
    values, defaults = asdict(config), asdict(type(config)())
    init_from = values.pop("init_from")
    groups: dict[str, object] = {}
    for group, members in values.items():
        always = {name for name in members if f"{group}.{name}" in ALWAYS_WRITTEN}
        kept = {name: value for name, value in members.items() if name in always or value != defaults[group][name]}
        if kept:
            groups[group] = kept
    return str(yaml.safe_dump(groups | ({"init_from": init_from} if init_from else {}), sort_keys=False))
