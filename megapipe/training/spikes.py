"""Jumps of the loss: which losses are one, and which samples are left out then.

A spike is no property of its batch alone: the same samples from other weights do no harm (Chowdhery et al., 2022,
arXiv 2204.02311, section 5.1). So a run goes back to its last checkpoint and comes past them by another way.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.config.reliability import SpikesConfig

NORMAL_SHARE = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


class SpikeError(RuntimeError):
    """The loss keeps jumping up behind one checkpoint."""


@dataclass(frozen=True)
class Spike:
    """A loss that jumped up. step: whose, from 1. consumed: samples behind it."""

    step: int
    consumed: int
    loss: float
    limit: float


def spike_limit(config: SpikesConfig, losses: Sequence[float]) -> float:
    """The loss above which the next one is a spike; infinite where nothing is.

    losses: of the steps before it, oldest first; those that are not finite are passed over. It is a function of them
    alone, so that all ranks, and a run that is resumed, find the same.
    """
    limit = math.inf if config.threshold is None else config.threshold
    known = [loss for loss in losses[-config.window :] if math.isfinite(loss)]
    if config.deviations is not None and len(known) >= config.window // 2:
        median = statistics.median(known)
        spread = NORMAL_SHARE * statistics.median(abs(loss - median) for loss in known)
        # Losses that hardly vary make every change large; a thousandth of the loss is none.
        limit = min(limit, median + config.deviations * max(spread, 1e-3 * abs(median)))
    return limit


class Rewinds:
    """Counts how often a run went back to one checkpoint."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._step = -1
        self._count = 0

    def count(self, step: int, spiked: int, loss: float) -> None:
        """One more return to the checkpoint after `step`, because of the loss of step `spiked`.

        Raises SpikeError where that is too often.
        """
        self._count = self._count + 1 if step == self._step else 1
        self._step = step
        if self._count > self._patience:
            raise SpikeError(
                f"the loss jumped up again, to {loss:.4g} at step {spiked}, after {self._patience} returns to the "
                f"checkpoint after step {step}; lower optimizer.learning_rate, raise spikes.skip_batches, or "
                "continue from an earlier checkpoint"
            )
