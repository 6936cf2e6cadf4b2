"""Activations, optimizer state and weights that move to host memory and return before they are used.

Autograd's saved-tensor hooks store a handle in place of each saved tensor; handles of one storage share it, so that it
is counted and copied once. Copies run in the background, one in each direction. Only one unit's activations leave at a
time: the compute waits for the previous copy, whose memory it reuses. So a rank holds exactly the activations that its
schedule says, however slow copies are. Values never change: a backward reads the bits that its forward saved.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megapipe.layers.split import InsteadOf, Record, SplitTape, Tensors, new_probe
from megapipe.parallel.groups import Work
from megapipe.parallel.unit_state import UnitState

Move = tuple[Tensor, Tensor]
"""(target, source): two tensors of one shape and dtype, one of them in host memory."""


class Copy(ABC):
    """Copies that were started together."""

    @abstractmethod
    def wait(self) -> None:
        """Let the caller's next operations wait for the copies: on a GPU the stream waits, on a CPU the thread."""

    def synchronize(self) -> None:
        """Wait on the host until the copies are done."""
        self.wait()


class CopyStream(ABC):
    """Copies in one direction. They run in the order in which they were started, each after everything that was
    computed before."""

    @abstractmethod
    def start(self, moves: Sequence[Move]) -> Copy:
        """Start copying. Neither sources nor targets may be changed or freed before a wait for the copy has
        returned."""


class StateCopies(Protocol):
    """Copies of unit states for a checkpoint, which a step makes in the background."""

    def start(self, state: UnitState, lane: CopyStream) -> None:
        """Start copying the state, if it is to be copied and its copy has not started yet."""

    def wait(self, state: UnitState) -> None:
        """Wait until the state may change. If its copy has not started, it is made now."""


class HostPool:
    """Buffers of host memory, reused by size. For a GPU they are page-locked, because other copies block its compute.

    Attributes:
        num_bytes: size of all buffers that were allocated.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.num_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """Return an uninitialized buffer, uint8 [num_bytes]."""
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        self.num_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back for reuse. Call it after a wait for all copies out of the buffer."""
        self._free[buffer.numel()].append(buffer)


class ThreadCopies(CopyStream):
    """Copies of CPU tensors on a thread, which takes the place of a GPU's copy engine."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix=f"megapipe {self._name}")

    def start(self, moves: Sequence[Move]) -> Copy:
        return _ThreadCopy(self._thread.submit(self.copy, moves))

    def copy(self, moves: Sequence[Move]) -> None:
        """Make the copies; runs on the thread."""
        for target, source in moves:
            target.copy_(source)


class _ThreadCopy(Copy):
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class DeviceCopies(CopyStream):
    """Copies of GPU tensors on a separate stream.

    No tensor is recorded on that stream: the caller keeps sources and targets until the compute stream has waited for
    the copy, so their memory is reused directly after the copy, but never earlier.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def start(self, moves: Sequence[Move]) -> Copy:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in moves:
                target.copy_(source, non_blocking=True)
        return _DeviceCopy(self._stream.record_event(), self._device)


class _DeviceCopy(Copy):
    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done = done
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def synchronize(self) -> None:
        self._done.synchronize()


def copy_stream(device: torch.device, name: str) -> CopyStream:
    """Return the copies of a device in one direction. name: of the thread on a CPU."""
    return DeviceCopies(device) if device.type == "cuda" else ThreadCopies(name)


@dataclass
class _Storage:
    """A storage that several saved tensors may be views of; uint8 [bytes], on the device or in host memory."""

    on_device: Tensor | None
    in_host: Tensor | None = None


@dataclass(frozen=True)
class _Kept:
    """A saved tensor: a view of a storage."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor. Raises RuntimeError while it is in host memory."""
        memory = self.storage.on_device
        if memory is None:
            raise RuntimeError("an offloaded activation is used before it is reloaded")
        view = torch.empty(0, dtype=self.dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


RANDOM_STATE_BYTES = 16
"""Storages up to this size stay on the device: torch's fused attention saves two numbers that its dropout starts from,
and their copies would only be two more commands."""


class SavedTensors:
    """All tensors that one forward of one micro-batch through a unit saves for its backward.

    resident: addresses of storages that always stay on the device: weights, the micro-batch's own tensors, and tensors
    that the caller holds.
    """

    def __init__(self, resident: Iterable[int]) -> None:
        self._resident = set(resident)
        self._storages: dict[int, _Storage] = {}
        self._tape: list[tuple[Record, tuple[_Kept | Tensor, ...]]] = []
        self._moving: list[tuple[_Storage, Tensor]] = []

    def entered(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """Return (leaves, inputs for the forward) for a forward's inputs, which are leaves: their gradients go to
        leaves that take no memory. Inputs without a gradient stay as they are."""
        leaves = tuple(new_probe(each.shape, each) if each.requires_grad else each for each in inputs)
        passed = tuple(
            InsteadOf.apply(leaf, each.detach()) if each.requires_grad else each
            for leaf, each in zip(leaves, inputs, strict=True)
        )
        return leaves, passed

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the tensors that a forward within the block saves for its backward."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def finish(self, outputs: Tensors, tape: SplitTape | None) -> None:
        """End the forward. Its outputs belong to the caller; tensors of the tape are collected too."""
        for output in outputs:
            self._resident.add(address_of(output))
            self._storages.pop(address_of(output), None)
        if tape is not None:
            self._tape = [(record, tuple(self._pack(tensor) for tensor in record.saved)) for record in tape.records]

    def leaving(self, pool: HostPool) -> list[Move]:
        """Return the copies to host memory; call `left` when they are done."""
        for record, _ in self._tape:
            record.saved = ()
        self._moving = [
            (storage, pool.take(storage.on_device.numel()))
            for storage in self._storages.values()
            if storage.on_device is not None
        ]
        return [(buffer, storage.on_device) for storage, buffer in self._moving if storage.on_device is not None]

    def left(self) -> None:
        """Free the device's memory, after a wait for the copies."""
        for storage, buffer in self._moving:
            storage.on_device, storage.in_host = None, buffer

    def arriving(self, device: torch.device) -> list[Move]:
        """Return the copies back to the device; call `arrived` when they are done."""
        moves = []
        for storage, buffer in self._moving:
            storage.on_device = torch.empty(buffer.numel(), dtype=torch.uint8, device=device)
            moves.append((storage.on_device, buffer))
        return moves

    def arrived(self, pool: HostPool) -> None:
        """Restore the tensors of the graph and the tape, after a wait for the copies."""
        for storage, buffer in self._moving:
            storage.in_host = None
            pool.give_back(buffer)
        for record, kept in self._tape:
            record.saved = tuple(self._unpack(each) for each in kept)
        self._moving, self._tape, self._storages = [], [], {}

    def _pack(self, tensor: Tensor) -> _Kept | Tensor:
        address = address_of(tensor)
        # The int32 tensors are the blocks of flex_attention, which all units of a micro-batch share.
        small = tensor.untyped_storage().nbytes() <= RANDOM_STATE_BYTES
        if tensor.dtype == torch.int32 or address in self._resident or small:
            # Detached, because an output would hold a reference to the graph that holds it.
            return tensor.detach()
        if address not in self._storages:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._storages[address] = _Storage(memory)
        return _Kept(
            self._storages[address], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    @staticmethod
    def _unpack(kept: _Kept | Tensor) -> Tensor:
        return kept.tensor() if isinstance(kept, _Kept) else kept


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which identifies it while it is alive."""
    return tensor.untyped_storage().data_ptr()


Watch = Callable[[Callable[[], None]], None]


@dataclass
class _Leaving:
    """A copy to host memory in progress. finish: frees the memory on the device. of_state: whether it is optimizer
    state."""

    owner: object
    copy: Copy
    finish: Callable[[], None]
    of_state: bool


class WatchedWork(Work):
    """A work or a copy, awaited through `watch`."""

    def __init__(self, work: Work | Copy, watch: Watch) -> None:
        self._work = work
        self._watch = watch

    def wait(self) -> None:
        self._watch(self._work.wait)


class Swaps:
    """A rank's traffic between its device and host memory. Engines over the same stages use it in turn.

    Attributes:
        pool: the host memory of activations.
    """

    def __init__(
        self, device: torch.device, to_host: CopyStream | None = None, to_device: CopyStream | None = None
    ) -> None:
        """Create the traffic of `device`. to_host, to_device: streams of copies; by default new ones of the device."""
        self._device = device
        self._pinned = device.type == "cuda"
        self._to_host = copy_stream(device, "offload") if to_host is None else to_host
        self._to_device = copy_stream(device, "reload") if to_device is None else to_device
        self.pool = HostPool(pinned=self._pinned)
        self._leaving: _Leaving | None = None
        self._arriving: dict[int, tuple[Copy, Callable[[], None]]] = {}
        self._home: dict[int, dict[str, Tensor]] = {}
        self._watch: Watch = _at_once

    def snapshot(self, copies: StateCopies, state: UnitState) -> None:
        """Start copying a state for a checkpoint, after the copies to host memory that were started earlier."""
        copies.start(state, self._to_host)

    def may_change(self, copies: StateCopies, state: UnitState) -> None:
        """Wait for the checkpoint copy of a state, before an update changes the state."""
        self._watch(lambda: copies.wait(state))

    def watch(self, wait: Watch | None) -> None:
        """Call `wait` for every wait for a copy, with a function that waits; None restores plain waits."""
        self._watch = _at_once if wait is None else wait

    def offload(self, saved: SavedTensors) -> None:
        """Start moving activations to host memory."""
        self._settle()
        copy = self._to_host.start(saved.leaving(self.pool))
        self._leaving = _Leaving(saved, copy, saved.left, of_state=False)

    def reload(self, saved: SavedTensors) -> None:
        """Start moving activations back to the device."""
        if self._leaving is not None and self._leaving.owner is saved:
            self._settle()
        copy = self._to_device.start(saved.arriving(self._device))
        self._arriving[id(saved)] = copy, lambda: saved.arrived(self.pool)

    def offload_state(self, state: UnitState) -> None:
        """Start moving the buffers of updates to host memory, which is allocated the first time."""
        self._settle()
        there = state.update_buffers()
        home = self._home.pop(id(state), {})
        here = {name: home[name] if name in home else self._host_buffer(each) for name, each in there.items()}
        copy = self._to_host.start([(here[name], there[name]) for name in there])
        state.place_update_buffers(here, in_host=True)
        self._leaving = _Leaving(state, copy, there.clear, of_state=True)

    def reload_state(self, state: UnitState) -> None:
        """Start copying the buffers of an update to the device; `arrive` then puts them in place of those in host
        memory."""
        self._settle()
        if not state.in_host:
            return
        home = state.update_buffers()
        there = {name: torch.empty_like(each, device=self._device) for name, each in home.items()}
        copy = self._to_device.start([(there[name], home[name]) for name in home])
        self._home[id(state)] = home
        self._arriving[id(state)] = copy, lambda: state.place_update_buffers(there, in_host=False)

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        """Start to copy a unit's weights, `part` in host memory, to the device."""
        return WatchedWork(self._to_device.start([(whole, part)]), self._watch)

    def arrive(self, owner: SavedTensors | UnitState) -> None:
        """Let the following operations wait for a reload of `owner`, if one was started."""
        if id(owner) in self._arriving:
            copy, put_into_place = self._arriving.pop(id(owner))
            self._watch(copy.wait)
            put_into_place()

    def end_section(self) -> None:
        """Wait until all optimizer state is in host memory, for readers between steps."""
        if self._leaving is not None and self._leaving.of_state:
            self._watch(self._leaving.copy.synchronize)
            self._settle()

    def _settle(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self._watch(leaving.copy.wait)
            leaving.finish()

    def _host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pinned)


def _at_once(wait: Callable[[], None]) -> None:
    wait()
