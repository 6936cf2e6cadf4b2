"""The optimizer, gradient clipping, the learning rate schedule, and how fp16 runs scale their loss."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megapipe.config.field_types import (
    Bound,
    Fraction,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    bound_problems,
)


@dataclass(kw_only=True)
class MuonConfig:
    """Options of muon, for the hidden matrices.

    Embeddings, output head, norms and biases are updated by AdamW, with the betas and epsilon of OptimizerConfig.
    """

    momentum: Probability = 0.95
    """Momentum of the matrices."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    newton_schulz_steps: Annotated[int, Bound(1, 99)] = 5
    """Number of Newton-Schulz iterations, which bring the singular values of an update close to 1."""
    scale: Literal["match_rms", "spectral"] = "match_rms"
    """Scale of an update. match_rms: 0.2 sqrt(max(rows, columns)), the size of AdamW's updates, so that one learning
    rate suits both. spectral: sqrt(max(1, rows / columns)), for learning rates of about 0.02."""
    elementwise_rate: PositiveFloat = 1.0
    """Learning rate of the parameters that AdamW updates, as a multiple of optimizer.learning_rate."""


SMALLEST_BF16_DECAY = 2.0**-8
"""Smallest 1 - beta with which a bf16 moment still decays; below it, rounding undoes the decay."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer, gradient clipping and the learning rate schedule.

    Example:
        >>> from megapipe import OptimizerConfig
        >>> OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9).clip_norm
        1.0
    """

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer. adamw. sgd: gradient descent with momentum, as in torch.optim.SGD. muon: orthogonalized updates for
    the hidden matrices, and AdamW for all other parameters."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    """Decay rates of the first and second moment, for adamw and muon."""
    epsilon: PositiveFloat = 1e-8
    """Small constant added to the square root of the second moment, for adamw and muon."""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which adamw stores both moments between steps. Updates are computed in fp32 either way."""
    momentum: Probability = 0.0
    """Momentum of sgd; 0 means none, which also saves its memory."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Options of muon."""
    weight_decay: NaturalFloat = 0.1
    """Weight decay of matrices and embeddings; biases and norms are not decayed. It is decoupled for adamw and muon,
    and added to the gradient for sgd."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum norm of all gradients together; null turns clipping off."""
    decay: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after the warmup. wsd (warmup, stable, decay) stays at the peak and falls linearly over the last
    decay_steps steps."""
    warmup_steps: NaturalInt = 0
    """Number of steps over which the learning rate rises linearly from 0."""
    decay_steps: PositiveInt | None = None
    """For linear and cosine: the step at which the learning rate reaches its floor; null means the last step. For wsd:
    length of the final decay in steps; null means a tenth of the run."""
    floor: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""

    def num_moments(self, matrix: bool = False) -> int:
        """Return how many numbers the optimizer keeps between steps for every element of a parameter.

        matrix: the parameter is one that Muon treats as matrices (`ParameterSpec.matrix`).
        """
        if self.name == "muon" and matrix:
            return 1
        if self.name in ("adamw", "muon"):
            return 2
        return 1 if self.momentum else 0

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break; optim/scaling.py checks the learning rate."""
        problems = bound_problems(self, "optimizer")
        if self.moment_dtype == "bf16":
            problems += self._bf16_moment_problems()
        if self.momentum and self.name != "sgd":
            problems.append(
                f"optimizer.momentum is {self.momentum} but optimizer.name is {self.name}, whose momentum is "
                f"{'optimizer.muon.momentum' if self.name == 'muon' else 'the first of optimizer.betas'}; set that "
                "instead, or optimizer.name to sgd"
            )
        if self.name != "muon" and self.muon != MuonConfig():
            problems.append(
                f"optimizer.muon is set but optimizer.name is {self.name}; "
                "set optimizer.name muon, or leave optimizer.muon out"
            )
        return problems

    def _bf16_moment_problems(self) -> list[str]:
        if self.name != "adamw":
            return [
                f"optimizer.moment_dtype is bf16 but optimizer.name is {self.name}; only adamw supports bf16 moments: "
                "set optimizer.name adamw, or optimizer.moment_dtype fp32"
            ]
        if max(self.betas) > 1 - SMALLEST_BF16_DECAY:
            return [
                f"optimizer.betas is {list(self.betas)} but bf16 rounds away a decay below "
                "1/256 per step: set both to at most 0.996, or optimizer.moment_dtype to fp32"
            ]
        return []


@dataclass(kw_only=True)
class LossScaleConfig:
    """Scaling of the loss in fp16, which keeps small gradients above the smallest fp16 number."""

    kind: Literal["dynamic", "constant"] = "dynamic"
    """dynamic: halve the scale after overflows, and double it after `window` steps without one. constant: keep
    `initial`."""
    initial: PositiveFloat = 65536.0
    """Scale of the first step. A power of two adds no rounding error."""
    window: PositiveInt = 1000
    """For dynamic: consecutive steps without overflow after which the scale is doubled."""
    hysteresis: PositiveInt = 2
    """For dynamic: number of overflows since the scale was last doubled from which every overflow halves it; 1 halves
    it at the first overflow."""
    minimum: PositiveFloat = 1.0
    """For dynamic: lowest scale."""
    patience: PositiveInt = 20
    """Consecutive skipped steps, at the lowest scale, after which the run ends with an error."""

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
        problems = bound_problems(self, "loss_scale")
        if not problems and self.initial < self.lowest:
            least = f"loss_scale.minimum {self.lowest}, for example 65536"
            problems.append(
                f"loss_scale.initial is {self.initial}; it must be at least "
                f"{least if self.kind == 'dynamic' else '2^-24, for example 1024'}"
            )
        return problems

    @property
    def lowest(self) -> float:
        """Smallest scale that the run can reach."""
        return self.minimum if self.kind == "dynamic" else 2.0**-24
