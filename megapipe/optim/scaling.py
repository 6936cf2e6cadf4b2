"""Numbers that scale a step: learning rate, loss scale of fp16 runs, and the coefficient of gradient clipping.

A loss scale (Micikevicius et al. 2018, 1710.03740, section 3.2, with the hysteresis of Megatron-LM) belongs to a
batch: its gradients have that scale even if the scale changes meanwhile. It depends only on the outcomes of earlier
batches, the same ones on every layout, whether the pipeline was drained or not.
"""

import math
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from megapipe.config.optimizer import LossScaleConfig, OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1, of a run of `total_steps`.

    The warm-up rises linearly from 0 (before step 1) to the peak at step `warmup_steps`; without one, step 1 is at
    the peak. Then the rate falls to `floor` x peak: constant stays at the peak; linear and cosine fall until
    `decay_steps` (null: the last step), cosine along half a period (Loshchilov and Hutter, 2017); wsd (warm-up,
    stable, decay: Hu et al., 2024) stays and falls linearly over the last `decay_steps` (null: a tenth of the run).
    Later steps keep the last rate. Raises ValueError if step is below 1.
    """
    if step < 1:
        raise ValueError(f"learning rate requested for step {step}; optimizer steps count from 1")
    peak = config.learning_rate
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    start, stop = _decay_range(config, total_steps)
    if config.decay == "constant" or step <= start:
        return peak
    if step >= stop:
        return peak * config.floor
    progress = (step - start) / (stop - start)
    decayed = (1 - math.cos(math.pi * progress)) / 2 if config.decay == "cosine" else progress
    return peak * (1 - (1 - config.floor) * decayed)


def learning_rate_problems(config: OptimizerConfig, total_steps: int) -> list[str]:
    """Return at most one message: about a warm-up that leaves no room for the decay in a run of `total_steps`."""
    # A short trial of a long recipe never leaves its warm-up.
    ends_in_warmup = config.warmup_steps >= total_steps and config.decay_steps is None
    if config.decay == "constant" or ends_in_warmup:
        return []
    start, stop = _decay_range(config, total_steps)
    if config.warmup_steps > start or (config.warmup_steps and config.warmup_steps >= stop):
        return [
            f"optimizer.warmup_steps {config.warmup_steps} leaves no room for the {config.decay} decay, steps {start} "
            f"to {stop}; shorten the warm-up, change optimizer.decay_steps, or raise training.steps {total_steps}"
        ]
    return []


def _decay_range(config: OptimizerConfig, total_steps: int) -> tuple[int, int]:
    """Return the last step at the peak and the first step at the final rate."""
    if config.decay == "wsd":
        length = total_steps // 10 if config.decay_steps is None else config.decay_steps
        return total_steps - length, total_steps
    return max(config.warmup_steps, 1), total_steps if config.decay_steps is None else config.decay_steps


GROWTH = 2.0
BACKOFF = 0.5


class LossScaleError(RuntimeError):
    """Gradients are out of range at every allowed scale."""


class LossScaler:
    """The scale of each step, from the outcomes of the steps before it.

    lag: number of preceding steps to ignore: 0 if a step starts after the previous one has ended, 1 for schedules that
    still run the previous step, whose outcome is not known yet.
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
        """Return the factor of the loss of `step`. Call it in order of steps, once earlier outcomes are known."""
        while self._outcomes and self._outcomes[0][0] < step - self._lag:
            self._apply(self._outcomes.popleft()[1])
        return self._scale

    def observe(self, step: int, skipped: bool) -> None:
        """Record whether a step was skipped. Raises LossScaleError after too many skipped steps at the lowest
        scale."""
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
        """Return the numbers that a checkpoint keeps, by name."""
        outcomes = {f"skipped_{age}": float(skipped) for age, (_, skipped) in enumerate(reversed(self._outcomes), 1)}
        return {
            "scale": self._scale,
            "growth": float(self._growth),
            "hysteresis": float(self._hysteresis),
            "at_minimum": float(self._at_minimum),
            **outcomes,
        }

    def restore(self, state: Mapping[str, float], step: int) -> None:
        """Continue from a checkpoint after `step` steps. Changes nothing if the checkpoint has no scale, or if this
        run's scale is constant."""
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

    def _apply(self, skipped: bool) -> None:
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


MARGIN = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""


def clip_coefficient(norm: float | Tensor, limit: float) -> Tensor:
    """Return the factor that limits the norm of gradients to `limit`: min(1, limit / (norm + 1e-6)), 0-dim fp32.

    norm: global L2 norm, a float or a 0-dim tensor; the quotient is computed in its precision (64 bits for a float)
    and on its device, without waiting for it. If the norm is NaN, so is the coefficient. Raises ValueError if limit is
    not above 0.
    """
    if not limit > 0:
        raise ValueError(f"optimizer.clip_norm is {limit}; it must be above 0, or null for no clipping")
    norm = torch.as_tensor(norm, dtype=torch.float64) if isinstance(norm, float) else norm
    return torch.clamp(limit / (norm + MARGIN), max=1.0).float()
