"""Which part of a unit's flat buffers one of several data-parallel replicas keeps, and memory that comes and goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sharding:
    """A place among the replicas that share one copy of a unit's state (Rajbhandari et al. 2020, arXiv 1910.02054).

    stage: 0 nothing is sharded, 1 master weights and moments, 2 gradients too, 3 weights too. index, count: this
    replica's place among those that share a copy, and their number. whole_matrices: shards are not to cut matrices
    that are no longer than themselves.
    """

    stage: int = 0
    index: int = 0
    count: int = 1
    whole_matrices: bool = False

    @property
    def gradients(self) -> bool:
        """Whether gradients are kept in shards."""
        return self.stage >= 2

    @property
    def weights(self) -> bool:
        """Whether weights in the compute dtype are kept in shards."""
        return self.stage >= 3

    def part_of(self, num_elements: int) -> slice:
        """This replica's equal part of so many elements, which the count divides."""
        size = num_elements // self.count
        return slice(self.index * size, (self.index + 1) * size)


WHOLE = Sharding()
"""Nothing is sharded."""


def allocate(flat: Tensor) -> None:
    """Give a flat tensor that was freed its memory back, its values unknown; views of it see the new memory."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def free(flat: Tensor) -> None:
    """Give a flat tensor's memory back. It keeps its size, and so do its views and what autograd saved of it."""
    flat.untyped_storage().resize_(0)


def is_allocated(flat: Tensor) -> bool:
    """Whether a flat tensor has its memory."""
    return flat.numel() == 0 or flat.untyped_storage().nbytes() > 0


def transient(size: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A flat tensor without memory yet."""
    flat = torch.empty(size, dtype=dtype, device=device)
    free(flat)
    return flat


@contextmanager
def allocated(flat: Tensor) -> Iterator[None]:
    """Memory for the time of the block where there is none: views can be taken of that alone."""
    had_memory = is_allocated(flat)
    if not had_memory:
        allocate(flat)
    try:
        yield
    finally:
        if not had_memory:
            free(flat)
