"""The learning rate of each step, a pure function of the configuration and the step."""

import math

from megapipe.config.optimizer import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1, of a run of `total_steps`.

    The warm-up rises linearly from 0 (before step 1) to the peak at step `warmup_steps`; without one, step 1 is at
    the peak. Then, with `floor` x peak as the end: constant stays; linear and cosine fall until `decay_steps` (null:
    the last step), cosine along half a period (Loshchilov and Hutter, 2017); wsd (warm-up, stable, decay: Hu et al.,
    2024) stays and falls linearly over the last `decay_steps` (null: a tenth of the run). Later steps stay at the end.
    Raises ValueError when step is below 1.
    """
    if step < 1:
        raise ValueError(f"learning rate asked for step {step}; optimizer steps count from 1")
    peak = config.learning_rate
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    start, stop = _decay_range(config, total_steps)
    if config.decay == "constant" or step <= start:
        return peak
    if step >= stop:
        return peak * config.floor
    progress = (step - start) / (stop - start)
    fallen = (1 - math.cos(math.pi * progress)) / 2 if config.decay == "cosine" else progress
    return peak * (1 - (1 - config.floor) * fallen)


def learning_rate_problems(config: OptimizerConfig, total_steps: int) -> list[str]:
    """Every rule that warm-up and decay break in a run of `total_steps`, one message each."""
    found = []
    if not config.learning_rate > 0:
        found.append(f"optimizer.learning_rate is {config.learning_rate}; it must be above 0, for example 3e-4")
    if not 0 <= config.floor <= 1:
        found.append(f"optimizer.floor is {config.floor}; it is a share of the peak, from 0 to 1")
    if config.warmup_steps < 0:
        found.append(f"optimizer.warmup_steps is {config.warmup_steps}; it must be at least 0")
    if config.decay_steps is not None and config.decay_steps < 1:
        found.append(f"optimizer.decay_steps is {config.decay_steps}; it must be at least 1, or null for its default")
    # A short trial of a long recipe never leaves its warm-up.
    ends_in_warmup = config.warmup_steps >= total_steps and config.decay_steps is None
    if found or config.decay == "constant" or ends_in_warmup:
        return found
    start, stop = _decay_range(config, total_steps)
    if config.warmup_steps > start or (config.warmup_steps and config.warmup_steps >= stop):
        found.append(
            f"optimizer.warmup_steps {config.warmup_steps} leaves no room for the {config.decay} decay, steps {start} "
            f"to {stop}; shorten the warm-up, change optimizer.decay_steps, or raise training.steps {total_steps}"
        )
    return found


def _decay_range(config: OptimizerConfig, total_steps: int) -> tuple[int, int]:
    """Step of the last peak value and step of the first end value."""
    if config.decay == "wsd":
        length = total_steps // 10 if config.decay_steps is None else config.decay_steps
        return total_steps - length, total_steps
    return max(config.warmup_steps, 1), total_steps if config.decay_steps is None else config.decay_steps
