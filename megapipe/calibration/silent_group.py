"""A mesh on which one rank stands for a whole group: it computes its share of every layer, and nobody answers.

What the others would have sent is taken to be like what this rank has, so numbers mean nothing and times of compute
are those of a real rank. Copies that a collective makes on its own rank are made here too.
"""

from typing import Any

import torch
from torch import Tensor

from megapipe.config.mesh_shape import MeshShape, Partition
from megapipe.parallel.groups import Group, Work
from megapipe.parallel.groups.group import ReduceOperation
from megapipe.parallel.mesh import Mesh


class _Finished(Work):
    def wait(self) -> None:
        """Nothing was sent."""


class SilentGroup(Group):
    """Rank 0 of a group whose other members are not there."""

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        return _Finished()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().unsqueeze(0).expand(self.size, *tensor.shape).contiguous()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[self.rank].clone()

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        whole.detach().view(self.size, -1).copy_(part.detach().clone().expand(self.size, -1))
        return _Finished()

    def reduce_into_part(self, whole: Tensor) -> Work:
        return _Finished()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Nothing to do."""

    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        into.detach().copy_(tensor.detach())
        return _Finished()

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def barrier(self) -> None:
        """Nobody to wait for."""


def silent_mesh(tensor: int, context: int, device: torch.device) -> Mesh:
    """Rank 0 of tensor x context ranks, alone."""

    def group(name: str, partition: Partition) -> Group | None:
        return next((SilentGroup(name, ranks, 0) for ranks in partition if 0 in ranks), None)

    return Mesh(MeshShape({"tensor": tensor, "context": context}), 0, device, group)
