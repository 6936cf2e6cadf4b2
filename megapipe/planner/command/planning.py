"""What the commands about layouts share: the configuration made ready, the machine, words about both."""

from dataclasses import replace
from typing import Any, Final, Literal

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.config.words import HOUR, count_told, duration_told
from megapipe.layout.hardware.description import Efficiency, Hardware
from megapipe.layout.hardware.precision import with_named_precision
from megapipe.layout.hardware.reader import load_hardware
from megapipe.layout.stages import layers_of
from megapipe.planner.command.arguments import NO_DATA, Request
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.measured.times import MeasuredTimes
from megapipe.planner.save_interval import lost_share, save_interval

FITTED_PRESETS = ("a100-80", "h100")
"""Presets whose efficiency was fitted to published runs; presets of the same chips have the same."""
PREFERRED: Final[tuple[Literal["bf16", "fp16", "fp32"], ...]] = ("bf16", "fp16", "fp32")
"""Precisions, the fastest first that trains without care."""


NEVER_MEASURED = "predicted times, not measured with megapipe"


def provenance(hardware: Hardware) -> str:
    """Return one line that says where the times of an output come from."""
    if hardware.measured is not None:
        return "times of layers were measured on one node of this machine; all other times are predicted"
    fitted = {load_hardware(name).groups[0].device.efficiency: name for name in FITTED_PRESETS}
    devices = {group.device.name: group.device.efficiency for group in hardware.groups}
    parts = []
    for device, efficiency in devices.items():
        if efficiency == Efficiency():
            parts.append(
                f"the efficiency of {device} is unknown, so its speeds are upper bounds (megapipe plan profile "
                "measures it, megapipe plan fit derives it from runs)"
            )
        elif efficiency in fitted:
            parts.append(f"{device} is fitted to Megatron-LM's published runs on {fitted[efficiency]}")
        else:
            parts.append(f"the efficiency of {device} is that of the hardware file")
    return f"{NEVER_MEASURED}; {'; '.join(parts)}"


def planned_config(
    request: Request, hardware: Hardware, *, layout_open: bool = False
) -> tuple[PretrainConfig, list[str]]:
    """Return the configuration to plan, and remarks on what was chosen for it.

    layout_open: a search sets the layout, so rules between fields of the layout are not checked here.

    If neither a file nor a flag sets the model, it is the default one. If neither sets the precision, it is the first
    of bf16, fp16, fp32 that all devices support; with --config, it is fp32, because training would run that file in
    fp32. Precision auto is resolved by the devices' peaks. A remark reports each of these choices.

    Raises ConfigError with every rule that single fields break; data.prefix may be missing.
    """
    config, remarks = request.config, []
    written = request.flags.get("config") or any(path.partition(".")[0] == "model" for path in request.given)
    if not written:
        model = config.model
        remarks.append(
            f"no model was given, so this is the default one with {model.num_layers} layers of hidden size "
            f"{model.hidden_size}; set another with --model FILE or --model.FIELD VALUE"
        )
    if "training.precision" not in request.given and request.flags.get("config"):
        remarks.append(
            f"training.precision is {config.training.precision}, the default of training, because the configuration "
            "does not set it; --training.precision bf16 plans mixed precision"
        )
    elif "training.precision" not in request.given:
        common = [name for name in PREFERRED if all(name in group.device.peak_flops for group in hardware.groups)]
        if common:
            config = replace(config, training=replace(config.training, precision=common[0]))
            remarks.append(
                f"training.precision was not given, so it is {common[0]}, the first of {', '.join(PREFERRED)} that "
                "all devices support"
            )
    config, remark = with_named_precision(config, (group.device for group in hardware.groups))
    remarks += [] if remark is None else [remark]
    if not layout_open:
        check_fields(config)
    remarks.append(provenance(hardware))
    reserved = request.default_reserve()
    if reserved:
        remarks.append(
            f"{reserved:.0%} of each device's memory is reserved for CUDA, NCCL and fragmentation; --memory_reserve "
            "GB sets another amount"
        )
    return config, remarks


def check_fields(config: PretrainConfig) -> None:
    """Raise ConfigError with every rule that single fields break; that data is named is not asked for."""
    named = config
    if not config.data.prefixes[0]:
        named = replace(config, data=replace(config.data, prefix=NO_DATA))
    problems = config.model.problems() + named.problems()
    if problems:
        raise ConfigError(problems)


def measured_times(hardware: Hardware, devices: int) -> LayerTimes | None:
    """What was measured of layers, where the ranks are those of the measured machine; None for the roofline."""
    on_one = hardware.measured is not None and len(hardware.nodes(devices)) == 1
    return MeasuredTimes(hardware) if on_one else None


def num_parameters(config: PretrainConfig) -> int:
    """Of the whole model, tied weights once."""
    return sum(
        {spec.name: spec.num_elements for layer in layers_of(config) for spec in layer.parameters.values()}.values()
    )


def run_told(config: PretrainConfig, hardware: Hardware, devices: int) -> str:
    """Model, machine and batch in a line."""
    nodes = hardware.nodes(devices)
    names = ", ".join(dict.fromkeys(node.device.name for node in nodes))
    return (
        f"{config.kind.upper()} of {count_told(num_parameters(config))} parameters on {devices:,} x {names} "
        f"({len(nodes):,} node{'s' if len(nodes) > 1 else ''}); a step is {config.batch.global_size:,} samples of "
        f"{config.data.sequence_length:,} tokens, in {config.training.precision}"
    )


def checkpoint_facts(request: Request, step_seconds: float) -> dict[str, float] | None:
    """How often to save, by Young's and Daly's rule; None where nothing was said of failures.

    Raises ConfigError where one of the two flags is missing or not above 0.
    """
    hours, save = request.flags["mean_time_between_failures"], request.flags["save_seconds"]
    if hours is None and save is None:
        return None
    if hours is None or save is None:
        missing = "save_seconds" if save is None else "mean_time_between_failures"
        raise ConfigError(
            f"--{missing} is missing; how often to save depends on both the time between failures and the time of a "
            "save"
        )
    if hours <= 0 or save <= 0:
        raise ConfigError(f"--mean_time_between_failures {hours:g} and --save_seconds {save:g} must be above 0")
    interval = save_interval(save, hours * HOUR)
    return {
        "interval_s": interval,
        "interval_steps": max(1.0, round(interval / step_seconds)),
        "lost_share": lost_share(interval, save, hours * HOUR),
    }


def checkpoint_told(facts: dict[str, Any]) -> str:
    """The rule's answer in a line."""
    return (
        f"save every {duration_told(facts['interval_s'])} (--checkpoint.every {facts['interval_steps']:.0f}): saves "
        f"and repeated work take {facts['lost_share']:.1%} of the time (Young 1974, Daly 2006)"
    )
