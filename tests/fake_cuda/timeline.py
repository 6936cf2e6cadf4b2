"""A GPU's streams as vector clocks: which operation surely ends before which other one starts.

A stream's clock says, for every stream, how many of its operations surely ended before the next one here starts. The
host has a clock for each thread: what it has waited for. Two accesses of one memory race unless the clocks order them.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch

ROUNDING = 512
"""The caching allocator's smallest unit, in bytes."""

SEGMENT = 2**14
"""Bytes that the allocator asks the device for at once. It is 2 MiB really, more than a small model has in all."""

ROOT = Path(__file__).parents[2]
PRODUCT = (f"{ROOT / 'megapipe'}/", f"{ROOT / 'kernels'}/", f"{ROOT / 'tests/fake_cuda/faulty.py'}")
"""Where the code is whose lines are named."""


class Fault(NamedTuple):
    """Something that would go wrong on a GPU, sometimes. where, other: places in the product, `file:line`."""

    kind: str
    where: str
    other: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}" + (f" ({self.other})" if self.other else "")


class Access(NamedTuple):
    """The `tick`-th operation of a stream. place: where the product started it."""

    stream: int
    tick: int
    place: "Place"


class Place(NamedTuple):
    """A line of the product."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE = Place("outside of the product", 0)


@dataclass(eq=False)
class Memory:
    """One storage.

    size: bytes as the allocator rounds them. stream: where it was allocated, None for host memory. released: the line
    that shrank it to no bytes.
    """

    stream: int | None
    size: int
    address: int
    made: Place
    pinned: bool = False
    writer: Access | None = None
    readers: dict[int, Access] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    released: Place | None = None


_files: dict[CodeType, str | None] = {}


def place() -> Place:
    """The innermost line of the product that led here; of the main thread where a thread of torch's own runs."""
    frame = sys._getframe(1)
    line = _product_line(frame)
    if line is None and threading.get_ident() != threading.main_thread().ident:
        thread = threading.current_thread()
        if isinstance(thread, threading._DummyThread) or not hasattr(thread, "_target"):
            outer = sys._current_frames().get(threading.main_thread().ident or 0)
            line = None if outer is None else _product_line(outer)
    return NOWHERE if line is None else line


def _product_line(frame: object) -> Place | None:
    while frame is not None:
        code = frame.f_code  # type: ignore[attr-defined]
        if code not in _files:
            name = str(Path(code.co_filename).resolve()) if code.co_filename.endswith(".py") else ""
            mine = name.startswith(PRODUCT)
            _files[code] = str(Path(name).relative_to(ROOT)) if mine else None
        file = _files[code]
        if file is not None:
            return Place(file, frame.f_lineno)  # type: ignore[attr-defined]
        frame = frame.f_back  # type: ignore[attr-defined]
    return None


class Timeline:
    """All streams of one device, its memory, and the host's threads.

    Attributes:
        faults: found so far, each once.
        syncs: times that the host waited for the device, by reason and place.
        waits: times that the program let a stream or the host wait, by place. dropped: a place whose waits are left
            out, as if the line were not there.
        launches, moved: operations and bytes by name.
        loads_wait: loading a kernel, or allocating memory, while a receive is under way is a fault.
        live, peak: bytes of device memory by stream, now and at most; `peak_total` of all streams at once.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, dict[int, int]] = {0: {}}
        self._ticks: dict[int, int] = {0: 0}
        self._next_stream = 1
        self._host = threading.local()
        self._all_threads: dict[int, int] = {}
        self._memories: dict[int, Memory] = {}
        self._next_address = 1 << 32
        self.faults: dict[Fault, None] = {}
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[str] = Counter()
        self.dropped: str | None = None
        self.launches: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.live: Counter[int] = Counter()
        self.live_total = 0
        self.peak_total = 0
        self.peak: Counter[int] = Counter()
        self.loads_wait = True
        self._received: dict[int, int] = {}
        self._launched: set[str] = set()

    # Streams, events and the host.

    def new_stream(self) -> int:
        stream, self._next_stream = self._next_stream, self._next_stream + 1
        self._clocks[stream], self._ticks[stream] = {}, 0
        return stream

    def record(self, stream: int) -> dict[int, int]:
        """An event: what has surely ended once everything that the stream has been given so far has."""
        event = {**self._clocks[stream], stream: self._ticks[stream]}
        _advance(event, self.host)
        return event

    def wait(self, stream: int, event: dict[int, int]) -> None:
        """Run later operations of the stream after the event. The program asks for it."""
        if not self._drops():
            self.follow(stream, event)

    def follow(self, stream: int, event: dict[int, int]) -> None:
        """As `wait`, which torch itself asks for."""
        _advance(self._clocks[stream], event)

    def _drops(self) -> bool:
        """Note a wait of the program, and whether it is the one to be left out."""
        at = str(place())
        self.waits[at] += 1
        return at == self.dropped

    @property
    def host(self) -> dict[int, int]:
        """The operations that this thread of the host knows to have ended."""
        if not hasattr(self._host, "clock"):
            self._host.clock = {}
        clock: dict[int, int] = self._host.clock
        return clock

    def synchronize(self, event: dict[int, int], reason: str) -> None:
        """This thread of the host waits for an event."""
        self.syncs[reason, str(place())] += 1
        if reason.endswith("ynchronize") and self._drops():
            return
        _advance(self.host, event)
        _advance(self._all_threads, event)

    def synchronize_device(self, reason: str) -> None:
        """This thread of the host waits for all streams."""
        self.synchronize(dict(self._ticks), reason)

    def publish(self, carrier: object) -> None:
        """Publish the clock of this host thread through the carrier (a thread, a future, a queue)."""
        if self.host:
            clock = carrier.__dict__.setdefault("_known_to_have_ended", {})
            _advance(clock, self.host)

    def learn(self, carrier: object) -> None:
        """The counterpart of `publish`."""
        clock = carrier.__dict__.get("_known_to_have_ended")
        if clock:
            _advance(self.host, clock)

    # Memory.

    def memory(self, storage: torch.UntypedStorage) -> Memory | None:
        return self._memories.get(storage._cdata)

    def record_stream(self, storage: int, stream: int) -> None:
        """The allocator keeps a freed storage until the stream has done what it was given before."""
        memory = self._memories.get(storage)
        if memory is not None:
            memory.recorded.add(stream)

    def allocated(self, storage: torch.UntypedStorage, stream: int | None, *, pinned: bool = False) -> Memory:
        """A new storage. stream: None for host memory."""
        num_bytes = storage.nbytes()
        size = -(-num_bytes // ROUNDING) * ROUNDING if stream is not None else num_bytes
        memory = Memory(stream, size, self._next_address, place(), pinned)
        self._next_address += -(-size // ROUNDING) * ROUNDING + ROUNDING
        key = storage._cdata
        self._memories[key] = memory
        if stream is not None:
            memory.writer = self._before(stream, memory.made)
            self._grow(stream, size)
        weakref.finalize(storage, self._freed, key, memory)
        return memory

    def resized(self, memory: Memory, num_bytes: int) -> None:
        """A storage's memory came or went."""
        memory.released = None if num_bytes else place()
        if memory.stream is None:
            return
        size = -(-num_bytes // ROUNDING) * ROUNDING
        if size < memory.size:
            self._check_free(memory)
        self._grow(memory.stream, size - memory.size)
        memory.size = size
        memory.address = self._next_address
        self._next_address += size + ROUNDING
        memory.writer, memory.readers, memory.recorded = self._before(memory.stream, place()), {}, set()

    def _before(self, stream: int, made: Place) -> Access:
        """New memory may be what the stream's operations so far still work on: another stream has to wait for them."""
        return Access(stream, self._ticks[stream], made)

    def _grow(self, stream: int, size: int) -> None:
        self.live[stream] += size
        self.live_total += size
        if self.live[stream] > -(-self.peak[stream] // SEGMENT) * SEGMENT and self._receives():
            self.fault("needs more memory than ever before while a receive is under way", place())
        self.peak[stream] = max(self.peak[stream], self.live[stream])
        self.peak_total = max(self.peak_total, self.live_total)

    def _freed(self, key: int, memory: Memory) -> None:
        if self._memories.get(key) is memory:
            del self._memories[key]
        if memory.stream is not None:
            self._check_free(memory)
            self._grow(memory.stream, -memory.size)

    def _check_free(self, memory: Memory) -> None:
        """The allocator hands freed memory to the next allocation on its stream, at once.

        Whoever drops the last reference, every other holder has dropped its own before, with all that it waited for.
        """
        assert memory.stream is not None
        known = dict(self._clocks[memory.stream])
        for stream in memory.recorded:  # the allocator waits for an event of each, of now
            _advance(known, self._clocks[stream])
        uses = [*memory.readers.values(), *([memory.writer] if memory.writer else [])]
        for use in uses:
            if use.stream in (memory.stream, *memory.recorded):
                continue
            if known.get(use.stream, 0) < use.tick and self._all_threads.get(use.stream, 0) < use.tick:
                self.fault(
                    "memory is freed while another stream may still use it", use.place, memory.made, "allocated"
                )

    # Operations.

    def received(self, stream: int) -> None:
        """The last operation of a stream is a receive, which spins on the device until its peer sends."""
        self._received[stream] = self._ticks[stream]

    def _receives(self) -> bool:
        """Whether a receive is under way, as far as any thread of the host knows."""
        return self.loads_wait and any(
            self._all_threads.get(stream, 0) < tick for stream, tick in self._received.items()
        )

    def loaded(self, name: str) -> None:
        """A kernel is launched. Its module is loaded at the first launch, which may wait for all the device does.

        NCCL loads its own with a communicator, and copies between host and device need none.
        """
        loads = name not in self._launched and not name.startswith(("nccl ", "copy to the "))
        if loads and self._receives():
            self.fault(f"the first launch of {name} comes while a receive is under way", place())
        self._launched.add(name)

    def launch(
        self, stream: int, reads: Iterable[Memory], writes: Iterable[Memory], at: Place | None = None
    ) -> Access:
        """An operation on a stream, checked against every other one that touches its memory."""
        at = place() if at is None else at
        clock = self._clocks[stream]
        if self.host:
            _advance(clock, self.host)
        self._ticks[stream] += 1
        access = Access(stream, self._ticks[stream], at)
        clock[stream] = access.tick
        for memory in reads:
            self._check_not_released(memory, "reads", at)
            writer = memory.writer
            if writer is not None and clock.get(writer.stream, 0) < writer.tick:
                self.fault("reads what another stream writes, without waiting for it", at, writer.place, "written")
            memory.readers[stream] = access
        for memory in writes:
            self._check_not_released(memory, "writes", at)
            self._check_overwrite(memory, clock, at)
            memory.writer, memory.readers = access, {}
        return access

    def _check_not_released(self, memory: Memory, verb: str, at: Place) -> None:
        """A tensor that looks into a released storage has its shape, but no memory."""
        if memory.released is not None:
            self.fault(f"{verb} memory that was released", at, memory.released, "released")

    def _check_overwrite(self, memory: Memory, clock: dict[int, int], at: Place) -> None:
        writer = memory.writer
        if writer is not None and clock.get(writer.stream, 0) < writer.tick:
            self.fault("overwrites what another stream writes, without waiting for it", at, writer.place, "written")
        for reader in memory.readers.values():
            if clock.get(reader.stream, 0) < reader.tick:
                self.fault("overwrites what another stream still reads", at, reader.place, "read")

    def host_reads(self, memory: Memory) -> None:
        """The host looks into host memory."""
        self._check_not_released(memory, "the host uses", place())
        if memory.writer is not None and self.host.get(memory.writer.stream, 0) < memory.writer.tick:
            self.fault("the host reads what a copy still fills", place(), memory.writer.place, "copied")

    def host_writes(self, memory: Memory) -> None:
        """The host writes host memory."""
        self.host_reads(memory)
        for reader in memory.readers.values():
            if self.host.get(reader.stream, 0) < reader.tick:
                self.fault("the host overwrites what a copy still reads", place(), reader.place, "copied")
        memory.writer, memory.readers = None, {}

    def fault(self, kind: str, at: Place, other: Place | None = None, verb: str = "") -> None:
        self.faults[Fault(kind, str(at), "" if other is None else f"{verb} at {other}")] = None


def _advance(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
