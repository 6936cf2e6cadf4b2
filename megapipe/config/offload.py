"""Configuration of offloading from the device to host memory."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class OffloadConfig:
    """Activations, optimizer state and weights that are kept in host memory between uses."""

    activations: Literal["none", "blocks", "auto"] = "none"
    """Which activations are moved to host memory. blocks: those of the blocks that `every` and `num_blocks` select.
    auto: keep, move or recompute the activations of each block, so that they fit into `memory` and copies overlap with
    compute (docs/offload.md)."""
    every: int = 1
    """For blocks: move the activations of one in this many blocks of a stage, starting with the first."""
    num_blocks: int | None = None
    """For blocks: maximum number of blocks of a stage to move; null means no maximum."""
    prefetch: int | None = None
    """Number of compute actions between the start of a reload and the backward that needs it; at most as many reloaded
    blocks wait on the device. null means 1, or for auto the value up to 4 that needs the least recomputation."""
    memory: float | None = None
    """For auto: GiB of activations that a rank may keep on its device; null is only valid for the other modes."""
    bandwidth: float | None = None
    """For auto: GB/s of a copy between device and host in one direction; null means measured at the start."""
    compute: float | None = None
    """For auto: TFLOP/s at which the blocks run; null means those of a large matrix product, measured at the start."""
    optimizer: bool = False
    """Keep optimizer moments, and the fp32 master weights of bf16 runs, in host memory except during their update."""
    weights: bool = False
    """Keep weights in host memory too, except those of the layers that are computing."""
    weight_buffers: int = 2
    """With offload.weights: number of layers whose weights a rank may hold on its device at once; 2 copies one layer
    ahead of its use."""

    @property
    def buffers(self) -> int:
        """Number of layers whose weights are on the device at once; 0 if all weights stay there."""
        return self.weight_buffers if self.weights else 0

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
        found = [
            f"offload.{name} is {value}; it must be at least 1"
            for name, value in (
                ("every", self.every),
                ("num_blocks", self.num_blocks),
                ("prefetch", self.prefetch),
                ("weight_buffers", self.weight_buffers),
            )
            if value is not None and value < 1
        ]
        measures = (("memory", self.memory), ("bandwidth", self.bandwidth), ("compute", self.compute))
        found += [
            f"offload.{name} is {value}; it must be above 0"
            for name, value in measures
            if value is not None and value <= 0
        ]
        if self.activations != "blocks" and (self.every != 1 or self.num_blocks is not None):
            found.append(
                f"offload.every and offload.num_blocks need offload.activations blocks, and it is {self.activations}; "
                "set it to blocks, or leave them out"
            )
        if self.activations == "auto" and self.memory is None:
            found.append(
                "offload.activations auto needs offload.memory, the GiB of activations that a rank may hold; set it"
            )
        if self.activations != "auto" and any(value is not None for _, value in measures):
            found.append(
                "offload.memory, offload.bandwidth and offload.compute need offload.activations auto, and it is "
                f"{self.activations}; set it to auto, or leave them out"
            )
        if self.activations == "none" and self.prefetch is not None:
            found.append("offload.prefetch needs offload.activations blocks or auto; set one of them, or leave it out")
        if self.weights and not self.optimizer:
            found.append(
                "offload.weights needs offload.optimizer, because weights are updated where the optimizer state is; "
                "set offload.optimizer true, or leave offload.weights out"
            )
        if not self.weights and self.weight_buffers != OffloadConfig.weight_buffers:
            found.append(
                "offload.weight_buffers needs offload.weights; set offload.weights true, or leave "
                "offload.weight_buffers out"
            )
        return found
