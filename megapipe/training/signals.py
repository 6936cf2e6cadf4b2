"""Ctrl-C, SIGTERM and SIGUSR1: end the run after the step in progress, agreed by all ranks; a second ends it at once.

SIGUSR1 is what batch systems send ahead of the end of a job's time (Slurm's `--signal=USR1@120`).
"""

import signal
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

ECHO_SECONDS = 1.0
"""For so long another signal is taken for the launcher's copy of the first, which reaches the ranks by itself too."""


class StopRequest:
    """Context manager that notes the first of SIGNALS and leaves later ones to whoever had them before.

    A launcher sends SIGTERM also to the ranks that outlive another. They go on until they need the one that is gone,
    and tell of it: after an error SIGTERM stays as it is here, for the process to end by itself.

    Attributes:
        number: of the signal that came, None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._first = 0.0

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.number is not None

    @property
    def status(self) -> int:
        """The exit status of a run that was stopped, as shells have it; another rank's signal counts as Ctrl-C."""
        return 128 + (self.number or signal.SIGINT)

    def __enter__(self) -> "StopRequest":
        self._previous = {each: signal.signal(each, self._handle) for each in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A launcher's SIGTERM must not cut off a rank that is about to tell what it failed of.
        self._restore(kept=None if error is None else signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._first = number, time.monotonic()
        elif time.monotonic() - self._first > ECHO_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self, kept: signal.Signals | None = None) -> None:
        for each, handler in self._previous.items():
            if each != kept:
                signal.signal(each, handler)
