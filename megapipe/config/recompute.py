"""Which activations are recomputed in the backward pass instead of saved."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

RecomputedPart = Literal["attention", "mlp", "norms"]


@dataclass(kw_only=True)
class RecomputeConfig:
    """Activations that are recomputed in the backward pass instead of saved, to save memory."""

    method: Literal["none", "selective", "full", "auto"] = "none"
    """none: save everything. selective: recompute the activations in `parts` within each block. full: save only the
    inputs of blocks, and rerun the blocks right before their backward. auto: use the method that the planner predicts
    to be fastest among those that fit into `memory` on every rank (docs/memory.md)."""
    parts: list[RecomputedPart] = field(default_factory=lambda: ["attention", "mlp", "norms"])
    """For selective: what to recompute. attention: the attention weights of unfused attention (fused attention never
    saves them). mlp: the activation between the two matrices of the MLP. norms: the outputs of the normalizations."""
    every: int = 1
    """For full: number of neighboring blocks that are rerun together, from the input of the first. More blocks mean
    fewer saved inputs, and more activations at once."""
    num_blocks: int | None = None
    """For full: number of blocks at the start of each stage to rerun; the others save everything. null means every
    block."""
    memory: float | None = None
    """For auto: GiB that all tensors of a rank may take, including weights and optimizer state; null means the
    device's memory less a tenth."""
    hardware: str | None = None
    """For auto: hardware file or preset that predicts times; null means that of --plan, or else the preset of this
    machine's devices."""
    logits: bool = False
    """Recompute the logits in the backward pass, a chunk of tokens at a time, with any method. The loss then saves 4
    bytes per token instead of a [tokens, vocabulary] gradient, for one more matrix product in the output head. Not
    available for schedules that split the backward."""

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
        found = []
        if self.every < 1:
            found.append(f"recompute.every is {self.every}; it must be at least 1")
        if self.num_blocks is not None and self.num_blocks < 1:
            found.append(f"recompute.num_blocks is {self.num_blocks}; it must be at least 1, or null for every block")
        if self.method != "full" and (self.every != 1 or self.num_blocks is not None):
            found.append(
                f"recompute.every and recompute.num_blocks need recompute.method full, and it is {self.method}; set "
                "it to full, or leave them out"
            )
        if self.method != "auto" and (self.memory is not None or self.hardware is not None):
            found.append(
                f"recompute.memory and recompute.hardware need recompute.method auto, and it is {self.method}; set it "
                "to auto, or leave them out"
            )
        if self.memory is not None and not (isfinite(self.memory) and self.memory > 0):
            found.append(
                f"recompute.memory is {self.memory}; it must be above 0, or null for the memory of the device"
            )
        if self.method == "auto" and self.parts != RecomputeConfig().parts:
            found.append(
                "recompute.parts is set but recompute.method is auto, which chooses the parts itself; set "
                "recompute.method selective, or leave recompute.parts out"
            )
        if self.method == "selective" and not self.parts:
            found.append("recompute.parts is empty; name attention, mlp or norms, or set recompute.method none")
        return found
