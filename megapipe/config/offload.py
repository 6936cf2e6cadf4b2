"""What leaves the device for host memory between its uses."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class OffloadConfig:
    """Activations, optimizer state and weights in host memory while nothing computes with them."""

    activations: Literal["none", "blocks", "auto"] = "none"
    """none; blocks moves those of each stage's blocks, `every` and `num_blocks` of them; auto keeps, moves or
    recomputes each block's, so that they fit into `memory` and copies hide behind compute (docs/offload.md)."""
    every: int = 1
    """blocks: every how many of a stage's blocks one is moved, the first one first."""
    num_blocks: int | None = None
    """blocks: how many of a stage's blocks are moved at most (null: all that `every` names)."""
    prefetch: int | None = None
    """Compute actions between a reload and its backward: as many units wait on the device at most (null: 1; under auto
    what needs least recomputation, up to 4)."""
    memory: float | None = None
    """auto: GiB of activations that a rank may hold on its device."""
    bandwidth: float | None = None
    """auto: GB/s of a copy between device and host, one way (null: measured at the start)."""
    compute: float | None = None
    """auto: TFLOP/s that the blocks run at (null: those of a large matrix product, measured at the start)."""
    optimizer: bool = False
    """Keep moments, and the fp32 master of bf16 runs, in host memory but for each unit's update."""
    weights: bool = False
    """Keep weights in host memory, too, but for those of the layers that compute."""
    weight_buffers: int = 2
    """weights: layers whose weights a rank may hold on its device at once; 2 copies one layer ahead of its use."""

    @property
    def buffers(self) -> int:
        """Layers whose weights come and go on a device; 0 where all weights stay."""
        return self.weight_buffers if self.weights else 0

    def problems(self) -> list[str]:
        """Rules that single fields break, one message each."""
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
                "offload.every and offload.num_blocks need offload.activations blocks; set it, or leave them out"
            )
        if self.activations == "auto" and self.memory is None:
            found.append(
                "offload.activations auto needs offload.memory, the GiB of activations that a rank may hold; give it"
            )
        if self.activations != "auto" and any(value is not None for _, value in measures):
            found.append(
                "offload.memory, offload.bandwidth and offload.compute need offload.activations auto; set it, or "
                "leave them out"
            )
        if self.activations == "none" and self.prefetch is not None:
            found.append("offload.prefetch needs offload.activations blocks or auto; set it, or leave it out")
        if self.weights and not self.optimizer:
            found.append(
                "offload.weights needs offload.optimizer: weights are updated as optimizer state is; set it true, or "
                "leave offload.weights out"
            )
        if not self.weights and self.weight_buffers != OffloadConfig.weight_buffers:
            found.append("offload.weight_buffers needs offload.weights; set it true, or leave it out")
        return found
