"""Memory of a link between two processes: slots that one process fills and another reads, and semaphores for turns."""

import ctypes
import errno
import mmap
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """One process posts after it has written, the other takes before it reads (POSIX orders memory by these calls).

    Taking an available count and posting to a running process are a few instructions in user space; a wait sleeps in
    the kernel.

    Args:
        memory: the buffer that has `address`, kept alive.
        address: of SEMAPHORE_BYTES bytes, which one process has initialised.
    """

    def __init__(self, memory: Any, address: int) -> None:
        self._memory = memory
        self._address = address
        self._post = _function(_QUICK, "sem_post", ctypes.c_void_p)
        self._take = _function(_QUICK, "sem_trywait", ctypes.c_void_p)
        self._wait = _function(_BLOCKING, "sem_timedwait", ctypes.c_void_p, ctypes.POINTER(_Timespec))

    def initialize(self, value: int) -> None:
        """Set the count, before the other process uses it."""
        if _function(_QUICK, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)(self._address, 1, value):
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        """Add one and wake a process that waits."""
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


_PAGE = 4096
_WORD = 8


@dataclass(frozen=True)
class RingShape:
    """Number of slots, and bytes of each: whole pages, so that every dtype is aligned."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def of(cls, num_slots: int, maximum_bytes: int) -> "RingShape":
        return cls(num_slots, _pages(maximum_bytes))

    @property
    def control_bytes(self) -> int:
        """Two semaphores, then three words a slot: those handed back, those filled, and the bytes in the latter."""
        return _pages(2 * SEMAPHORE_BYTES + 3 * self.num_slots * _WORD)

    @property
    def total_bytes(self) -> int:
        """Bytes of shared memory of the whole ring."""
        return self.control_bytes + self.num_slots * self.slot_bytes


class RingBuffer:
    """One process's view of a link's memory.

    The sender takes a free slot, writes it and announces it; the receiver takes announcements in order, reads the
    slots and hands them back in any order. An entry is written before its semaphore is posted and read after that was
    taken, and no other synchronisation is needed.

    Attributes:
        slots: uint8, (num_slots, slot_bytes). It keeps the memory mapped.
        addresses: of the slots in this process.
    """

    def __init__(self, descriptor: int, shape: RingShape) -> None:
        """Map the file of `descriptor`, which has `shape.total_bytes` bytes."""
        # All pages at once: none is missing when the first step touches it.
        memory = mmap.mmap(descriptor, shape.total_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._filled = Semaphore(memory, address)
        self._free = Semaphore(memory, address + SEMAPHORE_BYTES)
        count, first = shape.num_slots, 2 * SEMAPHORE_BYTES
        words = memoryview(memory)[first : first + 3 * count * _WORD].cast("Q")
        self._handed_back, self._announced, self._bytes = (words[n * count : (n + 1) * count] for n in range(3))
        self._num_slots = count
        self._num_taken = self._num_announced = self._num_received = self._num_handed_back = 0
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=shape.control_bytes)
        self.slots: Tensor = slots.view(count, shape.slot_bytes)
        self.addresses = [slot.data_ptr() for slot in self.slots]

    def initialize(self) -> None:
        """Make all slots free. The process that made the memory does this before it shares it."""
        for slot in range(self._num_slots):
            self._handed_back[slot] = slot
        self._filled.initialize(0)
        self._free.initialize(self._num_slots)

    def take_free(self, seconds: float = 0.0) -> int | None:
        """Sender: a slot to write, waiting for one up to `seconds`."""
        if not (self._free.take() or (seconds and self._free.wait(seconds))):
            return None
        slot = self._handed_back[self._num_taken % self._num_slots]
        self._num_taken += 1
        return slot

    def announce(self, slot: int, num_bytes: int) -> None:
        """Sender: the slot's first bytes are the next message."""
        place = self._num_announced % self._num_slots
        self._announced[place], self._bytes[place] = slot, num_bytes
        self._num_announced += 1
        self._filled.post()

    def take_message(self, seconds: float = 0.0) -> tuple[int, int] | None:
        """Receiver: slot and bytes of the next message, waiting for one up to `seconds`."""
        if not (self._filled.take() or (seconds and self._filled.wait(seconds))):
            return None
        place = self._num_received % self._num_slots
        self._num_received += 1
        return self._announced[place], self._bytes[place]

    def hand_back(self, slot: int) -> None:
        """Receiver: the slot may be written again."""
        self._handed_back[self._num_handed_back % self._num_slots] = slot
        self._num_handed_back += 1
        self._free.post()


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
