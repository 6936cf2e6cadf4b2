"""The interface of a collective group."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

ReduceOperation = Literal["sum", "max"]


class Work(ABC):
    """A collective that was started."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the result may be used: on a CPU it is there, on a GPU the current stream waits for it.

        Raises:
            CommunicationError: a member failed or fell silent.
        """


class Group(ABC):
    """Ranks that speak together, seen from one of them.

    All members call the same collectives in the same order, with tensors of one shape and type.

    Attributes:
        name: what the group is in the mesh, for messages ("tensor", "data").
        ranks: the members' global ranks. A member's place in this tuple is its rank in the group.
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
        """This member's n elements of a flat tensor [size * n]."""
        return whole.view(self.size, -1)[self.rank]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, ranks={list(self.ranks)}, rank={self.rank})"

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        """Replace `tensor`, in place, by the sum or maximum over the members; every member gets the same bits.

        With `async_op` the tensor must not be touched before `wait()` of the returned work; without, the sum is there
        on return.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every member's tensor, stacked in rank order: (...) -> (size, ...)."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum over the members of the slice that belongs to this one: (size, ...) -> (...)."""

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """`all_gather` started beside what follows; calling what is returned, once, waits and gives the result.

        `tensor` must not be changed before. A group that knows no better is done on return.
        """
        gathered = self.all_gather(tensor)
        return lambda: gathered

    def start_reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        """`reduce_scatter`, started as in `start_all_gather`."""
        reduced = self.reduce_scatter(tensor)
        return lambda: reduced

    @abstractmethod
    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        """Start to fill `whole` [size * n] by every member's `part` [n] in rank order.

        `part` may be its own place in `whole`. Neither may be touched before `wait()` of the returned work.
        """

    @abstractmethod
    def reduce_into_part(self, whole: Tensor) -> Work:
        """Start to sum `whole` [size * n] over the members; each gets its own n elements of the sum, in their place.

        `whole` must not be touched before `wait()` of the returned work; its other elements are then of no use.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` by that of the member whose rank in the group is `source`."""

    @abstractmethod
    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        """Start to send `tensor` to the next member, and to receive into `into` what the one before sends.

        The first follows the last. Both are contiguous and alike; neither may be touched before `wait()` of the
        returned work. No member waits for another before that.
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every member's small Python object, in rank order. For set-up, not for the step."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every member has called it."""
