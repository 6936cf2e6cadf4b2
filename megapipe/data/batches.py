"""Micro-batches of a data-parallel rank: which samples they hold, and their arrays."""

from typing import NamedTuple

import numpy as np

from megapipe.data.documents import document_starts
from megapipe.data.errors import DataError
from megapipe.data.sample_set import SampleSet


class TokenBatch(NamedTuple):
    """b samples of s tokens."""

    tokens: np.ndarray
    """int64 [b, s], the inputs."""
    labels: np.ndarray
    """int64 [b, s], the token that follows each input; meaningless where the mask is 0."""
    loss_mask: np.ndarray
    """float32 [b, s], 1 where the prediction counts, else 0."""
    ordinals: np.ndarray
    """int64 [b], the samples' numbers in the order of the run: keys of dropout, never of a rank."""
    document_starts: np.ndarray | None
    """int64 [b, s], where each token's document begins in its sample; None where documents are not told apart."""


def microbatch_ordinals(
    consumed: int, *, data_rank: int, data_size: int, microbatch: int, micro_size: int, num_microbatches: int
) -> np.ndarray:
    """Sample ordinals, int64 [micro_size], of one micro-batch of the step that starts after `consumed` samples.

    The step takes ordinals [consumed, consumed + data_size * num_microbatches * micro_size); each data rank a
    contiguous slice, each of its micro-batches a contiguous slice of that. Where a run stands is one integer, at
    whatever data size it goes on.
    """
    if not (0 <= data_rank < data_size and 0 <= microbatch < num_microbatches and micro_size >= 1 and consumed >= 0):
        raise DataError(
            f"micro-batch {microbatch} of {num_microbatches}, data rank {data_rank} of {data_size}, micro_size "
            f"{micro_size}, consumed {consumed}: the first two must be at least 0 and below their counts, micro_size "
            "at least 1 and consumed at least 0"
        )
    start = consumed + (data_rank * num_microbatches + microbatch) * micro_size
    return np.arange(start, start + micro_size, dtype=np.int64)


class MicrobatchSource:
    """Loads the micro-batches of one data rank. Every rank of a model replica gets the same ones."""

    def __init__(
        self,
        samples: SampleSet,
        *,
        data_rank: int,
        data_size: int,
        micro_size: int,
        mask_end_of_document: bool = False,
        isolate_documents: bool = False,
    ) -> None:
        self.samples = samples
        self.data_rank = data_rank
        self.data_size = data_size
        self.micro_size = micro_size
        self.mask_end_of_document = mask_end_of_document
        self.isolate_documents = isolate_documents

    def ordinals(self, consumed: int, microbatch: int, num_microbatches: int) -> np.ndarray:
        """Sample ordinals, int64 [micro_size]; see `microbatch_ordinals`."""
        return microbatch_ordinals(
            consumed,
            data_rank=self.data_rank,
            data_size=self.data_size,
            microbatch=microbatch,
            micro_size=self.micro_size,
            num_microbatches=num_microbatches,
        )

    def microbatch(self, consumed: int, microbatch: int, num_microbatches: int) -> TokenBatch:
        """One micro-batch of the step that starts after `consumed` samples."""
        ordinals = self.ordinals(consumed, microbatch, num_microbatches)
        windows = self.samples.tokens(ordinals)
        boundaries = self._boundaries(ordinals)
        mask, starts = self._loss_mask(ordinals, boundaries), self._document_starts(boundaries)
        return TokenBatch(windows[:, :-1], windows[:, 1:], mask, ordinals, starts)

    def step(self, consumed: int, num_microbatches: int) -> list[TokenBatch]:
        """All micro-batches of the step that starts after `consumed` samples."""
        return [self.microbatch(consumed, index, num_microbatches) for index in range(num_microbatches)]

    def document_starts(self, ordinals: np.ndarray) -> np.ndarray | None:
        """int64 [b, s], see `megapipe.data.documents`; None unless isolate_documents. Reads no tokens."""
        return self._document_starts(self._boundaries(ordinals))

    def loss_mask(self, ordinals: np.ndarray) -> np.ndarray:
        """float32 [b, s]: 0 for padding and, with mask_end_of_document, for predictions across a document's end.

        Reads no tokens, so that stages without token ids can count what a step will score.
        """
        return self._loss_mask(ordinals, self._boundaries(ordinals))

    def _boundaries(self, ordinals: np.ndarray) -> list[np.ndarray]:
        """Where documents begin in every sample, if anything depends on it."""
        if self.mask_end_of_document or self.isolate_documents:
            return self.samples.boundaries(ordinals)
        return []

    def _document_starts(self, boundaries: list[np.ndarray]) -> np.ndarray | None:
        return document_starts(boundaries, self.samples.sequence_length) if self.isolate_documents else None

    def _loss_mask(self, ordinals: np.ndarray, boundaries: list[np.ndarray]) -> np.ndarray:
        places = np.arange(self.samples.sequence_length)
        mask = (places < self.samples.num_labels(ordinals)[:, None]).astype(np.float32)
        if self.mask_end_of_document:
            for row, begins in zip(mask, boundaries, strict=True):
                row[begins - 1] = 0
        return mask
