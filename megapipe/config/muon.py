"""What Muon is told beside what all optimizers are."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class MuonConfig:
    """Muon on the hidden matrices; embeddings, head, norms and biases are AdamW's, with its betas and epsilon."""

    momentum: float = 0.95
    """Share of the matrices' momentum that is kept from step to step."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    newton_schulz_steps: int = 5
    """Iterations that bring a matrix's singular values near 1."""
    scale: Literal["match_rms", "spectral"] = "match_rms"
    """Size of an update: match_rms is AdamW's, 0.2 sqrt(max(rows, columns)), so that one learning rate suits both;
    spectral is sqrt(max(1, rows / columns)), for learning rates of about 0.02."""
    elementwise_rate: float = 1.0
    """Learning rate of what AdamW trains, as a share of optimizer.learning_rate."""

    def problems(self) -> list[str]:
        """Every rule that single fields break, one message each."""
        found = []
        if not 0 <= self.momentum < 1:
            found.append(f"optimizer.muon.momentum is {self.momentum}; it must be at least 0 and below 1")
        if not 1 <= self.newton_schulz_steps < 100:
            found.append(
                f"optimizer.muon.newton_schulz_steps is {self.newton_schulz_steps}; it must be from 1 to 99, usually 5"
            )
        if not self.elementwise_rate > 0:
            found.append(f"optimizer.muon.elementwise_rate is {self.elementwise_rate}; it must be above 0")
        return found
