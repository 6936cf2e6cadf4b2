"""`recompute.method auto` of a run: chosen by the planner for the devices at hand, the same on every rank."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from megapipe.calibration.device import memory_bytes
from megapipe.calibration.planning import this_machine
from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layers.attention import has_amx
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.device_type import hardware_device_type
from megapipe.layout.hardware.reader import load_hardware
from megapipe.parallel.mesh import Mesh
from megapipe.planner.recompute_auto import Resolved, resolved


def with_recompute(config: PretrainConfig, mesh: Mesh, say: Callable[[str], None]) -> PretrainConfig:
    """The configuration with recompute.method auto replaced by what this run recomputes; a collective call.

    Rank 0 chooses for all, by the least memory of any rank's device. A run that goes on from a checkpoint chooses
    anew: its layout, budget or machine may be another, and no gradient depends on the choice.

    Raises ConfigError, the same on every rank, where nothing fits.
    """
    if config.recompute.method != "auto":
        return config
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world.size))
    device_bytes = min(mesh.world.all_gather_object(memory_bytes(mesh.device, per_node)))
    outcome: Resolved | ConfigError | None = None
    if mesh.rank == 0:
        try:
            outcome = _chosen(config, mesh, per_node, device_bytes)
        except ConfigError as error:  # a rank that left by itself would leave the others waiting
            outcome = error
    first = mesh.world.all_gather_object(outcome)[0]
    if isinstance(first, ConfigError):
        raise first
    found = cast(Resolved, first)
    if found.remark is not None:
        say(found.remark)
    return replace(config, recompute=found.config.recompute)


def _chosen(config: PretrainConfig, mesh: Mesh, per_node: int, device_bytes: float) -> Resolved:
    device = mesh.device.type
    amx = device == "cpu" and has_amx()
    return resolved(config, _hardware(config, device, per_node), mesh.world.size, device_bytes=device_bytes, amx=amx)


def _hardware(config: PretrainConfig, device: str, per_node: int) -> Hardware:
    """By whose times to choose. Raises ConfigError for a machine that is not known, or is no such machine."""
    named = config.recompute.hardware
    if named is None:
        return _with_peak(this_machine(device, per_node, option="--recompute.hardware"), config.training.precision)
    hardware = load_hardware(named)
    if hardware_device_type(hardware) != device:
        raise ConfigError(
            f"recompute.hardware {named} describes {hardware_device_type(hardware)} devices, but this run uses "
            f"{device}; name a file or preset for that type of device, or leave it out"
        )
    return hardware


def _with_peak(hardware: Hardware, precision: str) -> Hardware:
    """The same where a preset says nothing of a number format: its fastest is as good, since choices are compared."""
    group = hardware.groups[0]
    peaks = group.device.peak_flops
    if precision in peaks:
        return hardware
    device = replace(group.device, peak_flops={**peaks, precision: max(peaks.values())})
    return replace(hardware, groups=(replace(group, device=device),))
