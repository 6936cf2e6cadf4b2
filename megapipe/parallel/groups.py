"""Collective groups as objects: one interface for torch.distributed and for a single rank.

`in_process` has groups of threads.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.config import InputError


class CommunicationError(RuntimeError):
    """A peer failed, did not answer, or called a different collective."""


class LaunchError(InputError, RuntimeError):
    """The launcher's environment does not describe a world that fits the layout."""


ReduceOperation = Literal["sum", "max"]


class Work(ABC):
    """A collective, a send or a receive that was started."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the result may be used, or a sent tensor overwritten: on a CPU the work is complete, on a GPU
        the current stream waits for it.

        Raises:
            CommunicationError: a member failed, did not answer, or sent something other than expected.
        """


def awaited_unless(async_op: bool, work: Work) -> Work:
    """Return `work`, after a wait for it unless `async_op` is true."""
    if not async_op:
        work.wait()
    return work


class Group(ABC):
    """Ranks that communicate, from the view of one of them.

    All members call the same collectives in the same order, with tensors of one shape and type.

    Attributes:
        name: name of the group in the mesh, for messages ("tensor", "data").
        ranks: the members' global ranks. A member's index in this tuple is its rank in the group.
        rank: this member's rank in the group.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int) -> None:
        self.name = name
        self.ranks = ranks
        self.rank = rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        """This member's rank in the world."""
        return self.ranks[self.rank]

    def own_part(self, whole: Tensor) -> Tensor:
        """Return this member's n elements of a flat tensor [size * n]."""
        return whole.view(self.size, -1)[self.rank]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, ranks={list(self.ranks)}, rank={self.rank})"

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        """Replace `tensor`, in place, by the sum or maximum over the members; every member gets the same bits.

        With `async_op`, do not use the tensor before `wait()` of the returned work has returned. Otherwise the result
        is complete on return.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every member's tensor, stacked in rank order: (...) -> (size, ...)."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return the sum, over the members, of the slice that belongs to this member: (size, ...) -> (...)."""

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start `all_gather` in the background; call the returned function once to wait for the result.

        `tensor` must not be changed until then. The default implementation has finished on return.
        """
        gathered = self.all_gather(tensor)
        return lambda: gathered

    def start_reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start `reduce_scatter` in the background, as `start_all_gather` does."""
        reduced = self.reduce_scatter(tensor)
        return lambda: reduced

    @abstractmethod
    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        """Start filling `whole` [size * n] with every member's `part` [n] in rank order.

        `part` may be this member's own part of `whole`. Do not use either before `wait()` of the returned work has
        returned.
        """

    @abstractmethod
    def reduce_into_part(self, whole: Tensor) -> Work:
        """Start summing `whole` [size * n] over the members; each gets its own n elements of the sum, in place.

        Do not use `whole` before `wait()` of the returned work has returned; its other elements are then undefined.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work:
        """Overwrite `tensor` with that of the member whose rank in the group is `source`; `async_op` as in
        `all_reduce`."""

    @abstractmethod
    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        """Start sending `tensor` to the next member, and receiving into `into` from the previous one.

        The first member follows the last. Both are contiguous, with the same shape and dtype. Do not use either before
        `wait()` of the returned work has returned. No member waits for another before that.
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every member's Python object, in rank order. For small objects during set-up, not within a step."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every member has called this."""


class Finished(Work):
    """A work that was complete when it was started."""

    def wait(self) -> None:
        """Nothing to wait for."""


FINISHED = Finished()


class SoloGroup(Group):
    """A group of one rank."""

    def __init__(self, name: str, global_rank: int = 0) -> None:
        super().__init__(name, (global_rank,), 0)

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        return FINISHED

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().unsqueeze(0)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().squeeze(0)

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        if whole.data_ptr() != part.data_ptr():
            whole.copy_(part)
        return FINISHED

    def reduce_into_part(self, whole: Tensor) -> Work:
        return FINISHED

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work:
        return FINISHED

    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        into.detach().copy_(tensor.detach())
        return FINISHED

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        """Nothing to wait for."""


class SilentGroup(SoloGroup):
    """One member of a group whose other members are absent; its collectives return results of the right shape at once.

    A collective uses this member's tensors in place of those of the others. So its results have no meaning, but
    computation between collectives takes the same time as on a real rank. Tensors may be on the meta device.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int) -> None:
        Group.__init__(self, name, ranks, rank)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().unsqueeze(0).expand(self.size, *tensor.shape).contiguous()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[self.rank].clone()

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        whole.detach().view(self.size, -1).copy_(part.detach().clone().expand(self.size, -1))
        return FINISHED

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size


_REDUCE_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_EXCHANGE_TAG = 1 << 20
"""Tags below are those of links in the same process group."""
# torch 2.13 renamed these two; the old names still work there but warn at each call.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _go_on() -> None:
    """Start no other work before a wait."""


class HostExchange(Protocol):
    """Exchanges tensors between the members of a group on CPUs."""

    def start(self, peers: Sequence[int], pieces: Sequence[Tensor], received: Sequence[Tensor]) -> "Sequence[Waited]":
        """Start sending every peer its piece, and receiving from each peer. pieces, received: flat tensors by group
        rank."""


class Waited(Protocol):
    """A message in transit."""

    def wait(self) -> Any:
        """Wait until the message has been received, or sent."""


class DistributedGroup(Group):
    """The members of one `torch.distributed.ProcessGroup`, in its order.

    Torch owns the process group, and this object does not keep it alive: a group that still exists when the
    interpreter ends aborts the process in a quarter of all runs (gloo's threads are still joinable then).

    Args:
        make_messages: creates the exchange between members on CPUs, at its first use: a collective call. gloo is used
            if this is None or returns None.

    Attributes:
        group_name: torch's name of the process group.
        pairs: communicators for messages from one member to another, by their ranks in the group; None if this rank is
            neither of them. `pipeline_links` creates them.
        pause: called when a collective has started, before the current stream waits for it; other work of this rank
            may start here (`engine.pairs`).
    """

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup,
        make_messages: "Callable[[DistributedGroup], HostExchange | None] | None" = None,
    ) -> None:
        self._make_messages = make_messages
        super().__init__(name, tuple(dist.get_process_group_ranks(process_group)), dist.get_rank(process_group))
        self.group_name = process_group.group_name
        self.pairs: dict[tuple[int, int], DistributedGroup | None] = {}
        self.pause: Callable[[], None] = _go_on
        self._process_group = weakref.ref(process_group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's group. Raises CommunicationError after `launch.shutdown`."""
        process_group = self._process_group()
        if process_group is None:
            raise CommunicationError(f"rank {self.global_rank}: the {self.name} group ended with `launch.shutdown`")
        return process_group

    @cached_property
    def messages(self) -> HostExchange:
        """The exchange between members on CPUs."""
        exchange = self._make_messages(self) if self._make_messages else None
        return _GlooMessages(self) if exchange is None else exchange

    @contextmanager
    def errors_named(self, operation: str) -> Iterator[None]:
        """Add this rank, the group and `operation` to exceptions of torch, whose messages only contain addresses."""
        try:
            yield
        except RuntimeError as error:
            peers = ", ".join(str(rank) for rank in self.ranks if rank != self.global_rank)
            raise CommunicationError(
                f"rank {self.global_rank}: {operation} in the {self.name} group with rank {peers} failed: {error}"
            ) from error

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        with self.errors_named("all_reduce"):
            handle = dist.all_reduce(tensor.detach(), _REDUCE_OPERATIONS[op], self.process_group, async_op=True)
        return awaited_unless(async_op, _DistributedWork(self, "all_reduce", [handle]))

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.size, *tensor.shape))
        with self.errors_named("all_gather"):
            _all_gather_single(gathered.view(-1), tensor.detach().reshape(-1), self.process_group)
        return gathered

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        reduced = tensor.new_empty(tensor.shape[1:])
        with self.errors_named("reduce_scatter"):
            _reduce_scatter_single(reduced.view(-1), tensor.detach().reshape(-1), group=self.process_group)
        return reduced

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        whole, part = whole.detach(), part.detach()
        if whole.device.type != "cpu":
            with self.errors_named("all_gather"):
                handle = _all_gather_single(whole, part, self.process_group, async_op=True)
            return _DistributedWork(self, "all_gather", [handle])
        own_part = self.own_part(whole)
        exchange = self._exchange("all_gather", [part] * self.size, list(whole.view(self.size, -1)))
        if own_part.data_ptr() != part.data_ptr():
            own_part.copy_(part)
        return exchange

    def reduce_into_part(self, whole: Tensor) -> Work:
        whole = whole.detach()
        if whole.device.type != "cpu":
            with self.errors_named("reduce_scatter"):
                handle = _reduce_scatter_single(self.own_part(whole), whole, group=self.process_group, async_op=True)
            return _DistributedWork(self, "reduce_scatter", [handle])
        pieces = list(whole.view(self.size, -1))
        received = [piece if rank == self.rank else torch.empty_like(piece) for rank, piece in enumerate(pieces)]
        return self._exchange("reduce_scatter", pieces, received, lambda: _add_in_order(received, self.rank))

    def _exchange(
        self,
        operation: str,
        pieces: Sequence[Tensor],
        received: Sequence[Tensor],
        finish: Callable[[], None] = lambda: None,
    ) -> Work:
        """Start an exchange between all pairs of members. finish: called when all pieces have arrived."""
        peers = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        with self.errors_named(operation):
            messages = self.messages.start(peers, pieces, received)
        return _DistributedWork(self, operation, messages, finish=finish)

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        with self.errors_named_where_run("all_gather"):
            rows = tensor.reshape(1, -1)
            started = torch.ops._c10d_functional.all_gather_into_tensor(rows, self.size, self.group_name)
        return lambda: self.finished(started, "all_gather").view(self.size, *tensor.shape)

    def start_reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        with self.errors_named_where_run("reduce_scatter"):
            rows = tensor.reshape(self.size, -1)
            started = torch.ops._c10d_functional.reduce_scatter_tensor(rows, "sum", self.size, self.group_name)
        return lambda: self.finished(started, "reduce_scatter").view(tensor.shape[1:])

    def finished(self, started: Tensor, operation: str) -> Tensor:
        """Return the result of a functional collective after a wait for it."""
        if not torch.compiler.is_compiling():
            self.pause()
        with self.errors_named_where_run(operation):
            finished: Tensor = torch.ops._c10d_functional.wait_tensor(started)
            return finished

    def errors_named_where_run(self, operation: str) -> AbstractContextManager[None]:
        """Return `errors_named`, or no context while a compiler traces: its graphs have no exception handlers."""
        return nullcontext() if torch.compiler.is_compiling() else self.errors_named(operation)

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work:
        with self.errors_named("broadcast"):
            handle = dist.broadcast(tensor.detach(), group=self.process_group, group_src=source, async_op=True)
        return awaited_unless(async_op, _DistributedWork(self, "broadcast", [handle]))

    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        following, previous = (self.ranks[(self.rank + step) % self.size] for step in (1, -1))
        outgoing, incoming = tensor.detach(), into.detach()
        with self.errors_named("shift"):
            handles = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, outgoing, following, self.process_group),
                    dist.P2POp(dist.irecv, incoming, previous, self.process_group),
                ]
            )
        return _DistributedWork(self, "shift", handles, (outgoing, incoming))

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with self.errors_named("all_gather_object"):
            dist.all_gather_object(values, value, self.process_group)
        return values

    def barrier(self) -> None:
        with self.errors_named("barrier"):
            dist.barrier(self.process_group)


class _GlooMessages:
    """Exchanges over gloo, which uses sockets.

    gloo's own all_gather takes three times as long on one host, and its reduce_scatter sums everything everywhere
    (measured, torch 2.13).
    """

    def __init__(self, group: DistributedGroup) -> None:
        self._group = weakref.proxy(group)

    def start(self, peers: Sequence[int], pieces: Sequence[Tensor], received: Sequence[Tensor]) -> list[Waited]:
        options: dict[str, Any] = {"group": self._group.process_group, "tag": _EXCHANGE_TAG}
        receives = [dist.irecv(received[peer], group_src=peer, **options) for peer in peers]
        sends = [dist.isend(pieces[peer], group_dst=peer, **options) for peer in peers]
        return [work for work in (*receives, *sends) if work is not None]


def _add_in_order(pieces: Sequence[Tensor], own_rank: int) -> None:
    """Sum the pieces from the first to the last into that of `own_rank`; the others are overwritten."""
    total = pieces[0]
    for rank, piece in enumerate(pieces[1:], start=1):
        if rank == own_rank:
            total = torch.add(total, piece, out=piece)
        else:
            total.add_(piece)


class _DistributedWork(Work):
    """handles: of torch or of messages. tensors: kept alive until the wait, as the backend's thread or stream works on
    their memory. finish: called once, after the wait."""

    def __init__(
        self,
        group: DistributedGroup,
        operation: str,
        handles: Sequence[Waited | None],
        tensors: tuple[Tensor, ...] = (),
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._group = group
        self._operation = operation
        self._handles = [handle for handle in handles if handle is not None]
        self._tensors = tensors
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self._finish is None:
            return
        self._group.pause()
        with self._group.errors_named(self._operation):
            for handle in self._handles:
                handle.wait()
        self._finish()
        self._handles, self._tensors, self._finish = [], (), None
