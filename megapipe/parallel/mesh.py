"""The process mesh: this rank's coordinate in each parallel dimension, and its groups.

`config.parallel.MeshShape` numbers the ranks. A `Mesh` is passed as an argument, and is never a global variable.
"""

import math
from collections.abc import Callable

import torch

from megapipe.config.parallel import DIMENSIONS, MeshShape, Partition
from megapipe.parallel.groups import Group, SilentGroup, SoloGroup

COMBINATIONS = (("data", "context"), ("pipeline", "tensor"))
"""Pairs of dimensions that have a group of their own: replicas of one weight, and holders of one model replica."""

GroupFactory = Callable[[str, Partition], Group | None]
"""Creates the group of this rank, from disjoint lists of global ranks; None if this rank is in none of them. The group
called `WORLD` is torch's default group; all others are new. A collective call: every rank makes the same calls in the
same order."""

WORLD = "world"


class Mesh:
    """One rank's view of the mesh. Created by `launch.initialize` or `in_process.in_process_meshes`.

    Attributes:
        shape: the sizes of all dimensions.
        rank: this process's global rank.
        device: of this rank's tensors.
        world: the group of all ranks.

    Example:
        >>> from megapipe import initialize
        >>> mesh = initialize({"pipeline": 1}, device="cpu")
        >>> mesh.size("pipeline"), mesh.coordinate("data")
        (1, 0)
    """

    def __init__(self, shape: MeshShape, rank: int, device: torch.device, create_group: GroupFactory) -> None:
        self.shape = shape
        self.rank = rank
        self.device = device
        self._create_group = create_group
        self._coordinates = shape.coordinates(rank)
        self._stage_groups: dict[tuple[int, ...], Group | None] = {}
        self._second_world: Group | None = None
        self._part_groups: dict[tuple[str, int], Group] = {}
        self.world = self._create(WORLD, shape.partition(*DIMENSIONS))
        self._groups: dict[tuple[str, ...], Group] = {
            (name,): self.world if size == shape.world_size else self._create(name, shape.partition(name))
            for name, size in shape.sizes.items()
        }
        for names in COMBINATIONS:
            self._groups[names] = self._combined(names)

    @property
    def world_size(self) -> int:
        return self.shape.world_size

    def size(self, dimension: str) -> int:
        """Return the number of ranks along `dimension`."""
        return self.shape.sizes[dimension]

    def coordinate(self, dimension: str) -> int:
        """Return this rank's coordinate along `dimension`."""
        return self._coordinates[dimension]

    def group(self, *dimensions: str) -> Group:
        """Return the group of ranks that differ from this one only in `dimensions`: a dimension, or a pair of
        `COMBINATIONS`.

        Raises:
            ValueError: these dimensions have no group.
        """
        names = tuple(name for name in DIMENSIONS if name in dimensions)
        if names not in self._groups or len(names) != len(dimensions):
            existing = "; ".join(", ".join(names) for names in self._groups)
            raise ValueError(f"the mesh has no group over {dimensions}: it has groups over {existing}, and `world`")
        return self._groups[names]

    def stage_group(self, stages: tuple[int, ...]) -> Group | None:
        """Return all replicas of this rank's tensor shard at the pipeline coordinates `stages`; None if it is at none
        of them.

        For a weight that several stages share. A collective call, also for ranks that get None: every rank passes the
        same coordinates in the same order. A second call returns the same group.

        Raises:
            ValueError: coordinates outside the pipeline, or not ascending.
        """
        if list(stages) != sorted(set(stages)) or not stages or stages[0] < 0 or stages[-1] >= self.size("pipeline"):
            raise ValueError(
                f"pipeline coordinates {stages} must ascend within "
                f"0..{self.size('pipeline') - 1} (pipeline size {self.size('pipeline')})"
            )
        if stages not in self._stage_groups:
            name = f"pipeline {'+'.join(str(stage) for stage in stages)}"
            self._stage_groups[stages] = self._create_any(name, self.shape.stage_partition(stages))
        return self._stage_groups[stages]

    def second_world(self) -> Group:
        """Return a second group of all ranks, for collectives whose order among those of `world` differs by rank.

        A collective call. Asking twice gives the same group.
        """
        if self._second_world is None:
            self._second_world = self._create("second world", self.shape.partition(*DIMENSIONS))
        return self._second_world

    def shard_group(self, size: int) -> Group:
        """Return the group of `size` adjacent replicas of this rank's weights, over data and context, that share one
        copy of sharded state, including this rank.

        A collective call. A second call returns the same group. Raises ValueError if `size` does not divide the number
        of replicas.
        """
        return self._replicas("shards", size, lambda place: place // size)

    def shard_replicas(self, size: int) -> Group:
        """Return the group of ranks that hold the same shard as this one, if `size` adjacent replicas share a copy. As
        `shard_group`."""
        return self._replicas("shard copies", size, lambda place: place % size)

    def _replicas(self, name: str, size: int, part_of: Callable[[int], int]) -> Group:
        """Return the group of the replicas of this rank's weights that are in the same part as this rank."""
        replicas = self.group("data", "context")
        if size < 1 or replicas.size % size:
            raise ValueError(
                f"{size} ranks per copy are given; "
                f"the number must be at least 1 and divide the {replicas.size} replicas"
            )
        if all(part_of(place) == part_of(replicas.rank) for place in range(replicas.size)):
            return replicas
        if (name, size) not in self._part_groups:
            ranks_by_part: dict[tuple[int, int], list[int]] = {}
            for index, ranks in enumerate(self.shape.partition("data", "context")):
                for place, rank in enumerate(ranks):
                    ranks_by_part.setdefault((index, part_of(place)), []).append(rank)
            self._part_groups[name, size] = self._create(name, tuple(tuple(ranks) for ranks in ranks_by_part.values()))
        return self._part_groups[name, size]

    def _combined(self, names: tuple[str, ...]) -> Group:
        """Return the group over several dimensions; reuse an existing group with the same ranks."""
        larger = [name for name in names if self.size(name) > 1]
        if len(larger) <= 1:
            return self._groups[(larger[0] if larger else names[0],)]
        if math.prod(self.size(name) for name in larger) == self.world_size:
            return self.world
        return self._create("+".join(names), self.shape.partition(*names))

    def _create(self, name: str, partition: Partition) -> Group:
        group = self._create_any(name, partition)
        assert group is not None  # a partition over dimensions covers the world
        return group

    def _create_any(self, name: str, partition: Partition) -> Group | None:
        if len(partition[0]) == 1:
            return SoloGroup(name, self.rank) if any(self.rank in ranks for ranks in partition) else None
        return self._create_group(name, partition)


def silent_mesh(shape: MeshShape, rank: int, device: torch.device) -> Mesh:
    """Return the mesh of one rank whose peers are absent, see `SilentGroup`."""

    def group(name: str, partition: Partition) -> Group | None:
        own_ranks = next((ranks for ranks in partition if rank in ranks), None)
        return None if own_ranks is None else SilentGroup(name, own_ranks, own_ranks.index(rank))

    return Mesh(shape, rank, device, group)
