"""A rank's part of every step: its samples, its tokens of each sample, and their loading in the background."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megapipe.config.parallel import ParallelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.batches import Prefetcher
from megapipe.engine.step import Counts
from megapipe.layers.context import MicrobatchContext
from megapipe.layout.batch_plan import BatchPlan
from megapipe.layout.validation import token_order
from megapipe.parallel.mesh import Mesh
from megapipe.spec.token_order import Share
from megapipe.training.observe.records import LineFile, Listener

SKIPPED_SAMPLES = "skipped_samples.jsonl"
SKIPPED_EVENT = "skipped_samples"

Range = tuple[int, int]
"""Half-open range [first, end) of samples in training order, which is the same for all layouts."""


class SkippingPlan:
    """A batch plan that skips ranges of samples: a step that would use a sample of a range starts after the range."""

    def __init__(self, plan: BatchPlan, ranges: tuple[Range, ...] = ()) -> None:
        self._plan = plan
        self.ranges = tuple(sorted(set(ranges)))

    def begin(self, consumed: int) -> int:
        """Return the first sample of the step that follows `consumed` samples."""
        for first, stop in self.ranges:
            if consumed < stop and consumed + self._plan.size(consumed) > first:
                consumed = stop
        return consumed

    def end(self, consumed: int) -> int:
        """Return the number of samples consumed after the step that follows `consumed` samples, including skipped
        ones."""
        begin = self.begin(consumed)
        return begin + self._plan.size(begin)

    def size(self, consumed: int) -> int:
        """Return the number of samples of the step that follows `consumed` samples."""
        return self._plan.size(self.begin(consumed))

    def cursors(self, consumed: int) -> Iterator[int]:
        """Yield the first sample of the step that follows `consumed` samples, and of all later steps, endlessly."""
        while True:
            yield self.begin(consumed)
            consumed = self.end(consumed)

    def last_batches(self, start: int, consumed: int, count: int) -> Range:
        """Return the samples of the last `count` steps from `start` up to `consumed`; all of them if there are fewer
        steps."""
        first_samples = list(takewhile(lambda begin: begin < consumed, self.cursors(start)))
        return first_samples[-count:][0], consumed


class SkippedSamplesFile(LineFile, Listener):
    """Writes every range that a run skipped to `skipped_samples.jsonl` in its folder: {"step", "first", "stop"}."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / SKIPPED_SAMPLES)

    def event(self, name: str, **fields: Any) -> None:
        """Write the range of event `skipped_samples`; other events have no line."""
        if name == SKIPPED_EVENT:
            self.write(json.dumps(fields))


def runs_ring(parallel: ParallelConfig) -> bool:
    """Return whether attention runs in a ring, which has its own kernels and code paths."""
    return parallel.context > 1 and parallel.context_attention == "ring"


@dataclass(frozen=True)
class HeldTokens:
    """The tokens of every sample that this rank trains on.

    numbers: int64 [s], their positions in a sample, ascending; None for all. gathers: attention gathers whole samples.
    """

    numbers: np.ndarray | None = None
    gathers: bool = False

    @classmethod
    def of(cls, config: PretrainConfig, mesh: Mesh) -> "HeldTokens":
        """Return the tokens of this rank."""
        size = mesh.size("context")
        if size == 1:
            return cls()
        length = config.data.sequence_length
        numbers = Share(token_order(config), mesh.coordinate("context"), size).numbers(length)
        return cls(numbers, config.parallel.context_attention == "all_to_all")

    def part(self, array: np.ndarray) -> np.ndarray:
        """Return the columns [b, s] of this rank's tokens of an array [b, whole length]."""
        return array if self.numbers is None else array[:, self.numbers]

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first token of every sample."""
        return self.numbers is None or bool(self.numbers[0] == 0)

    def predictions(
        self, positions: np.ndarray, labels: np.ndarray, loss_mask: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the predictions [b, n] of this rank's tokens, out of all predictions [b, p]: positions among the
        tokens of this rank, labels and loss mask. n: largest number of predictions in a sample, at least 1. length:
        tokens of a whole sample."""
        if self.numbers is None:
            return positions, labels, loss_mask
        place = np.full(length, -1, dtype=np.int64)
        place[self.numbers] = np.arange(len(self.numbers))
        local = place[positions]
        owned = (local >= 0) & (loss_mask > 0)
        max_predictions = max(1, int(owned.sum(axis=1).max()))
        first = np.argsort(~owned, axis=1, kind="stable")[:, :max_predictions]
        local, labels, loss_mask, owned = (
            np.take_along_axis(each, first, axis=1) for each in (local, labels, loss_mask, owned)
        )
        return np.where(owned, local, 0), labels, np.where(owned, loss_mask, 0).astype(loss_mask.dtype)


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one step on one rank.

    num_samples: number of samples in the global batch. token_counts: number of tokens in the loss of each micro-batch,
    only on the last stage.
    """

    contexts: list[MicrobatchContext]
    num_samples: int
    token_counts: tuple[Counts, ...]


class Consumer(Protocol):
    """The consumer of a loader's batches: a replica's part of the model, or a stand-in for it."""

    is_first: bool
    """Whether this rank holds the stage that reads token ids."""
    is_last: bool
    """Whether this rank holds a stage that computes the loss."""


class Loader(ABC):
    """Loads the steps of a plan. microbatch_samples: total samples of one micro-batch over all replicas."""

    def __init__(self, plan: BatchPlan, microbatch_samples: int) -> None:
        self._plan = plan
        self._microbatch_samples = microbatch_samples

    def load(self, consumed: int) -> StepBatch:
        """Load the step that starts after `consumed` samples."""
        num_samples = self._plan.size(consumed)
        count = num_samples // self._microbatch_samples
        loaded = [each for index in range(count) for each in self._microbatches(consumed, index, count)]
        counts = tuple(each for _, each in loaded if each is not None)
        return StepBatch([context for context, _ in loaded], num_samples, counts)

    def each(self, consumed: int) -> Iterator[StepBatch]:
        """Yield all steps after `consumed` samples, endlessly; each is loaded when it is requested."""
        return map(self.load, self._plan.cursors(consumed))

    @contextmanager
    def steps(self, consumed: int, plan: SkippingPlan | None = None) -> Iterator[Iterator[StepBatch]]:
        """Yield an iterator over all steps after `consumed` samples, prefetched by a thread that ends with the block.

        plan: which samples are skipped, by default none.
        """
        with Prefetcher(self.load, (self._plan if plan is None else plan).cursors(consumed)) as loaded:
            yield loaded

    def _microbatches(
        self, consumed: int, index: int, num_microbatches: int
    ) -> Iterable[tuple[MicrobatchContext, Counts | None]]:
        """Return the results of `_microbatch`: one, or one for each slice of the samples if there are several."""
        return [self._microbatch(consumed, index, num_microbatches)]

    @abstractmethod
    def _microbatch(self, consumed: int, index: int, num_microbatches: int) -> tuple[MicrobatchContext, Counts | None]:
        """Return the context of a micro-batch and, on the last stage, the number of tokens in its loss."""
