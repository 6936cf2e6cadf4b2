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
    """One rank's part of one parameter; padding is not in it."""

    state: UnitState
    segment: Segment

    @property
    def name(self) -> str:
        """The parameter's global name."""
        return self.segment.spec.name

    @property
    def extent(self) -> Extent:
        """Which elements these are."""
        return Extent.whole(self.segment.box)

    def of(self, buffer: Tensor) -> Tensor:
        """This part of one of the state's flat buffers, in one dimension."""
        return buffer[self.segment.start : self.segment.start + self.segment.owned]


def shards_of(states: Iterable[UnitState]) -> Iterator[Shard]:
    """Everything that a rank holds; shards that are padding alone are left out."""
    for state in states:
        for segment in state.table:
            if segment.owned:
                yield Shard(state, segment)


def buffers(state: UnitState) -> dict[str, Tensor]:
    """Kind -> flat buffer of everything that a checkpoint keeps of a unit."""
    copies = len(state.weights)
    earlier = {earlier_weights(age): state.weights[(state.newest - age) % copies] for age in range(1, copies)}
    return {WEIGHTS: state.master, **earlier, **state.moments}


def parts_of(shard: Shard) -> dict[str, Tensor]:
    """Kind -> this part of everything that a checkpoint keeps of its parameter, in one dimension."""
    found = {}
    for kind, buffer in buffers(shard.state).items():
        start = shard.segment.start - shard.state.moment_starts.get(kind, 0)
        if start >= 0 and start + shard.segment.owned <= buffer.numel():
            found[kind] = buffer[start : start + shard.segment.owned]
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
