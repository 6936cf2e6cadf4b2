"""From the data room's arrays to what the engine hands to layers: one context per micro-batch, loaded ahead."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megapipe.data.batches import Microbatch, MicrobatchSource
from megapipe.data.prefetch import Prefetcher
from megapipe.layers.context import MicrobatchContext


@dataclass(frozen=True)
class StepBatch:
    """One step's micro-batches on one rank. token_count: loss tokens of this replica's share of the batch."""

    contexts: list[MicrobatchContext]
    token_count: float


class BatchLoader:
    """Loads a rank's share of every step.

    Token ids reach the first and the last stage alone; what other stages need (the samples' numbers, for dropout) is a
    pure function of the step.
    """

    def __init__(
        self,
        source: MicrobatchSource,
        *,
        num_microbatches: int,
        global_size: int,
        seed: int,
        device: torch.device,
        is_first: bool,
        is_last: bool,
        training: bool = True,
    ) -> None:
        self._source = source
        self._num_microbatches = num_microbatches
        self._global_size = global_size
        self._seed = seed
        self._device = device
        self._is_first = is_first
        self._is_last = is_last
        self._training = training

    def load(self, consumed: int) -> StepBatch:
        """The step that starts after `consumed` samples."""
        contexts, token_count = [], 0.0
        for index in range(self._num_microbatches):
            if self._is_first or self._is_last:
                microbatch = self._source.microbatch(consumed, index, self._num_microbatches)
                token_count += float(microbatch.loss_mask.sum())
                contexts.append(self._context(microbatch))
            else:
                ordinals = self._source.ordinals(consumed, index, self._num_microbatches)
                contexts.append(
                    MicrobatchContext(ordinals=torch.from_numpy(ordinals), seed=self._seed, training=self._training)
                )
        return StepBatch(contexts, token_count if self._is_last else 0.0)

    @contextmanager
    def steps(self, consumed: int) -> Iterator[Iterator[StepBatch]]:
        """Endless steps from `consumed` samples on, prefetched by a thread that ends with the block."""
        requests = itertools.count(consumed, self._global_size)
        with Prefetcher(self.load, requests) as loaded:
            yield loaded

    def _context(self, microbatch: Microbatch) -> MicrobatchContext:
        def on_device(array: object) -> torch.Tensor:
            return torch.as_tensor(array).contiguous().to(self._device, non_blocking=True)

        return MicrobatchContext(
            tokens=on_device(microbatch.tokens) if self._is_first else None,
            labels=on_device(microbatch.labels) if self._is_last else None,
            loss_mask=on_device(microbatch.loss_mask) if self._is_last else None,
            ordinals=torch.from_numpy(microbatch.ordinals),
            seed=self._seed,
            training=self._training,
        )
