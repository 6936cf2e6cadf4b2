"""A thread that works ahead of its consumer by a bounded number of results."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class Prefetcher(Generic[Request, Result]):
    """Iterates over load(request) for each request, in order, loaded ahead in one background thread.

        with Prefetcher(lambda consumed: source.step(consumed, 8), itertools.count(0, global_size)) as steps:
            for microbatches in steps: ...

    At most `depth` results wait, and the requests may be endless. An exception of `load` or of the requests is raised
    to the consumer in its turn, after the results before it; iteration ends there. `close` (or leaving the block)
    waits for the load under way and ends the thread; it is idempotent. A thread and not a process, because reading a
    mapped file costs less than handing the result to another process.
    """

    def __init__(self, load: Callable[[Request], Result], requests: Iterable[Request], depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; a prefetcher needs room for at least 1 result")
        self._load = load
        self._requests = requests
        self._closed = threading.Event()
        self._results: queue.Queue[tuple[Result | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Prefetcher[Request, Result]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        if self._closed.is_set():
            raise StopIteration
        result, error = self._results.get()
        if error is not None:
            self.close()
            raise error
        return result  # type: ignore[return-value]  # without an error it is what load returned

    def close(self) -> None:
        """Stop loading and wait for the thread. Results that were not taken are dropped."""
        self._closed.set()
        # The thread may be waiting for room: make some. It adds one result at most before it sees the flag.
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
        except BaseException as error:  # whatever it is, the consumer has to see it
            end = error
        if not self._closed.is_set():
            self._results.put((None, end))

    def _call(self, request: Request) -> Result:
        try:
            return self._load(request)
        except StopIteration as error:  # raised to the consumer, it would look like the end of the requests
            raise RuntimeError(f"the function that loads {request!r} raised StopIteration; it must return") from error
