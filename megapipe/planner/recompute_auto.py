"""`recompute.method auto`: another method in its place, before a run is laid out."""

from dataclasses import dataclass, replace

from megapipe.config.errors import ConfigError
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.recompute_budget import GIB, Recomputation, least_recomputation

RESERVE = 0.1
"""Of a device's memory what is left to the framework, and to predictions that are a tenth too low."""


@dataclass(frozen=True)
class Resolved:
    """config: as it was, but for its recompute group. remark: what was chosen and why; None where it was named."""

    config: PretrainConfig
    remark: str | None = None


def resolved(
    config: PretrainConfig,
    hardware: Hardware,
    world_size: int,
    *,
    device_bytes: float | None = None,
    amx: bool = False,
) -> Resolved:
    """A run with the method that auto stands for; without auto the run itself.

    hardware: of its times, and of its memory without `device_bytes`, of the device with the least. amx: as in
    `faster_path`.

    Raises ConfigError where nothing fits, or the run cannot be laid out on so many ranks.
    """
    if config.recompute.method != "auto":
        return Resolved(config)
    budget, where = _budget(config, hardware, world_size, device_bytes)
    try:
        found = least_recomputation(config, hardware, budget, world_size=world_size, amx=amx)
    except ConfigError as error:
        raise ConfigError([f"recompute.method auto: {problem} ({where})" for problem in error.problems]) from None
    return Resolved(replace(config, recompute=found.config.recompute), _told(found, where))


def limited(config: PretrainConfig, hardware: Hardware) -> tuple[PretrainConfig, Hardware]:
    """For a search over layouts: the run with its method open, on devices that have no more than auto may use."""
    groups = tuple(
        replace(group, device=replace(group.device, memory_bytes=allowed_bytes(config, group.device.memory_bytes)))
        for group in hardware.groups
    )
    plain = RecomputeConfig(logits=config.recompute.logits)
    memory = config.recompute.memory
    share = f"{1 - RESERVE:.0%} of its memory" if memory is None else f"recompute.memory {memory:g} GiB"
    return replace(config, recompute=plain), replace(hardware, name=f"{hardware.name}, {share}", groups=groups)


def allowed_bytes(config: PretrainConfig, device_bytes: float) -> float:
    """What tensors may take of a device."""
    memory = config.recompute.memory
    return (1 - RESERVE) * device_bytes if memory is None else memory * GIB


def _budget(
    config: PretrainConfig, hardware: Hardware, world_size: int, device_bytes: float | None
) -> tuple[float, str]:
    """Bytes, and where they come from."""
    if device_bytes is None:
        device_bytes = min(node.device.memory_bytes for node in hardware.nodes(world_size))
    budget = allowed_bytes(config, device_bytes)
    if config.recompute.memory is not None:
        return budget, f"recompute.memory {config.recompute.memory:g} GiB"
    return budget, f"{1 - RESERVE:.0%} of a device's {device_bytes / GIB:.3g} GiB"


def _told(found: Recomputation, where: str) -> str:
    slower = found.step_seconds / found.plain_seconds - 1
    cost = (
        "all is kept"
        if found.config.recompute.method == "none"
        else (
            f"a step takes {slower:.1%} longer than without recomputation, by {found.source}, which would need "
            f"{found.plain_bytes / GIB:.3g} GiB"
        )
    )
    return (
        f"recompute auto: {_chosen_told(found.config.recompute)}: at most {found.peak_bytes / GIB:.3g} GiB of tensors "
        f"per rank, {where}; {cost}"
    )


def _chosen_told(recompute: RecomputeConfig) -> str:
    if recompute.method == "selective":
        return f"selective ({', '.join(recompute.parts)})"
    if recompute.method == "full":
        blocks = "block" if recompute.num_blocks == 1 else f"{recompute.num_blocks} blocks"
        return f"full for the first {blocks} of each stage"
    return "none"
