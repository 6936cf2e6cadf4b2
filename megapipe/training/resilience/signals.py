"""How the process of a rank ends: exit statuses, signals, and the death of its launcher."""

import ctypes
import os
import signal
import sys
import time
from enum import IntEnum
from types import FrameType

from megapipe.training.observe.records import leave_output

_END_SIGNAL = 44


class ExitCode(IntEnum):
    """Exit status of a rank's process. torchrun prints the status of the first rank that fails, and exits with 1.

    docs/reliability.md explains each status.
    """

    FINISHED = 0
    FAILED = 1
    """Any other error: too little memory, or a defect with its traceback."""
    WRONG_INPUT = 2
    """A configuration, data, layout or checkpoint that cannot be used; reported before training starts if possible."""
    NOT_FINITE = 10
    """Too many steps in a row whose loss or gradients were not finite."""
    SPIKES = 11
    """The loss keeps jumping up after one checkpoint."""
    REPLICAS_DIFFER = 12
    """Ranks hold different bits of state that must be equal."""
    PEER_LOST = 13
    """Another rank died or stopped responding; the output of that rank gives the reason."""
    STALLED = _END_SIGNAL
    """The watchdog saw no progress. The number is that of the signal whose handler ends the process, see
    `watchdog.Watchdog`."""
    HUNG_UP = 128 + signal.SIGHUP
    """SIGHUP, such as a closed terminal; the run was saved."""
    INTERRUPTED = 128 + signal.SIGINT
    """Ctrl-C, or a signal to another rank; the run was saved."""
    TERMINATED = 128 + signal.SIGTERM
    """SIGTERM; the run was saved."""


_PR_SET_PDEATHSIG = 1
"""Value in <linux/prctl.h>."""


def end_with_launcher() -> None:
    """Have the system kill this process when its parent dies; only on Linux and under torchrun.

    The signal comes when the thread that started this process ends. torchrun starts ranks from its main thread; other
    launchers may start them from a thread that ends earlier.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent died before the call, so the signal does not come
        os.kill(os.getpid(), signal.SIGKILL)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVES = signal.SIGUSR1
SIGNALS = (*STOPS, SAVES)

ECHO_SECONDS = 1.0
"""Time in which another signal counts as the launcher's copy of the first one, which reaches the ranks directly."""


def before_training() -> None:
    """Set the effect of signals until training starts: SIGTERM, Ctrl-C and SIGHUP end the process at once, because
    there is nothing to save; SIGUSR1 is ignored, and so is SIGPIPE, also during training.

    These are the system's handlers, because Python's would not run while the process waits for others to start.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(SAVES, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def after_training() -> None:
    """Make the process exit with its own status, even if a launcher sends signals or its output is dead.

    Otherwise SIGTERM could end the process while the interpreter shuts down.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leave_output()


class SignalRequests:
    """Context manager that records signals: the first of STOPS, and SAVES. Later signals of STOPS go to the previous
    handlers, except SIGHUP, because shells and launchers send several copies of it.

    A handler only sets a flag. The flags are read where all ranks agree: at the start of every step, within
    evaluations and after saves.

    SIGHUP stays ignored if it was ignored before, as under nohup. When a rank dies, a launcher sends SIGTERM to the
    others. They continue until they need the rank that died, and then report it. Therefore SIGTERM and SIGHUP keep
    this handler after an error or an agreed stop, so that the process ends by itself.

    Attributes:
        number: number of the signal that asked to stop; None before such a signal.
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
        """Return whether a signal asked for a checkpoint since the last call."""
        requested, self._save = self._save, False
        return requested

    def end(self) -> int:
        """Return the exit status of a stopped run, as shells define it. Call this when all ranks stop; if only another
        rank received a signal, the status is that of Ctrl-C."""
        self._ends = True
        return 128 + (self.number or signal.SIGINT)

    def __enter__(self) -> "SignalRequests":
        handled = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
        self._previous = {each: signal.signal(each, self._handle) for each in handled}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A launcher's signal must not end a rank that is about to report its result.
        keep_handlers = self._ends or error is not None
        # A later signal is then the first one again, which only sets a flag.
        self.number = None
        self._restore(kept=(signal.SIGTERM, signal.SIGHUP) if keep_handlers else ())

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
