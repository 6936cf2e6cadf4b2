"""Choices of the planner at the start of a run: the layout for --plan, and the method for recompute.method auto."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import torch

from megapipe.config import ConfigError
from megapipe.config.command_line import seconds_text
from megapipe.config.load import Given
from megapipe.config.run import PretrainConfig
from megapipe.layers.attention import has_amx
from megapipe.layout.hardware.description import PRESETS, Hardware, hardware_device_type, load_hardware
from megapipe.parallel.launch import DeviceChoice, ranks_per_node, set_driver_variables
from megapipe.parallel.mesh import Mesh
from megapipe.planner.command.main import MEMORY_RESERVE
from megapipe.planner.command.planning import layout_text, measured_times, provenance
from megapipe.planner.recompute import limited, resolved
from megapipe.planner.search.plan import BEST_ALONE, search_speed

AUTO = "auto"
SIZE_TOLERANCE = 0.2
"""Maximum relative difference between the memory of a GPU and of its preset: data sheets use GB, drivers GiB."""


def planned(
    given: Given[PretrainConfig], plan: str, environment: Mapping[str, str], world_size: int
) -> tuple[PretrainConfig, str]:
    """Return the configuration with the best layout filled in, and a line about it.

    Every rank plans independently and gets the same result, which depends only on the configuration, the kind of
    machine and the number of ranks.

    plan: `auto`, a preset or a hardware file. environment: environment variables of the process; torchrun sets the
    number of ranks per node in them.

    Raises ConfigError if the machine is unknown, or if no layout fits on this number of ranks.
    """
    config = given.config
    if config.training.precision == "auto":
        raise ConfigError(
            "training.precision auto cannot be combined with --plan, "
            "because it is measured after the layout is known; set a precision"
        )
    per_node = ranks_per_node(environment, world_size)
    hardware = this_machine(config.parallel.device, per_node) if plan == AUTO else load_hardware(plan)
    pinned = given.fields
    if config.recompute.method == "auto":
        config, hardware = limited(config, hardware)  # the budget already includes a reserve
        pinned -= {"recompute.method"}
    else:
        hardware = hardware.with_share(1 - MEMORY_RESERVE)
    times = measured_times(hardware, world_size)
    findings = search_speed(config, hardware, world_size, pinned, times=times, effort=BEST_ALONE)
    best = findings.best
    chosen = best.config
    if given.config.recompute.method == "auto":
        # The search only tries one method for all blocks. In the chosen layout, auto is at least as fast.
        auto = given.config.recompute
        hardware_name = auto.hardware if plan == AUTO or auto.hardware is not None else plan
        chosen = replace(chosen, recompute=replace(auto, hardware=hardware_name))
    line = (
        f"plan for {world_size} x {hardware.groups[0].device.name}: "
        f"{layout_text(chosen)}; predicted {seconds_text(best.estimate.step_seconds)} "
        f"a step ({provenance(hardware)}), {findings.layouts:,} layouts considered"
    )
    return chosen, line


def this_machine(device: str, per_node: int, option: str = "--plan") -> Hardware:
    """Return the preset of the devices of this host, in nodes with one device for each rank on this node.

    device: as in parallel.device. option: the option that accepts a hardware file instead, for messages. Raises
    ConfigError for a GPU without a preset.
    """
    set_driver_variables(cast(DeviceChoice, device))
    if device == "cpu" or not torch.cuda.is_available():
        return _in_nodes(load_hardware("cpu"), per_node)
    gpu = torch.cuda.get_device_properties(0)
    return _in_nodes(load_hardware(preset_of(gpu.name, gpu.total_memory, option)), per_node)


def preset_of(name: str, memory_bytes: float, option: str = "--plan") -> str:
    """Return the preset of a GPU by its name, such as `NVIDIA A100-SXM4-80GB`.

    Raises ConfigError if there is none; the message says that `option` accepts a file.
    """
    words = name.upper().replace("-", " ").split()
    misses = {}
    for preset in PRESETS:
        device = load_hardware(preset).groups[0].device
        # Presets such as a100-80-25gbe have the same devices with another network.
        if device.name.upper().partition("-")[0] in words and "gbe" not in preset:
            misses[preset] = abs(memory_bytes / device.memory_bytes - 1)
    nearest = min(misses, key=lambda preset: misses[preset], default=None)
    if nearest is None or misses[nearest] > SIZE_TOLERANCE:
        raise ConfigError(
            f"no preset matches {name!r} with {memory_bytes / 1e9:.0f} GB (presets: "
            f"{', '.join(PRESETS)}); measure it with megapipe plan profile --output "
            f"machine.yaml, or describe it (docs/hardware.md), and give {option} machine.yaml"
        )
    return nearest


def _in_nodes(hardware: Hardware, per_node: int) -> Hardware:
    """Return any number of nodes with the devices of `hardware`, `per_node` each."""
    node = replace(hardware.groups[0], devices_per_node=per_node, num_nodes=None)
    return replace(hardware, groups=(node,))


def with_recompute(config: PretrainConfig, mesh: Mesh, say: Callable[[str], None]) -> PretrainConfig:
    """Return the configuration with recompute.method auto replaced by the planner's choice. A collective call.

    Rank 0 chooses for all ranks, by the minimum memory of their devices. A resumed run chooses again, because its
    layout, budget or machine may have changed, and no gradient depends on the choice.

    Raises ConfigError, the same on every rank, if nothing fits.
    """
    if config.recompute.method != "auto":
        return config
    per_node = ranks_per_node(os.environ, mesh.world.size)
    device_bytes = min(mesh.world.all_gather_object(memory_bytes(mesh.device, per_node)))
    outcome: tuple[PretrainConfig, str | None] | ConfigError | None = None
    if mesh.rank == 0:
        try:
            device = mesh.device.type
            hardware, amx = _hardware(config, device, per_node), device == "cpu" and has_amx()
            outcome = resolved(config, hardware, mesh.world.size, device_bytes=device_bytes, amx=amx)
        except ConfigError as error:  # otherwise the other ranks would wait for this one
            outcome = error
    answer = mesh.world.all_gather_object(outcome)[0]
    if isinstance(answer, ConfigError):
        raise answer
    chosen, remark = answer
    if remark is not None:
        say(remark)
    return replace(config, recompute=chosen.recompute)


def memory_bytes(device: torch.device, ranks: int) -> int:
    """Return the memory of the device in bytes; on a CPU, an equal part of the host's memory for each rank."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks


def _hardware(config: PretrainConfig, device: str, per_node: int) -> Hardware:
    """Return the hardware whose times the choice uses. Raises ConfigError if it is unknown or has other devices."""
    hardware_name = config.recompute.hardware
    if hardware_name is None:
        return _with_peak(this_machine(device, per_node, option="--recompute.hardware"), config.training.precision)
    hardware = load_hardware(hardware_name)
    if hardware_device_type(hardware) != device:
        raise ConfigError(
            f"recompute.hardware {hardware_name} describes {hardware_device_type(hardware)} devices, but this run "
            f"uses {device}; name a file or preset for that type of device, or leave it out"
        )
    return hardware


def _with_peak(hardware: Hardware, precision: str) -> Hardware:
    """Add a missing precision to a preset, with its fastest rate, because only ratios between choices matter."""
    peaks = hardware.groups[0].device.peak_flops
    if precision in peaks:
        return hardware
    completed = {**peaks, precision: max(peaks.values())}
    return hardware.with_devices(lambda device: replace(device, peak_flops=completed))
