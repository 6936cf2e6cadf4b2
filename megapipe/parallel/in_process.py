"""A whole mesh as threads of one process: every rank's groups and links are in memory, so that a whole pipeline can
run and be traced on one device.

A member of a group posts its contribution under the number of the collective and reads the others' when it waits, so
an asynchronous collective blocks no rank before its `wait()`. Every reader adds in rank order, so all members get the
same bits, and a run repeats exactly. The two ends of a link meet in memory, and the end that arrives second copies.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megapipe.config.parallel import MeshShape, Partition
from megapipe.parallel.groups import CommunicationError, Group, ReduceOperation, Work, awaited_unless
from megapipe.parallel.links import Edge, LinkEnd
from megapipe.parallel.mesh import Mesh


class ThreadWorld:
    """State that the threads share: one condition to wait on, the failure that ends every wait, and the collectives
    that have started.

    Args:
        size: number of thread ranks.
        timeout: seconds that a rank waits for its peers.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.failed_rank: int | None = None
        self._failure: BaseException | None = None
        self._rounds: dict[tuple[str, tuple[int, ...]], dict[int, _Round]] = {}

    def rounds(self, name: str, ranks: tuple[int, ...]) -> "dict[int, _Round]":
        """Return the collectives of group `name` of `ranks` by number, one dictionary for all members."""
        with self.changed:
            return self._rounds.setdefault((name, ranks), {})

    def fail(self, rank: int, error: BaseException) -> None:
        """End every current and future wait, because `rank` will not answer any more. The first failure is
        reported."""
        with self.changed:
            if self._failure is None:
                self.failed_rank, self._failure = rank, error
            self.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], waiting: Callable[[], str], timeout: float) -> None:
        """Wait until `ready()`. waiting: describes, for the error, which rank waits for whom and for what. The caller
        holds `changed`.

        Raises:
            CommunicationError: a rank failed, or `timeout` seconds went by.
        """
        self.changed.wait_for(lambda: ready() or self._failure is not None, timeout)
        if ready():
            return
        if self._failure is not None:
            raise CommunicationError(
                f"{waiting()}, but rank {self.failed_rank} failed: {self._failure!r}"
            ) from self._failure
        raise CommunicationError(f"{waiting()}, but there was no answer within {timeout:g} s")


class Deposit:
    """A tensor that is passed from one thread to another, with the event that orders their streams on a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def take(self) -> Tensor:
        """Return the tensor, after the current stream has been made to wait for the operations that produced it."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._event)
            self._tensor.record_stream(stream)
        return self._tensor


class _Round:
    """One collective: its operation, and the values that members have posted so far."""

    def __init__(self, operation: str, first_rank: int) -> None:
        self.operation = operation
        self.first_rank = first_rank
        self.posted: dict[int, Any] = {}
        self.readers = 0


class ThreadGroup(Group):
    """A group of threads, from the view of one of them."""

    def __init__(self, name: str, ranks: tuple[int, ...], global_rank: int, world: ThreadWorld) -> None:
        super().__init__(name, ranks, ranks.index(global_rank))
        self._world = world
        self._rounds = world.rounds(name, ranks)
        self._numbers = itertools.count()

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        # Post a copy, so that a member that has read all values can continue and overwrite its tensor.
        number = self._post(_described(f"all_reduce {op}", tensor), Deposit(tensor.detach().clone()))
        work = _ThreadWork(self, number, lambda deposits: _reduce_into(tensor.detach(), deposits, op))
        return awaited_unless(async_op, work)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.start_all_gather(tensor)()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return self.start_reduce_scatter(tensor)()

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        number = self._post(_described("all_gather", tensor), Deposit(tensor.detach().clone()))
        return lambda: torch.stack([deposit.take() for deposit in self._read(number)])

    def start_reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        number = self._post(_described("reduce_scatter", tensor), Deposit(tensor.detach().clone()))
        reduced = tensor.new_empty(tensor.shape[1:])

        def finish() -> Tensor:
            _reduce_into(reduced, [deposit.take()[self.rank] for deposit in self._read(number)], "sum")
            return reduced

        return finish

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        number = self._post(_described("gather_into", part), Deposit(part.detach().clone()))

        def finish(deposits: list[Tensor]) -> None:
            for place, deposit in zip(whole.detach().view(self.size, -1), deposits, strict=True):
                place.copy_(deposit)

        return _ThreadWork(self, number, finish)

    def reduce_into_part(self, whole: Tensor) -> Work:
        number = self._post(_described("reduce_into_part", whole), Deposit(whole.detach().clone()))
        own_part = self.own_part(whole.detach())
        return _ThreadWork(
            self, number, lambda deposits: _reduce_into(own_part, [self.own_part(each) for each in deposits], "sum")
        )

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work:
        sent = tensor.detach().clone() if self.rank == source else tensor.new_empty(0)
        number = self._post(_described(f"broadcast from {source}", tensor), Deposit(sent))

        def finish(deposits: list[Tensor]) -> None:
            # Autograd may have saved the source's tensor, which must not count as modified.
            if self.rank != source:
                tensor.detach().copy_(deposits[source])

        return awaited_unless(async_op, _ThreadWork(self, number, finish))

    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        number = self._post(_described("shift", tensor), Deposit(tensor.detach().clone()))
        return _ThreadWork(self, number, lambda deposits: into.detach().copy_(deposits[self.rank - 1]))

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._read(self._post("all_gather_object", value))

    def barrier(self) -> None:
        self._read(self._post("barrier", None))

    def _post(self, operation: str, value: Any) -> int:
        """Post `value` for the next collective of this member and return the collective's number."""
        number = next(self._numbers)
        with self._world.changed:
            round_ = self._rounds.setdefault(number, _Round(operation, self.rank))
            if round_.operation != operation:
                raise CommunicationError(
                    f"collective {number} of the {self.name} group is {operation} "
                    f"on rank {self.global_rank} but {round_.operation} on rank {self.ranks[round_.first_rank]}: "
                    "members must call the same collectives in the same order"
                )
            round_.posted[self.rank] = value
            self._world.changed.notify_all()
        return number

    def _read(self, number: int) -> list[Any]:
        """Return all members' values of collective `number`, in rank order."""
        world = self._world
        with world.changed:
            round_ = self._rounds[number]

            def waiting() -> str:
                missing = ", ".join(str(self.ranks[rank]) for rank in range(self.size) if rank not in round_.posted)
                return (
                    f"rank {self.global_rank} waited for rank {missing} in {round_.operation} "
                    f"(collective {number} of the {self.name} group)"
                )

            world.wait_for(lambda: len(round_.posted) == self.size, waiting, world.timeout)
            round_.readers += 1
            if round_.readers == self.size:
                del self._rounds[number]
            return [round_.posted[rank] for rank in range(self.size)]


class _ThreadWork(Work):
    """A collective that was started; finish: takes every member's tensor, in rank order."""

    def __init__(self, group: ThreadGroup, number: int, finish: Callable[[list[Tensor]], object]) -> None:
        self._group = group
        self._number = number
        self._finish = finish
        self._finished = False

    def wait(self) -> None:
        if not self._finished:
            self._finish([deposit.take() for deposit in self._group._read(self._number)])
            self._finished = True


def _reduce_into(target: Tensor, tensors: list[Tensor], op: ReduceOperation) -> None:
    """Reduce `tensors` into `target`, in their order."""
    target.copy_(tensors[0])
    for tensor in tensors[1:]:
        if op == "sum":
            target.add_(tensor)
        else:
            torch.maximum(target, tensor, out=target)


def _described(operation: str, tensor: Tensor) -> str:
    return f"{operation} of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


class InProcessMesh(Mesh):
    """A mesh whose ranks are threads.

    Attributes:
        threads: what all ranks of the mesh share.
    """

    def __init__(self, shape: MeshShape, rank: int, device: torch.device, threads: ThreadWorld) -> None:
        self.threads = threads
        super().__init__(shape, rank, device, self._thread_group)

    def _thread_group(self, name: str, partition: Partition) -> Group | None:
        own_ranks = next((ranks for ranks in partition if self.rank in ranks), None)
        return None if own_ranks is None else ThreadGroup(name, own_ranks, self.rank, self.threads)


def in_process_meshes(
    sizes: Mapping[str, int], device: torch.device | str = "cpu", timeout: float = 600.0
) -> list[InProcessMesh]:
    """Return one mesh per rank, in rank order, for ranks that run as threads of this process on one device.

    Args:
        sizes: ranks along each dimension of `mesh.DIMENSIONS`; 1 by default.
        device: the device that all ranks share.
        timeout: seconds that a rank waits for its peers.
    """
    shape = MeshShape(sizes)
    world = ThreadWorld(shape.world_size, timeout)
    return [InProcessMesh(shape, rank, torch.device(device), world) for rank in range(shape.world_size)]


def run_in_process(meshes: Sequence[InProcessMesh], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(mesh, *args)` for every mesh, each on its own thread, and return the results in rank order.

    If a rank raises an exception, the waits of all others end, so that none hangs, and this function raises it.
    """
    results: list[Any] = [None] * len(meshes)
    failures: list[BaseException] = []

    def run(mesh: InProcessMesh) -> None:
        try:
            results[mesh.rank] = function(mesh, *args)
        except BaseException as error:
            failures.append(error)
            mesh.threads.fail(mesh.rank, error)

    threads = [
        threading.Thread(target=run, args=(mesh,), name=f"megapipe rank {mesh.rank}", daemon=True) for mesh in meshes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


class _Posted(Work):
    """One posted send or receive. On a GPU, events order the streams of the two threads."""

    def __init__(self, world: ThreadWorld, link: LinkEnd, number: int, tensor: Tensor) -> None:
        self._world = world
        self._link = link
        self.number = number
        self._device = tensor.device
        self.deposit = Deposit(tensor)
        self.copied: torch.cuda.Event | None = None
        self.finished = False

    def wait(self) -> None:
        with self._world.changed:
            self._world.wait_for(lambda: self.finished, lambda: self._link.waiting(self.number), self._link.timeout)
        if self.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self.copied)


class _Meeting:
    """The posted sends and receives of an edge. One of the two queues is always empty."""

    def __init__(self) -> None:
        self.sends: deque[_Posted] = deque()
        self.receives: deque[_Posted] = deque()


class InProcessLink(LinkEnd):
    """Either end of an edge between threads. A send is done when its tensor has been copied into the receiver's."""

    def __init__(self, edge: Edge, group: Group, timeout: float, world: ThreadWorld, meeting: _Meeting) -> None:
        super().__init__(edge, group, timeout)
        self._world = world
        self._meeting = meeting

    def _start(self, tensor: Tensor) -> Work:
        posted, meeting = _Posted(self._world, self, next(self._numbers), tensor.detach()), self._meeting
        with self._world.changed:
            (meeting.sends if self._sends else meeting.receives).append(posted)
            if meeting.sends and meeting.receives:
                self._copy(posted.number, meeting.sends.popleft(), meeting.receives.popleft())
                self._world.changed.notify_all()
        return posted

    def _copy(self, number: int, send: _Posted, receive: _Posted) -> None:
        source, target = send.deposit.take(), receive.deposit.take()
        if (source.dtype, source.numel()) != (target.dtype, target.numel()):
            sent, expected = (f"{tensor.numel()} elements of {tensor.dtype}" for tensor in (source, target))
            raise self.failure(number, f"{sent} were sent and {expected} expected")
        target.view(-1).copy_(source.reshape(-1))
        if target.is_cuda:
            send.copied = receive.copied = torch.cuda.current_stream(target.device).record_event()
        send.finished = receive.finished = True


def in_process_links(group: Group, world: ThreadWorld, edges: Sequence[Edge], timeout: float) -> dict[Edge, LinkEnd]:
    """Return this rank's ends of `edges`. A collective call: the source creates the meeting and passes it on."""
    mine = {edge: _Meeting() for edge in edges if edge.source == group.rank}
    meetings = {edge: meeting for made in group.all_gather_object(mine) for edge, meeting in made.items()}
    return {
        edge: InProcessLink(edge, group, timeout, world, meeting)
        for edge, meeting in meetings.items()
        if group.rank in (edge.source, edge.destination)
    }
