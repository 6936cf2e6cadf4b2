"""What a rank's unit states hold of the model, told in global terms."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megapipe.checkpoint.extents import Extent
from megapipe.checkpoint.manifest import WEIGHTS, earlier_weights
from megapipe.parallel.groups import Group
from megapipe.parallel.segments import Segment
from megapipe.parallel.unit_state import UnitState


@dataclass(frozen=True)
class Shard:
    """One rank's part of one parameter: of its tensor-parallel shard what the rank keeps; padding is not in it."""

    state: UnitState
    segment: Segment

    @property
    def name(self) -> str:
        """The parameter's global name."""
        return self.segment.spec.name

    @property
    def extent(self) -> Extent:
        """Which elements these are."""
        held = self.state.held(self.segment)
        return Extent(self.segment.box, held.start, held.stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """How readers of a file see it: the box, or a part of its elements in one dimension."""
        extent = self.extent
        whole = extent == Extent.whole(extent.box)
        return extent.box.shape if whole else (extent.num_elements,)

    def of(self, buffer: Tensor) -> Tensor:
        """This part of a buffer of the state that all its parameters have, in one dimension."""
        return self.state.in_shard(buffer, self.segment)


def shards_of(states: Iterable[UnitState]) -> Iterator[Shard]:
    """Everything that a rank holds; shards that are padding alone are left out."""
    for state in states:
        for segment in state.table:
            if state.held(segment):
                yield Shard(state, segment)


def buffers(state: UnitState) -> dict[str, Tensor]:
    """Kind -> this rank's flat buffer of everything that a checkpoint keeps of a unit."""
    copies = len(state.weights)
    earlier = {earlier_weights(age): state.weight_shards[(state.newest - age) % copies] for age in range(1, copies)}
    return {WEIGHTS: state.master, **earlier, **state.moments}


def parts_of(shard: Shard) -> dict[str, Tensor]:
    """Kind -> this part of everything that a checkpoint keeps of its parameter, in one dimension."""
    found = {}
    held = shard.state.held(shard.segment)
    first = shard.segment.start + held.start - shard.state.shard.start
    for kind, buffer in buffers(shard.state).items():
        start = first - shard.state.moment_starts.get(kind, 0)
        if start >= 0 and start + len(held) <= buffer.numel():
            found[kind] = buffer[start : start + len(held)]
    return found


def shards_to_write(states: Sequence[UnitState], world: Group) -> list[Shard]:
    """This rank's share of the writing: a shard that several ranks hold is written by the one with least to write.

    Replicas hold the same bits, be they data-parallel copies, parameters that tensor ranks do not share, or tied
    weights of two stages. Sharing the writing out uses the disks and network cards of all hosts, where rank 0 of the
    replicas alone would use one in `data` of them. Every rank computes the same plan.
    """
    mine = list(shards_of(states))
    holders: dict[tuple[str, Extent], list[int]] = {}
    for rank, held in enumerate(world.all_gather_object([(shard.name, shard.extent) for shard in mine])):
        for key in held:
            holders.setdefault(key, []).append(rank)
    elements = [0] * world.size
    writers = {}
    for key, ranks in sorted(holders.items(), key=lambda item: -item[0][1].num_elements):
        writers[key] = min(ranks, key=lambda rank: elements[rank])
        elements[writers[key]] += key[1].num_elements
    return [shard for shard in mine if writers[shard.name, shard.extent] == world.rank]
