"""Ctrl-C: ends the run after the step in progress, agreed by all ranks; a second one ends it at once."""

import signal
from types import FrameType, TracebackType


class StopRequest:
    """Context manager that turns the first SIGINT into the flag `requested` and leaves the second one to Python."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: signal._HANDLER = signal.SIG_DFL

    def __enter__(self) -> "StopRequest":
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)
