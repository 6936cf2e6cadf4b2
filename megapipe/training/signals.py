"""SIGTERM, Ctrl-C and SIGHUP end the run between two steps, agreed by all ranks; SIGUSR1 asks for a checkpoint.

A handler only sets a flag. The flags are read where all ranks agree: at the start of every step, within evaluations
and after saves. A second SIGTERM or Ctrl-C ends the process at once.
"""

import signal
import time
from types import FrameType, TracebackType

from megapipe.training.output import leave_output

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVES = signal.SIGUSR1
SIGNALS = (*STOPS, SAVES)

ECHO_SECONDS = 1.0
"""Time in which another signal counts as the launcher's copy of the first one, which reaches the ranks directly."""


def before_training() -> None:
    """Set what signals do until training starts: SIGTERM, Ctrl-C and SIGHUP end the process at once, since there is
    nothing to save; SIGUSR1 and SIGPIPE are ignored, the latter for good.

    These are the system's own handlers, not Python's: a process that waits for others to start runs no Python.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(SAVES, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def after_training() -> None:
    """Have the process exit with its own status, whatever a launcher sends and whether or not its output is dead.

    Python would let SIGTERM end it while the interpreter shuts down.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leave_output()


class SignalRequests:
    """Context manager that notes signals: the first of STOPS, and SAVES. Later ones of STOPS go to the handlers that
    were set before, but for SIGHUP, since shells and launchers send several copies of it.

    SIGHUP stays ignored where it was ignored before, as under nohup. A launcher sends SIGTERM also to the ranks that
    outlive another. They continue until they need the one that is gone, and report it: after an error, or an agreed
    stop, SIGTERM and SIGHUP keep this handler, so that the process ends by itself.

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
        """Return the exit status of a run that was stopped, as shells define it, when all ranks stop; a signal to
        another rank counts as Ctrl-C."""
        self._ends = True
        return 128 + (self.number or signal.SIGINT)

    def __enter__(self) -> "SignalRequests":
        taken = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
        self._previous = {each: signal.signal(each, self._handle) for each in taken}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A launcher's signal must not cut off a rank that is about to report how it ended.
        kept = self._ends or error is not None
        self.number = None  # that signal is then the first one, which only sets a flag
        self._restore(kept=(signal.SIGTERM, signal.SIGHUP) if kept else ())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == SAVES:
            self._save = True
        elif self.number is None:
            self.number, self._first = number, time.monotonic()
        elif number != signal.SIGHUP and time.monotonic() - self._first > ECHO_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self, kept: tuple[signal.Signals, ...] = ()) -> None:
        for each, handler in self._previous.items():
            if each not in kept:
                signal.signal(each, handler)
