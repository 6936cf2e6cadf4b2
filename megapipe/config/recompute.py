"""What is computed twice to be kept once."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

RecomputedPart = Literal["attention", "mlp", "norms"]


@dataclass(kw_only=True)
class RecomputeConfig:
    """Activations that a backward computes again instead of finding them kept."""

    method: Literal["none", "selective", "full", "auto"] = "none"
    """none; selective makes single activations of each block again in its backward, `parts`; full keeps the input of
    blocks alone and runs them again right before their backward; auto takes what is fastest by the planner and fits
    into `memory` on every rank (docs/memory.md)."""
    parts: list[RecomputedPart] = field(default_factory=lambda: ["attention", "mlp", "norms"])
    """selective: what is made again. attention: the weights of the unfused path (the fused ones never keep them); mlp:
    the activation between its two matrices; norms: what they give to the matrices behind them."""
    every: int = 1
    """full: neighbouring blocks that run again together, from the input of the first: the more, the fewer inputs are
    kept and the more activations at once."""
    num_blocks: int | None = None
    """full: the first blocks of each stage that run again, the others keep all (null: every block)."""
    memory: float | None = None
    """auto: GiB of tensors that a rank may hold at once, weights and optimizer state among them (null: what its device
    has, less a tenth)."""
    hardware: str | None = None
    """auto: hardware file or preset by whose times it chooses (null: that of --plan, or the preset of the devices at
    hand)."""
    logits: bool = False
    """With any method: of the loss keep four bytes a token, not the gradient of the logits [tokens, vocabulary],
    and compute the logits again, a chunk of tokens at a time: four products in the output projection and not three.
    Refused where backwards are split."""

    def problems(self) -> list[str]:
        """Rules that single fields break, one message each."""
        found = []
        if self.every < 1:
            found.append(f"recompute.every is {self.every}; it must be at least 1")
        if self.num_blocks is not None and self.num_blocks < 1:
            found.append(f"recompute.num_blocks is {self.num_blocks}; it must be at least 1, or null for every block")
        if self.method != "full" and (self.every != 1 or self.num_blocks is not None):
            found.append(
                "recompute.every and recompute.num_blocks need recompute.method full; set it, or leave them out"
            )
        if self.method != "auto" and (self.memory is not None or self.hardware is not None):
            found.append(
                "recompute.memory and recompute.hardware need recompute.method auto; set it, or leave them out"
            )
        if self.memory is not None and not (isfinite(self.memory) and self.memory > 0):
            found.append(f"recompute.memory is {self.memory}; it must be above 0, or null for what the device has")
        if self.method == "auto" and self.parts != RecomputeConfig().parts:
            found.append(
                "recompute.parts with recompute.method auto, which chooses the parts by itself; set recompute.method "
                "selective, or leave recompute.parts out"
            )
        if self.method == "selective" and not self.parts:
            found.append("recompute.parts is empty; name attention, mlp or norms, or set recompute.method none")
        return found
