"""What autograd and a split backward's tape keep of one forward, movable to host memory and back.

Autograd's saved-tensor hooks put a handle where a tensor would be kept; handles of one storage share it, so that it is
counted and copied once. Values are never changed: a backward finds the bits that its forward left.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.engine.host_copies import HostPool, Move
from megapipe.layers.split import Record, SplitTape


@dataclass
class _Storage:
    """Bytes that several kept tensors may look into; on the device, uint8 [bytes], or in host memory."""

    on_device: Tensor | None
    in_host: Tensor | None = None


@dataclass(frozen=True)
class _Kept:
    """A tensor that is kept: a view of a storage."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor. Raises RuntimeError while it is in host memory."""
        memory = self.storage.on_device
        if memory is None:
            raise RuntimeError("an offloaded activation is used before the schedule has reloaded it")
        view = torch.empty(0, dtype=self.dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class _Entered(torch.autograd.Function):
    """Hands data into a graph whose leaf takes no memory: the leaf gets the data's gradient, and keeps none of it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, data: Tensor) -> Tensor:
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SavedTensors:
    """Everything that one forward of one micro-batch through a unit keeps for its backward.

    resident: storages, by address, that stay on the device whatever keeps them: weights and what the caller holds.
    """

    def __init__(self, resident: Iterable[int]) -> None:
        self._resident = set(resident)
        self._storages: dict[int, _Storage] = {}
        self._tape: list[tuple[Record, tuple[_Kept | Tensor, ...]]] = []
        self._moving: list[tuple[_Storage, Tensor]] = []

    def entered(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(leaves, inputs for the forward) in place of a forward's inputs, themselves leaves: their gradients go to
        leaves that keep no memory. What carries no gradient stays as it is."""
        leaves = tuple(_leaf(each) if each.requires_grad else each for each in inputs)
        passed = tuple(
            _Entered.apply(leaf, each.detach()) if each.requires_grad else each
            for leaf, each in zip(leaves, inputs, strict=True)
        )
        return leaves, passed

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within the block, whatever a forward saves for its backward is kept here."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def finish(self, outputs: tuple[Tensor, ...], tape: SplitTape | None) -> None:
        """The forward is over: its outputs belong to whoever takes them; what the tape keeps is kept here too."""
        for output in outputs:
            self._resident.add(address_of(output))
            self._storages.pop(address_of(output), None)
        if tape is not None:
            self._tape = [(record, tuple(self._pack(tensor) for tensor in record.saved)) for record in tape.records]

    def leaving(self, pool: HostPool) -> list[Move]:
        """Copies that take it to host memory; `left` ends what they begin."""
        for record, _ in self._tape:
            record.saved = ()
        self._moving = [
            (storage, pool.take(storage.on_device.numel()))
            for storage in self._storages.values()
            if storage.on_device is not None
        ]
        return [(buffer, storage.on_device) for storage, buffer in self._moving if storage.on_device is not None]

    def left(self) -> None:
        """The copies have been waited for: free the device's memory."""
        for storage, buffer in self._moving:
            storage.on_device, storage.in_host = None, buffer

    def arriving(self, device: torch.device) -> list[Move]:
        """Copies that bring it back into memory of the device; `arrived` ends what they begin."""
        moves = []
        for storage, buffer in self._moving:
            storage.on_device = torch.empty(buffer.numel(), dtype=torch.uint8, device=device)
            moves.append((storage.on_device, buffer))
        return moves

    def arrived(self, pool: HostPool) -> None:
        """The copies have been waited for: the graph and the tape have everything, and let go of it as they run."""
        for storage, buffer in self._moving:
            storage.in_host = None
            pool.give_back(buffer)
        for record, kept in self._tape:
            record.saved = tuple(self._unpack(each) for each in kept)
        self._moving, self._tape, self._storages = [], [], {}

    def _pack(self, tensor: Tensor) -> _Kept | Tensor:
        address = address_of(tensor)
        movable = tensor.is_floating_point() or tensor.dtype in (torch.bool, torch.uint8)  # others are the batch's own
        if not movable or address in self._resident or tensor.untyped_storage().nbytes() == 0:
            return tensor.detach()  # detached: an output would keep the graph that keeps it
        if address not in self._storages:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._storages[address] = _Storage(memory)
        return _Kept(
            self._storages[address], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    @staticmethod
    def _unpack(kept: _Kept | Tensor) -> Tensor:
        return kept.tensor() if isinstance(kept, _Kept) else kept


def _leaf(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape).requires_grad_()


def address_of(tensor: Tensor) -> int:
    """Where a tensor's storage begins: what tells live storages apart."""
    return tensor.untyped_storage().data_ptr()
