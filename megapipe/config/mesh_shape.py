"""The sizes of the parallel dimensions, and the conversion between global ranks and coordinates.

Ranks are numbered with tensor fastest, then context, pipeline and data, so that ranks that communicate most are
nearest (Narayanan et al. 2021, arXiv 2104.04473, section 3.2).
"""

import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapipe.config.parallel import ParallelConfig

DIMENSIONS = ("data", "pipeline", "context", "tensor")
"""Dimension names, slowest first."""

Partition = tuple[tuple[int, ...], ...]


class MeshShape:
    """The sizes of the dimensions, and the arithmetic between global ranks and coordinates.

    Args:
        sizes: ranks along each dimension of `DIMENSIONS`; one that is left out has size 1.

    Raises:
        ValueError: an unknown dimension or a size below 1.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if name not in DIMENSIONS:
                raise ValueError(f"unknown mesh dimension {name!r}: the dimensions are {', '.join(DIMENSIONS)}")
            if size < 1:
                raise ValueError(f"mesh dimension {name} has size {size}; it must be at least 1")
        self.sizes = MappingProxyType({name: sizes.get(name, 1) for name in DIMENSIONS})

    @classmethod
    def of(cls, parallel: "ParallelConfig") -> "MeshShape":
        """Return the shape that a configuration sets; parallel.data null counts as 1."""
        return cls({name: getattr(parallel, name) or 1 for name in DIMENSIONS})

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items())

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a global rank, by dimension."""
        coordinates = {}
        for name in reversed(DIMENSIONS):
            rank, coordinates[name] = divmod(rank, self.sizes[name])
        return coordinates

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """Return the global rank at full coordinates; the inverse of `coordinates`."""
        rank = 0
        for name in DIMENSIONS:
            rank = rank * self.sizes[name] + coordinates[name]
        return rank

    def partition(self, *names: str) -> Partition:
        """Return the groups of ranks that differ only in the dimensions `names`."""
        fixed = [name for name in DIMENSIONS if name not in names]
        free = [name for name in DIMENSIONS if name in names]
        return tuple(
            tuple(self.rank_of(dict(outer) | dict(inner)) for inner in self._walk(free)) for outer in self._walk(fixed)
        )

    def group_of(self, rank: int, *names: str) -> tuple[int, ...]:
        """Return the group of `partition` that a rank is in."""
        own, free = self.coordinates(rank), [name for name in DIMENSIONS if name in names]
        return tuple(self.rank_of(own | dict(inner)) for inner in self._walk(free))

    def stage_partition(self, stages: tuple[int, ...]) -> Partition:
        """Return, for each tensor coordinate, the ranks of all replicas at the pipeline coordinates `stages`, replica
        by replica."""
        return tuple(
            tuple(rank for rank in part if self.coordinates(rank)["pipeline"] in stages)
            for part in self.partition("data", "pipeline", "context")
        )

    def _walk(self, names: list[str]) -> list[tuple[tuple[str, int], ...]]:
        return list(itertools.product(*[[(name, index) for index in range(self.sizes[name])] for name in names]))
