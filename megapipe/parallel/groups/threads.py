"""Groups whose ranks are threads of one process, so that a whole pipeline can run and be traced on one device.

A member posts its contribution under the number of the collective and reads the others' when it waits, so an
asynchronous collective blocks nobody before its `wait()`. Sums are added in rank order by every reader: all members
hold the same bits, and a run repeats exactly.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapipe.parallel.errors import CommunicationError
from megapipe.parallel.groups.group import Group, ReduceOperation, Work


class ThreadWorld:
    """What the threads share: one condition to wait on, and the failure that breaks every wait.

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

    def fail(self, rank: int, error: BaseException) -> None:
        """Break every wait, present and future: `rank` will not answer any more. The first failure is the one told."""
        with self.changed:
            if self._failure is None:
                self.failed_rank, self._failure = rank, error
            self.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], waiting: Callable[[], str], timeout: float) -> None:
        """Wait until `ready()`; `waiting()` says who waits for whom and for what. The caller holds `changed`.

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
    """A tensor handed from one thread to another, with the event that orders their streams on a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event = _recorded_event(tensor)

    def take(self) -> Tensor:
        """The tensor, once the current stream waits for whatever produced it."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._event)
            self._tensor.record_stream(stream)
        return self._tensor


def _recorded_event(tensor: Tensor) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


class _Round:
    """One collective: what it is, and what each member has posted so far."""

    def __init__(self, operation: str, first_rank: int) -> None:
        self.operation = operation
        self.first_rank = first_rank
        self.posted: dict[int, Any] = {}
        self.readers = 0


class ThreadBoard:
    """Where the members of one group post. Created once and shared by their ThreadGroups."""

    def __init__(self, world: ThreadWorld, ranks: tuple[int, ...]) -> None:
        self.world = world
        self.ranks = ranks
        self.rounds: dict[int, _Round] = {}


class ThreadGroup(Group):
    """One member's view of a `ThreadBoard`."""

    def __init__(self, name: str, board: ThreadBoard, global_rank: int) -> None:
        super().__init__(name, board.ranks, board.ranks.index(global_rank))
        self._board = board
        self._started = 0

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        # The snapshot lets a member that has read everything go on and overwrite its tensor.
        number = self._post(_described(f"all_reduce {op}", tensor), Deposit(tensor.detach().clone()))
        work = _ThreadWork(self, number, lambda deposits: _reduce_into(tensor.detach(), deposits, op))
        if not async_op:
            work.wait()
        return work

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
        own = self.own_part(whole.detach())
        return _ThreadWork(
            self, number, lambda deposits: _reduce_into(own, [self.own_part(each) for each in deposits], "sum")
        )

    def broadcast(self, tensor: Tensor, source: int) -> None:
        mine = Deposit(tensor.detach().clone()) if self.rank == source else None
        number = self._post(_described(f"broadcast from {source}", tensor), mine)
        tensor.detach().copy_(self._read(number)[source].take())

    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        number = self._post(_described("shift", tensor), Deposit(tensor.detach().clone()))
        return _ThreadShift(self, number, into.detach())

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._read(self._post("all_gather_object", value))

    def barrier(self) -> None:
        self._read(self._post("barrier", None))

    def _post(self, operation: str, value: Any) -> int:
        """Post `value` for the next collective of this member and return the collective's number."""
        number, self._started = self._started, self._started + 1
        world = self._board.world
        with world.changed:
            round_ = self._board.rounds.setdefault(number, _Round(operation, self.rank))
            if round_.operation != operation:
                raise CommunicationError(
                    f"collective {number} of the {self.name} group is {operation} on rank {self.global_rank} but "
                    f"{round_.operation} on rank {self.ranks[round_.first_rank]}: members must call the same "
                    "collectives in the same order"
                )
            round_.posted[self.rank] = value
            world.changed.notify_all()
        return number

    def _read(self, number: int) -> list[Any]:
        """All members' values of collective `number`, in rank order."""
        world, rounds = self._board.world, self._board.rounds
        with world.changed:
            round_ = rounds[number]

            def waiting() -> str:
                missing = ", ".join(str(self.ranks[rank]) for rank in range(self.size) if rank not in round_.posted)
                return (
                    f"rank {self.global_rank} waited for rank {missing} in {round_.operation} "
                    f"(collective {number} of the {self.name} group)"
                )

            world.wait_for(lambda: len(round_.posted) == self.size, waiting, world.timeout)
            round_.readers += 1
            if round_.readers == self.size:
                del rounds[number]
            return [round_.posted[rank] for rank in range(self.size)]


class _ThreadWork(Work):
    """A collective that was started; `finish` takes every member's tensor, in rank order."""

    def __init__(self, group: ThreadGroup, number: int, finish: Callable[[list[Tensor]], None]) -> None:
        self._group = group
        self._number = number
        self._finish = finish
        self._finished = False

    def wait(self) -> None:
        if not self._finished:
            self._finish([deposit.take() for deposit in self._group._read(self._number)])
            self._finished = True


class _ThreadShift(Work):
    def __init__(self, group: ThreadGroup, number: int, into: Tensor) -> None:
        self._group = group
        self._number = number
        self._into = into
        self._finished = False

    def wait(self) -> None:
        if not self._finished:
            self._into.copy_(self._group._read(self._number)[self._group.rank - 1].take())
            self._finished = True


def _reduce_into(target: Tensor, parts: list[Tensor], op: ReduceOperation) -> None:
    """Reduce `parts` in their order."""
    target.copy_(parts[0])
    for part in parts[1:]:
        if op == "sum":
            target.add_(part)
        else:
            torch.maximum(target, part, out=target)


def _described(operation: str, tensor: Tensor) -> str:
    return f"{operation} of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
