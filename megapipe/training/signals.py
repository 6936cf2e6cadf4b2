"""SIGTERM and Ctrl-C end the run between two steps, agreed by all ranks, a second one at once; SIGUSR1 asks for a
checkpoint and lets the run go on.

A handler only notes. What it noted is looked at where all ranks agree: as every step begins, within evaluations and
behind saves.
"""

import signal
import time
from types import FrameType, TracebackType

STOPS = (signal.SIGINT, signal.SIGTERM)
SAVES = signal.SIGUSR1
SIGNALS = (*STOPS, SAVES)

ECHO_SECONDS = 1.0
"""For so long another signal is taken for the launcher's copy of the first, which reaches the ranks by itself too."""


def before_training() -> None:
    """How a process answers until its training begins: SIGTERM and Ctrl-C end it at once, since there is nothing to
    save, and SIGUSR1 is ignored.

    The system's own answers and not Python's: a process that waits for others to start runs no Python.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(SAVES, signal.SIG_IGN)


def behind_training() -> None:
    """How a process answers that has nothing left but to exit: with its own status, whatever a launcher sends.

    Python itself would end it by SIGTERM while the interpreter shuts down.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class SignalRequests:
    """Context manager that notes signals: the first of STOPS, later ones left to whoever had them before, and SAVES.

    A launcher sends SIGTERM also to the ranks that outlive another. They go on until they need the one that is gone,
    and tell of it: after an error, or an agreed stop, SIGTERM stays as it is here, for the process to end by itself.

    Attributes:
        number: of the signal that asked to stop, None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._save = False
        self._ends = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._first = 0.0

    @property
    def stop(self) -> bool:
        """Whether a signal asked this rank to stop."""
        return self.number is not None

    def take_save(self) -> bool:
        """Whether a signal asked for a checkpoint since the last call."""
        asked, self._save = self._save, False
        return asked

    def end(self) -> int:
        """All ranks stop. The exit status of a run that was stopped, as shells have it; a signal to another rank
        counts as Ctrl-C."""
        self._ends = True
        return 128 + (self.number or signal.SIGINT)

    def __enter__(self) -> "SignalRequests":
        self._previous = {each: signal.signal(each, self._handle) for each in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A launcher's SIGTERM must not cut off a rank that is about to tell how it ended.
        kept = self._ends or error is not None
        self.number = None  # that SIGTERM is the first again, which only is noted
        self._restore(kept=signal.SIGTERM if kept else None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == SAVES:
            self._save = True
        elif self.number is None:
            self.number, self._first = number, time.monotonic()
        elif time.monotonic() - self._first > ECHO_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self, kept: signal.Signals | None = None) -> None:
        for each, handler in self._previous.items():
            if each != kept:
                signal.signal(each, handler)
