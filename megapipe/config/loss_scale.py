"""How fp16 runs scale their loss."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(kw_only=True)
class LossScaleConfig:
    """Scaling of the loss in fp16, which keeps small gradients above the smallest fp16 number."""

    kind: Literal["dynamic", "constant"] = "dynamic"
    """dynamic: halve the scale after overflows, and double it after `window` steps without one. constant: keep
    `initial`."""
    initial: float = 65536.0
    """Scale of the first step. A power of two adds no rounding error."""
    window: int = 1000
    """For dynamic: consecutive steps without overflow after which the scale is doubled."""
    hysteresis: int = 2
    """For dynamic: number of overflows since the scale was last doubled from which every overflow halves it; 1 halves
    it at the first overflow."""
    minimum: float = 1.0
    """For dynamic: lowest scale."""
    patience: int = 20
    """Consecutive skipped steps, at the lowest scale, after which the run ends with an error."""

    @property
    def is_default(self) -> bool:
        """Whether no field was changed."""
        return all(getattr(self, each.name) == each.default for each in fields(self))

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
        found = [
            f"loss_scale.{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("window", "hysteresis", "patience")
            if getattr(self, name) < 1
        ]
        if not 0 < self.minimum < float("inf"):
            found.append(f"loss_scale.minimum is {self.minimum}; it must be above 0, for example 1")
        elif not self.lowest <= self.initial < float("inf"):
            found.append(
                f"loss_scale.initial is {self.initial}; it must be finite and at least loss_scale.minimum "
                f"{self.lowest}, for example 65536"
                if self.kind == "dynamic"
                else f"loss_scale.initial is {self.initial}; it must be finite and above 0, for example 1024"
            )
        return found

    @property
    def lowest(self) -> float:
        """Smallest scale that the run can reach."""
        return self.minimum if self.kind == "dynamic" else 2.0**-24
