"""How fp16 runs scale their loss."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(kw_only=True)
class LossScaleConfig:
    """What fp16 multiplies the loss by, so that small gradients stay above its smallest number."""

    kind: Literal["dynamic", "constant"] = "dynamic"
    """dynamic halves the scale on overflows and doubles it after `window` steps without one; constant keeps it."""
    initial: float = 65536.0
    """Scale of the first step; a power of two loses no bit."""
    window: int = 1000
    """dynamic: steps in a row without overflow after which the scale doubles."""
    hysteresis: int = 2
    """dynamic: overflows, counted since the scale last doubled, that are put up with before the scale is halved at
    each further one (1 halves it at once)."""
    minimum: float = 1.0
    """dynamic: the scale never falls below."""
    patience: int = 20
    """Steps skipped in a row, at the minimum or a constant scale, after which the run ends with an error."""

    @property
    def is_default(self) -> bool:
        """Whether nothing was asked for."""
        return all(getattr(self, each.name) == each.default for each in fields(self))

    def problems(self) -> list[str]:
        """Every rule that single fields break, one message each."""
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
        """The smallest scale that the run can come to."""
        return self.minimum if self.kind == "dynamic" else 2.0**-24
