"""Memory of a link between two processes: slots that one process fills and the other reads, and semaphores that order
them."""

import ctypes
import errno
import mmap
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEMAPHORE_BYTES = 64
"""Room for one semaphore, on a separate cache line. The C library's type takes 32 bytes."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# PyDLL keeps the interpreter lock: for calls that never block.
_QUICK = ctypes.PyDLL(None, use_errno=True)
_BLOCKING = ctypes.CDLL(None, use_errno=True)
# A wait by the wall clock lasts longer if that clock is set back. glibc before 2.30 has no other wait for semaphores.
_CLOCK = time.CLOCK_MONOTONIC if hasattr(_BLOCKING, "sem_clockwait") else time.CLOCK_REALTIME


def _function(library: Any, name: str, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.argtypes = arguments
    return function


class Semaphore:
    """A semaphore that one process posts after it has written, and the other takes before it reads (these calls order
    memory in POSIX).

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
        if _CLOCK == time.CLOCK_MONOTONIC:
            wait = _function(_BLOCKING, "sem_clockwait", ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))
            self._wait = lambda address, until: wait(address, _CLOCK, until)
        else:
            self._wait = _function(_BLOCKING, "sem_timedwait", ctypes.c_void_p, ctypes.POINTER(_Timespec))

    def initialize(self, value: int) -> None:
        """Set the count, before the other process uses it."""
        if _function(_QUICK, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)(self._address, 1, value):
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        """Add one to the count, and wake a process that waits."""
        self._post(self._address)

    def take(self) -> bool:
        """Decrement the count if it is positive; return whether it was."""
        return not self._take(self._address)

    def wait(self, seconds: float) -> bool:
        """Decrement the count, after waiting up to `seconds` for it to be positive; False after that time, or if a
        signal handler ran."""
        until = time.clock_gettime_ns(_CLOCK) + int(seconds * 1e9)
        if not self._wait(self._address, _Timespec(*divmod(until, 1_000_000_000))):
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "wait for a semaphore")
        return False


_PAGE = 4096
"""Bytes of a page of memory."""
_WORD = 8
"""Bytes of a number in the control part of a ring."""


@dataclass(frozen=True)
class RingShape:
    """Number of slots, and bytes per slot: whole pages, so that every dtype is aligned."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def of(cls, num_slots: int, maximum_bytes: int) -> "RingShape":
        return cls(num_slots, _pages(maximum_bytes))

    @property
    def control_bytes(self) -> int:
        """Bytes of two semaphores, then three words per slot: slots handed back, slots filled, and bytes in filled
        slots."""
        return _pages(2 * SEMAPHORE_BYTES + 3 * self.num_slots * _WORD)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole ring in shared memory."""
        return self.control_bytes + self.num_slots * self.slot_bytes


class RingBuffer:
    """One process's view of a link's memory.

    The sender takes a free slot, writes it and announces it; the receiver takes announcements in order, reads the
    slots and hands them back in any order. An entry is written before its semaphore is posted and read after the
    semaphore was taken, so no other synchronisation is needed.

    Attributes:
        slots: uint8, (num_slots, slot_bytes). It keeps the memory mapped.
        addresses: of the slots in this process.
    """

    def __init__(self, descriptor: int, shape: RingShape) -> None:
        """Map the file of `descriptor`, which has `shape.total_bytes` bytes."""
        # Touch all pages now, so that the first step has no page faults.
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
        """Make all slots free. The process that created the memory does this before it shares it."""
        for slot in range(self._num_slots):
            self._handed_back[slot] = slot
        self._filled.initialize(0)
        self._free.initialize(self._num_slots)

    def take_free(self, seconds: float = 0.0) -> int | None:
        """Sender: return a free slot, after waiting up to `seconds` for one."""
        if not (self._free.take() or (seconds and self._free.wait(seconds))):
            return None
        slot = self._handed_back[self._num_taken % self._num_slots]
        self._num_taken += 1
        return slot

    def announce(self, slot: int, num_bytes: int) -> None:
        """Sender: announce the first `num_bytes` of a slot as the next message."""
        place = self._num_announced % self._num_slots
        self._announced[place], self._bytes[place] = slot, num_bytes
        self._num_announced += 1
        self._filled.post()

    def take_message(self, seconds: float = 0.0) -> tuple[int, int] | None:
        """Receiver: return slot and bytes of the next message, after waiting up to `seconds` for one."""
        if not (self._filled.take() or (seconds and self._filled.wait(seconds))):
            return None
        place = self._num_received % self._num_slots
        self._num_received += 1
        return self._announced[place], self._bytes[place]

    def hand_back(self, slot: int) -> None:
        """Receiver: let the sender reuse the slot."""
        self._handed_back[self._num_handed_back % self._num_slots] = slot
        self._num_handed_back += 1
        self._free.post()


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
