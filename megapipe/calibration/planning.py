"""`--plan`: the layout of a run, planned where it starts. Every rank plans by itself and comes to the same answer: it
is a function of the configuration, the machine's kind and the number of ranks alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch

from megapipe.config.errors import ConfigError
from megapipe.config.load import Given
from megapipe.config.run import PretrainConfig
from megapipe.config.words import seconds_told
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.reader import PRESETS, load_hardware
from megapipe.parallel.launch import DeviceChoice, set_driver_variables
from megapipe.planner.command.arguments import MEMORY_RESERVE
from megapipe.planner.command.planning import measured_times, provenance
from megapipe.planner.recompute_auto import limited
from megapipe.planner.report.words import layout_told
from megapipe.planner.search.plan import BEST_ALONE, search_speed

AUTO = "auto"
SIZE_TOLERANCE = 0.2
"""By how much a GPU's memory may differ from its preset's, whose makers count GB where drivers count GiB."""


def planned(
    given: Given[PretrainConfig], plan: str, environment: Mapping[str, str], world_size: int
) -> tuple[PretrainConfig, str]:
    """The configuration with the best layout filled in, and a line about it.

    plan: `auto`, a preset or a hardware file. environment: of the process, in which torchrun says how many ranks a
    node runs.

    Raises ConfigError where the machine is not known, or no layout runs on so many ranks.
    """
    config = given.config
    if config.training.precision == "auto":
        raise ConfigError(
            "training.precision auto cannot be combined with --plan, because it is measured after the layout is "
            "known; set a precision"
        )
    per_node = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    hardware = this_machine(config.parallel.device, per_node) if plan == AUTO else load_hardware(plan)
    pinned = given.fields
    if config.recompute.method == "auto":
        config, hardware = limited(config, hardware)  # its budget is a reserve already
        pinned -= {"recompute.method"}
    else:
        hardware = hardware.with_share(1 - MEMORY_RESERVE)
    times = measured_times(hardware, world_size)
    findings = search_speed(config, hardware, world_size, pinned, times=times, effort=BEST_ALONE)
    best = findings.best
    chosen = best.config
    if given.config.recompute.method == "auto":
        # The search tries whole methods; within the layout that it found, the budget's own choice is no slower.
        auto = given.config.recompute
        named = auto.hardware if plan == AUTO or auto.hardware is not None else plan
        chosen = replace(chosen, recompute=replace(auto, hardware=named))
    line = (
        f"plan for {world_size} x {hardware.groups[0].device.name}: {layout_told(chosen)}; predicted "
        f"{seconds_told(best.estimate.step_seconds)} a step ({provenance(hardware)}), {findings.layouts:,} layouts "
        "considered"
    )
    return chosen, line


def this_machine(device: str, per_node: int, option: str = "--plan") -> Hardware:
    """The preset of the devices here, in nodes of as many as run on this one.

    device: as parallel.device says. option: what a file may be given to instead. Raises ConfigError for a GPU without
    a preset.
    """
    set_driver_variables(cast(DeviceChoice, device))
    if device == "cpu" or not torch.cuda.is_available():
        return _in_nodes(load_hardware("cpu"), per_node)
    found = torch.cuda.get_device_properties(0)
    return _in_nodes(load_hardware(preset_of(found.name, found.total_memory, option)), per_node)


def preset_of(name: str, memory_bytes: float, option: str = "--plan") -> str:
    """The preset of a GPU that calls itself so, such as `NVIDIA A100-SXM4-80GB`.

    Raises ConfigError for none, which tells that a file may be given to `option`.
    """
    words = name.upper().replace("-", " ").split()
    misses = {}
    for preset in PRESETS:
        device = load_hardware(preset).groups[0].device
        # a100-80-25gbe and the like are the same devices behind another network.
        if device.name.upper().partition("-")[0] in words and "gbe" not in preset:
            misses[preset] = abs(memory_bytes / device.memory_bytes - 1)
    nearest = min(misses, key=lambda preset: misses[preset], default=None)
    if nearest is None or misses[nearest] > SIZE_TOLERANCE:
        raise ConfigError(
            f"no preset matches {name!r} with {memory_bytes / 1e9:.0f} GB (presets: {', '.join(PRESETS)}); measure "
            "it with megapipe plan profile --output machine.yaml, or describe it (docs/hardware.md), and give "
            f"{option} machine.yaml"
        )
    return nearest


def _in_nodes(hardware: Hardware, per_node: int) -> Hardware:
    """Any number of nodes, each of as many devices as this one runs ranks."""
    node = replace(hardware.groups[0], devices_per_node=per_node, num_nodes=None)
    return replace(hardware, groups=(node,))
