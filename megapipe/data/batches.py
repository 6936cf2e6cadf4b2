"""Micro-batches of a data-parallel rank: their samples and arrays, and a thread that loads them in advance."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from megapipe.data import DataError
from megapipe.data.samples import SampleSet


def document_starts(boundaries: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return for each token the position in the sample at which its document starts: int64 [b, length].

    boundaries: for each of b samples, the positions at which documents start, without 0. The start is 0 for a document
    that started before the sample. Token i may attend to tokens [starts[i], i], and its position in the document is
    i - starts[i].
    """
    starts = np.zeros((len(boundaries), length), dtype=np.int64)
    for row, places in zip(starts, boundaries, strict=True):
        inside = places[places < length]
        row[inside] = inside
    return np.asarray(np.maximum.accumulate(starts, axis=1))


class TokenBatch(NamedTuple):
    """A micro-batch of b samples of s tokens."""

    tokens: np.ndarray
    """Inputs, int64 [b, s]."""
    labels: np.ndarray
    """The token that follows each input, int64 [b, s]; undefined where the mask is 0."""
    loss_mask: np.ndarray
    """1 where the prediction contributes to the loss, else 0, float32 [b, s]."""
    ordinals: np.ndarray
    """Numbers of the samples in the order of the run, int64 [b]. Dropout is keyed by them, not by the rank."""
    document_starts: np.ndarray | None
    """For each token, the position in the sample at which its document starts, int64 [b, s]; None unless documents are
    isolated."""


@dataclass(kw_only=True)
class RankOrdinals:
    """The samples of one data rank: a contiguous slice of those of each step.

    The position of a run is therefore one integer, and a run can continue with any data size.
    """

    data_rank: int
    data_size: int
    micro_size: int

    def ordinals(self, consumed: int, microbatch: int, num_microbatches: int) -> np.ndarray:
        """Return sample ordinals, int64 [micro_size], of a micro-batch of the step that starts after `consumed`
        samples.

        The step uses ordinals [consumed, consumed + data_size * num_microbatches * micro_size). Each micro-batch has a
        contiguous slice of the rank's slice.
        """
        rank, size, length = self.data_rank, self.data_size, self.micro_size
        if not (0 <= rank < size and 0 <= microbatch < num_microbatches and length >= 1 and consumed >= 0):
            raise DataError(
                f"micro-batch {microbatch} of {num_microbatches}, data rank {rank} of "
                f"{size}, micro_size {length}, consumed {consumed}: the first two must "
                "be within their counts, micro_size at least 1 and consumed at least 0"
            )
        start = consumed + (rank * num_microbatches + microbatch) * length
        return np.arange(start, start + length, dtype=np.int64)


@dataclass
class MicrobatchSource(RankOrdinals):
    """Loads the micro-batches of one data rank. All ranks of a model replica get the same micro-batches."""

    samples: SampleSet
    mask_end_of_document: bool = field(default=False, kw_only=True)
    isolate_documents: bool = field(default=False, kw_only=True)

    def microbatch(self, consumed: int, microbatch: int, num_microbatches: int) -> TokenBatch:
        """Return one micro-batch of the step that starts after `consumed` samples."""
        ordinals = self.ordinals(consumed, microbatch, num_microbatches)
        windows = self.samples.tokens(ordinals)
        boundaries = self._boundaries(ordinals)
        mask, starts = self._loss_mask(ordinals, boundaries), self._document_starts(boundaries)
        return TokenBatch(windows[:, :-1], windows[:, 1:], mask, ordinals, starts)

    def step(self, consumed: int, num_microbatches: int) -> list[TokenBatch]:
        """Return all micro-batches of the step that starts after `consumed` samples."""
        return [self.microbatch(consumed, index, num_microbatches) for index in range(num_microbatches)]

    def document_starts(self, ordinals: np.ndarray) -> np.ndarray | None:
        """Return `TokenBatch.document_starts` of these samples; None unless isolate_documents is set. Reads no
        tokens."""
        return self._document_starts(self._boundaries(ordinals))

    def loss_mask(self, ordinals: np.ndarray) -> np.ndarray:
        """Return float32 [b, s]: 0 for padding and, with mask_end_of_document, for predictions across the end of a
        document.

        Reads no tokens, so that stages without token ids can count the predictions of a step.
        """
        return self._loss_mask(ordinals, self._boundaries(ordinals))

    def _boundaries(self, ordinals: np.ndarray) -> list[np.ndarray]:
        """Return the boundaries of every sample; an empty list if no option needs them."""
        if self.mask_end_of_document or self.isolate_documents:
            return self.samples.boundaries(ordinals)
        return []

    def _document_starts(self, boundaries: list[np.ndarray]) -> np.ndarray | None:
        return document_starts(boundaries, self.samples.sequence_length) if self.isolate_documents else None

    def _loss_mask(self, ordinals: np.ndarray, boundaries: list[np.ndarray]) -> np.ndarray:
        places = np.arange(self.samples.sequence_length)
        mask = (places < self.samples.num_labels(ordinals)[:, None]).astype(np.float32)
        if self.mask_end_of_document:
            for row, starts in zip(mask, boundaries, strict=True):
                row[starts - 1] = 0
        return mask


Request = TypeVar("Request")
Result = TypeVar("Result")


class Prefetcher(Iterator[Result], Generic[Request, Result]):
    """Iterates over load(request) for each request, in order; one background thread loads results in advance.

        with Prefetcher(lambda consumed: source.step(consumed, 8), itertools.count(0, global_size)) as steps:
            for microbatches in steps: ...

    At most `depth` results wait, and the requests may be endless. An exception of `load` or of the requests is raised
    in the consumer after the results before it, and ends the iteration. `close` (or leaving the block) waits for the
    load in progress and ends the thread; it is idempotent. A thread is used instead of a process, because reading a
    mapped file takes less time than passing the result to another process.
    """

    def __init__(self, load: Callable[[Request], Result], requests: Iterable[Request], depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; a prefetcher needs at least 1")
        self._load = load
        self._requests = requests
        self._closed = threading.Event()
        self._results: queue.Queue[tuple[Result | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Prefetcher[Request, Result]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __next__(self) -> Result:
        if self._closed.is_set():
            raise StopIteration
        result, error = self._results.get()
        if error is not None:
            self.close()
            raise error
        # Without an error it is the return value of `load`.
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Stop loading and wait for the thread. Results that were not consumed are dropped."""
        self._closed.set()
        # The thread may be waiting for room, so make room. It adds at most one result before it sees the flag.
        with contextlib.suppress(queue.Empty):
            while True:
                self._results.get_nowait()
        self._thread.join()

    def _work(self) -> None:
        try:
            for request in self._requests:
                if self._closed.is_set():
                    return
                self._results.put((self._call(request), None))
            end: BaseException = StopIteration()
        except BaseException as error:  # every error is raised to the consumer
            end = error
        if not self._closed.is_set():
            self._results.put((None, end))

    def _call(self, request: Request) -> Result:
        try:
            return self._load(request)
        except StopIteration as error:
            # In the consumer, it would look like the end of the requests.
            raise RuntimeError(f"the function that loads {request!r} raised StopIteration; it must return") from error
