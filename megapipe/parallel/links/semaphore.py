"""A counting semaphore that two processes share: the C library's, in memory that both have mapped."""

import ctypes
import errno
import time
from typing import Any

SEMAPHORE_BYTES = 64
"""Room for one, and a cache line of its own. The C library's own type takes 32 bytes."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_QUICK = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: for calls that never block
_BLOCKING = ctypes.CDLL(None, use_errno=True)


def _function(library: Any, name: str, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.argtypes = arguments
    return function


class Semaphore:
    """What one process posts after it has written, the other takes before it reads (POSIX orders memory by these).

    Taking what is there and posting to someone awake are a few instructions in user space, and a wait sleeps in the
    kernel.

    Args:
        memory: what holds `address`, kept alive.
        address: of SEMAPHORE_BYTES bytes, which one process has initialised.
    """

    def __init__(self, memory: Any, address: int) -> None:
        self._memory = memory
        self._address = address
        self._post = _function(_QUICK, "sem_post", ctypes.c_void_p)
        self._take = _function(_QUICK, "sem_trywait", ctypes.c_void_p)
        self._wait = _function(_BLOCKING, "sem_timedwait", ctypes.c_void_p, ctypes.POINTER(_Timespec))

    def initialize(self, value: int) -> None:
        """Set the count; before anyone else uses it."""
        if _function(_QUICK, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)(self._address, 1, value):
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        """Add one and wake whoever waits."""
        self._post(self._address)

    def take(self) -> bool:
        """Take one if there is one."""
        return not self._take(self._address)

    def wait(self, seconds: float) -> bool:
        """Take one, waiting for it up to so long; False where none came, or a signal handler ran."""
        whole, nanoseconds = divmod(time.time_ns() + int(seconds * 1e9), 1_000_000_000)
        if not self._wait(self._address, ctypes.byref(_Timespec(whole, nanoseconds))):
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "sem_timedwait")
        return False
