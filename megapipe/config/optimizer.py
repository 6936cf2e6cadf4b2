"""The optimizer, gradient clipping and the learning rate schedule."""

from dataclasses import dataclass, field
from typing import Literal

from megapipe.config.muon import MuonConfig

SMALLEST_BF16_DECAY = 2.0**-8
"""Smallest 1 - beta with which a bf16 moment still decays; below it, rounding undoes the decay."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer, gradient clipping and the learning rate schedule."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer. adamw. sgd: gradient descent with momentum, as in torch.optim.SGD. muon: orthogonalized updates for
    the hidden matrices, and AdamW for all other parameters."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment, for adamw and muon."""
    epsilon: float = 1e-8
    """Small constant added to the square root of the second moment, for adamw and muon."""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which adamw stores both moments between steps. Updates are computed in fp32 either way."""
    momentum: float = 0.0
    """Momentum of sgd; 0 means none, which also saves its memory."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Options of muon."""
    weight_decay: float = 0.1
    """Weight decay of matrices and embeddings; biases and norms are not decayed. It is decoupled for adamw and muon,
    and added to the gradient for sgd."""
    clip_norm: float | None = 1.0
    """Maximum norm of all gradients together; null turns clipping off."""
    decay: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after the warmup. wsd (warmup, stable, decay) stays at the peak and falls linearly over the last
    decay_steps steps."""
    warmup_steps: int = 0
    """Number of steps over which the learning rate rises linearly from 0."""
    decay_steps: int | None = None
    """For linear and cosine: the step at which the learning rate reaches its floor; null means the last step. For wsd:
    length of the final decay in steps; null means a tenth of the run."""
    floor: float = 0.1
    """Final learning rate as a fraction of the peak."""

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break; optim/learning_rate.py checks the schedule."""
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
                f"optimizer.momentum is {self.momentum} but optimizer.name is {self.name}, whose momentum is "
                f"{'optimizer.muon.momentum' if self.name == 'muon' else 'the first of optimizer.betas'}; set that "
                "instead, or optimizer.name to sgd"
            )
        if self.name == "muon":
            found += self.muon.problems()
        elif self.muon != MuonConfig():
            found.append(
                f"optimizer.muon is set but optimizer.name is {self.name}; set optimizer.name muon, or leave "
                "optimizer.muon out"
            )
        if self.weight_decay < 0:
            found.append(f"optimizer.weight_decay is {self.weight_decay}; it must be at least 0")
        if self.clip_norm is not None and self.clip_norm <= 0:
            found.append(f"optimizer.clip_norm is {self.clip_norm}; it must be above 0, or null for no clipping")
        return found

    def _bf16_moment_problems(self) -> list[str]:
        if self.name != "adamw":
            return [
                f"optimizer.moment_dtype is bf16 but optimizer.name is {self.name}; only adamw supports bf16 moments: "
                "set optimizer.name adamw, or optimizer.moment_dtype fp32"
            ]
        if max(self.betas) > 1 - SMALLEST_BF16_DECAY:
            return [
                f"optimizer.betas is {list(self.betas)} but bf16 rounds away a decay of less than 1/256 per step: set "
                "both to at most 0.996, or optimizer.moment_dtype to fp32"
            ]
        return []
