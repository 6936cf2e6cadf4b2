"""The group of one rank: every collective is the identity, and torch.distributed is not needed."""

from typing import Any

from torch import Tensor

from megapipe.parallel.groups.group import Group, ReduceOperation, Work


class _Finished(Work):
    def wait(self) -> None:
        """Nothing to wait for."""


class SoloGroup(Group):
    """One rank alone."""

    def __init__(self, name: str, global_rank: int = 0) -> None:
        super().__init__(name, (global_rank,), 0)

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        return _Finished()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().unsqueeze(0)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().squeeze(0)

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        if whole.data_ptr() != part.data_ptr():
            whole.copy_(part)
        return _Finished()

    def reduce_into_part(self, whole: Tensor) -> Work:
        return _Finished()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Nothing to do."""

    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        into.detach().copy_(tensor.detach())
        return _Finished()

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        """Nothing to wait for."""
