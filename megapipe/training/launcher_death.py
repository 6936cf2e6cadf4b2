"""A rank ends with the torchrun that started it, killed ones included: no process is left behind."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def end_with_launcher() -> None:
    """Have the system kill this process, and all its threads, when its parent dies. Linux alone, under torchrun alone.

    torchrun starts ranks from its main thread, so its death is that of the process; other launchers may start them
    from a thread that ends earlier, which would look the same.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died in between, and no signal comes
        os.kill(os.getpid(), signal.SIGKILL)
