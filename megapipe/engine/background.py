"""Work that runs beside a rank's actions: what waits for other ranks while this one has more to compute."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

Found = TypeVar("Found")
Result = TypeVar("Result")


def run_now(function: Callable[[], Result]) -> Future[Result]:
    """Run a function here and now; what it raises is raised here."""
    future: Future[Result] = Future()
    future.set_result(function())
    return future


class Turns:
    """Runs functions on threads of their own, and what they do with other ranks in the order they were started in.

    Two sums may be under way on one rank and in another order on another, where nothing else keeps them apart.
    """

    def __init__(self) -> None:
        self._last: Future[object] | None = None
        self._stream: torch.cuda.Stream | None = None

    def run_beside(
        self, find: Callable[[], Found], share: Callable[[Found], Result], device: torch.device
    ) -> Future[Result]:
        """Start `share(find())`; `share` runs behind that of every earlier call. As `run_beside` otherwise.

        On a GPU all calls use one stream: torch has few, and the communicators use the same ones.
        """
        before = self._last
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)

        def run() -> Result:
            found = find()
            if before is not None:
                wait([before])
            return share(found)

        future = run_beside(run, self._stream)
        self._last = future  # type: ignore[assignment]
        return future


def run_beside(function: Callable[[], Result], stream: torch.cuda.Stream | None) -> Future[Result]:
    """Run a function on a thread of its own; what it raises comes out of the future's `result()`.

    On a GPU it runs on `stream` behind all that the caller has launched, and is done when its result is there: neither
    the caller's stream nor its thread waits before that. The thread is a daemon: a rank that fails is not kept from
    ending by one that waits for a dead peer.
    """
    future: Future[Result] = Future()
    launched = torch.cuda.current_stream(stream.device).record_event() if stream is not None else None

    def run() -> None:
        try:
            if stream is None or launched is None:
                result = function()
            else:
                with torch.cuda.stream(stream):
                    stream.wait_event(launched)
                    result = function()
                    # Not the whole stream: a later call may have queued what waits for this result.
                    stream.record_event().synchronize()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="megapipe reductions", daemon=True).start()
    return future
