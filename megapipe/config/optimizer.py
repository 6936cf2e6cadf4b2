"""The optimizer, clipping and the learning rate."""

from dataclasses import dataclass, field
from typing import Literal

from megapipe.config.muon import MuonConfig

SMALLEST_BF16_DECAY = 2.0**-8
"""1 - beta below which a bf16 moment rounds back to where it was."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer, gradient clipping and the learning rate over time."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """adamw; sgd: gradient descent with momentum, as torch.optim.SGD has it; muon: orthogonal updates of the hidden
    matrices, adamw for the rest."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw, muon: decay of the first and second moment."""
    epsilon: float = 1e-8
    """adamw, muon: added to the root of the second moment."""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """adamw: what both moments are kept in between steps; they are computed in fp32 either way."""
    momentum: float = 0.0
    """sgd: share of the last step's momentum that is kept; 0 keeps none and needs no memory for it."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """What muon alone has."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings, decoupled (adamw, muon) or added to the gradient (sgd); not of biases and
    norms."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; null turns clipping off."""
    decay: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warm-up; wsd stays at the peak and decays linearly over the last decay_steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    decay_steps: int | None = None
    """linear, cosine: the step at which the floor is reached (null: the last); wsd: length of the final decay
    (null: a tenth of the run)."""
    floor: float = 0.1
    """Final learning rate as a share of the peak."""

    def problems(self) -> list[str]:
        """Every rule that single fields break, one message each; optim/learning_rate.py knows those between them."""
        found = []
        if self.epsilon <= 0:
            found.append(f"optimizer.epsilon is {self.epsilon}; it must be above 0, for example 1e-8")
        if not all(0 <= beta < 1 for beta in self.betas):
            found.append(f"optimizer.betas is {list(self.betas)}; both must be at least 0 and below 1")
        if self.moment_dtype == "bf16":
            found += self._bf16_moment_problems()
        if not 0 <= self.momentum < 1:
            found.append(f"optimizer.momentum is {self.momentum}; it must be at least 0 and below 1")
        elif self.momentum and self.name != "sgd":
            found.append(
                f"optimizer.momentum is {self.momentum}, but optimizer.name is {self.name}, whose momentum is "
                f"{'optimizer.muon.momentum' if self.name == 'muon' else 'the first of optimizer.betas'}; set that "
                "one, or optimizer.name to sgd"
            )
        if self.name == "muon":
            found += self.muon.problems()
        elif self.muon != MuonConfig():
            found.append(
                f"optimizer.muon is set, and optimizer.name is {self.name}; set optimizer.name muon, or leave "
                "optimizer.muon out"
            )
        if self.weight_decay < 0:
            found.append(f"optimizer.weight_decay is {self.weight_decay}; it must be at least 0")
        if self.clip_norm is not None and self.clip_norm <= 0:
            found.append(f"optimizer.clip_norm is {self.clip_norm}; it must be above 0, or null for no clipping")
        return found

    def _bf16_moment_problems(self) -> list[str]:
        if self.name != "adamw":
            return [f"optimizer.moment_dtype is bf16, which adamw alone can, and optimizer.name is {self.name}"]
        if max(self.betas) > 1 - SMALLEST_BF16_DECAY:
            return [
                f"optimizer.betas is {list(self.betas)}, and a moment in bf16 shrinks only by 1/256 or more a step: "
                "keep both at most 0.996, or set optimizer.moment_dtype fp32"
            ]
        return []
