"""A group that counts what goes through it: how many collectives of each kind, and their elements and bytes."""

from collections import Counter
from typing import Any

from torch import Tensor

from megapipe.parallel.groups import Group, ReduceOperation, Work


class CountingGroup(Group):
    """Another's group.

    Attributes:
        calls: operation -> how often. num_bytes: operation -> bytes of the whole tensors, all members' parts together.
        log: (operation, elements of the whole tensor), in order.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group.name, group.ranks, group.rank)
        self._group = group
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.log: list[tuple[str, int]] = []

    def _count(self, operation: str, tensor: Tensor, copies: int = 1) -> None:
        self.calls[operation] += 1
        self.num_bytes[operation] += tensor.numel() * tensor.element_size() * copies
        self.log.append((operation, tensor.numel() * copies))

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        self._count("all_reduce", tensor)
        return self._group.all_reduce(tensor, op, async_op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._count("all_gather", tensor, self.size)
        return self._group.all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self._count("reduce_scatter", tensor)
        return self._group.reduce_scatter(tensor)

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        self._count("gather_into", whole)
        return self._group.gather_into(whole, part)

    def reduce_into_part(self, whole: Tensor) -> Work:
        self._count("reduce_into_part", whole)
        return self._group.reduce_into_part(whole)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._count("broadcast", tensor)
        self._group.broadcast(tensor, source)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._group.all_gather_object(value)

    def barrier(self) -> None:
        self._group.barrier()
