"""Options of the Muon optimizer."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class MuonConfig:
    """Options of muon, for the hidden matrices.

    Embeddings, output head, norms and biases are updated by AdamW, with the betas and epsilon of OptimizerConfig.
    """

    momentum: float = 0.95
    """Momentum of the matrices."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    newton_schulz_steps: int = 5
    """Number of Newton-Schulz iterations, which bring the singular values of an update close to 1."""
    scale: Literal["match_rms", "spectral"] = "match_rms"
    """Scale of an update. match_rms: 0.2 sqrt(max(rows, columns)), the size of AdamW's updates, so that one learning
    rate suits both. spectral: sqrt(max(1, rows / columns)), for learning rates of about 0.02."""
    elementwise_rate: float = 1.0
    """Learning rate of the parameters that AdamW updates, as a multiple of optimizer.learning_rate."""

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
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
