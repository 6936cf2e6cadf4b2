"""The loss scale of fp16 runs (Micikevicius et al. 2018, 1710.03740, section 3.2), with the hysteresis of Megatron-LM.

A scale belongs to a batch: its gradients carry that scale whatever becomes of the scale meanwhile. It is a function of
the outcomes of earlier batches alone, and of the same ones on every layout, drained or not.
"""

from collections import deque
from collections.abc import Mapping

from megapipe.config.loss_scale import LossScaleConfig

GROWTH = 2.0
BACKOFF = 0.5


class LossScaleError(RuntimeError):
    """Gradients stay out of range whatever the scale."""


class LossScaler:
    """The scale of each step, from the outcomes of the steps before it.

    lag: how many steps before it are left out of account: 0 where a step begins after the one before it has ended, 1
    for schedules with a step under way, whose outcome nobody knows yet.
    """

    def __init__(self, config: LossScaleConfig, lag: int = 0) -> None:
        self._config = config
        self._lag = lag
        self._scale = config.initial
        self._growth = 0
        self._hysteresis = config.hysteresis
        self._at_minimum = 0
        self._outcomes: deque[tuple[int, bool]] = deque()

    def scale(self, step: int) -> float:
        """What multiplies the loss of `step`. Steps are asked for in order, once the outcomes before them are in."""
        while self._outcomes and self._outcomes[0][0] < step - self._lag:
            self._take(self._outcomes.popleft()[1])
        return self._scale

    def observe(self, step: int, skipped: bool) -> None:
        """Say how a step ended. Raises LossScaleError after too many skipped ones at the lowest scale."""
        self._outcomes.append((step, skipped))
        at_lowest = self._config.kind == "constant" or self._scale <= self._config.minimum
        self._at_minimum = self._at_minimum + 1 if skipped and at_lowest else 0
        if self._at_minimum >= self._config.patience:
            raise LossScaleError(
                f"the gradients of {self._at_minimum} steps in a row, up to step {step + 1}, were not finite at "
                f"loss scale {self._scale:g}, the lowest allowed; train in bf16 or fp32 (training.precision), lower "
                "optimizer.learning_rate, or check which samples make the loss infinite"
            )

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: numbers by name."""
        outcomes = {f"skipped_{age}": float(skipped) for age, (_, skipped) in enumerate(reversed(self._outcomes), 1)}
        return {
            "scale": self._scale,
            "growth": float(self._growth),
            "hysteresis": float(self._hysteresis),
            "at_minimum": float(self._at_minimum),
            **outcomes,
        }

    def restore(self, state: Mapping[str, float], step: int) -> None:
        """Go on from a checkpoint after `step` steps. One of a run without a scale, or a constant scale, changes
        nothing."""
        if not state or self._config.kind == "constant":
            return
        self._scale = max(state["scale"], self._config.minimum)
        self._growth = int(state["growth"])
        self._hysteresis = int(state["hysteresis"])
        self._at_minimum = int(state["at_minimum"])
        ages = sorted(
            (int(name.removeprefix("skipped_")) for name in state if name.startswith("skipped_")), reverse=True
        )
        self._outcomes = deque((step - age, bool(state[f"skipped_{age}"])) for age in ages)

    def _take(self, skipped: bool) -> None:
        if self._config.kind == "constant":
            return
        if skipped:
            self._growth = 0
            self._hysteresis -= 1
            if self._hysteresis <= 0:
                self._scale = max(self._scale * BACKOFF, self._config.minimum)
            return
        self._growth += 1
        if self._growth == self._config.window:
            self._growth = 0
            self._hysteresis = self._config.hysteresis
            self._scale = self._scale * GROWTH
