"""What is computed twice to be kept once."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class RecomputeConfig:
    """Activations that a backward computes again instead of finding them kept."""

    method: Literal["none", "full"] = "none"
    """none; full keeps the input of blocks alone and runs them again right before their backward."""
    every: int = 1
    """full: neighbouring blocks that run again together, from the input of the first: the more, the fewer inputs are
    kept and the more activations at once."""
    num_blocks: int | None = None
    """full: the first blocks of each stage that run again, the others keep all (null: every block)."""

    def problems(self) -> list[str]:
        """Rules that single fields break, one message each."""
        found = []
        if self.every < 1:
            found.append(f"recompute.every is {self.every}; it must be at least 1")
        if self.num_blocks is not None and self.num_blocks < 1:
            found.append(f"recompute.num_blocks is {self.num_blocks}; it must be at least 1, or null for every block")
        if self.method == "none" and (self.every != 1 or self.num_blocks is not None):
            found.append(
                "recompute.every and recompute.num_blocks need recompute.method full; set it, or leave them out"
            )
        return found
