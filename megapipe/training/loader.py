"""A rank's share of every step, loaded ahead of the engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from megapipe.data.prefetch import Prefetcher
from megapipe.engine.step import Counts
from megapipe.layers.context import MicrobatchContext
from megapipe.layout.batch_plan import BatchPlan
from megapipe.training.families import ModelFamily
from megapipe.training.skipping import SkippingPlan


@dataclass(frozen=True)
class StepBatch:
    """One step's micro-batches on one rank.

    num_samples: of the global batch. token_counts: what each micro-batch's loss is a sum over, known on the last
    stage.
    """

    contexts: list[MicrobatchContext]
    num_samples: int
    token_counts: tuple[Counts, ...]


class Consumer(Protocol):
    """What is fed, as far as a loader asks: a replica's part of the model, or something in its place."""

    @property
    def is_first(self) -> bool:
        """Whether it reads token ids."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        ...

    @property
    def family(self) -> ModelFamily:
        """The kind of model."""
        ...


class Loader(ABC):
    """Loads steps as planned. share: samples of one micro-batch on every replica."""

    def __init__(self, plan: BatchPlan, share: int) -> None:
        self._plan = plan
        self._share = share

    def load(self, consumed: int) -> StepBatch:
        """The step that starts after `consumed` samples."""
        num_samples = self._plan.size(consumed)
        num_microbatches = num_samples // self._share
        loaded = [self._microbatch(consumed, index, num_microbatches) for index in range(num_microbatches)]
        counts = tuple(count for _, count in loaded if count is not None)
        return StepBatch([context for context, _ in loaded], num_samples, counts)

    def each(self, consumed: int) -> Iterator[StepBatch]:
        """Endless steps from `consumed` samples on, each loaded when it is asked for."""
        return map(self.load, self._plan.cursors(consumed))

    @contextmanager
    def steps(self, consumed: int, plan: SkippingPlan | None = None) -> Iterator[Iterator[StepBatch]]:
        """Endless steps from `consumed` samples on, prefetched by a thread that ends with the block.

        plan: which samples are left out, by default none.
        """
        with Prefetcher(self.load, (self._plan if plan is None else plan).cursors(consumed)) as loaded:
            yield loaded

    @abstractmethod
    def _microbatch(self, consumed: int, index: int, num_microbatches: int) -> tuple[MicrobatchContext, Counts | None]:
        """One micro-batch's context, and on the last stage what its loss is a sum over."""
