"""The segment table: the position of each parameter of a unit in the unit's flat buffers, and the part that a replica
keeps."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megapipe.layout.units import place
from megapipe.spec.parameters import SEGMENT_ALIGNMENT, Box, ParameterSpec


@dataclass(frozen=True)
class Segment:
    """One parameter's shard inside a flat buffer.

    start, stop: elements of the flat buffer, tensor-parallel padding included.
    owned: number of leading elements that are not padding; values and gradients of padding stay zero.
    """

    spec: ParameterSpec
    box: Box
    local_shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def owned(self) -> int:
        """Number of elements of the global tensor that are in this shard."""
        return self.box.num_elements


class SegmentTable:
    """Segments of one unit, in an order in which each optimizer group is one contiguous range: `matrices`, the other
    `decayed` parameters, then the `undecayed` ones.

    With whole matrices, the matrices come last, each within one shard if `layout.units.place` finds room for it;
    `cut` names the others.
    """

    def __init__(
        self,
        specs: Iterable[ParameterSpec],
        *,
        tensor_rank: int = 0,
        tensor_size: int = 1,
        alignment: int = 1,
        num_shards: int = 1,
        whole_matrices: bool = False,
    ) -> None:
        """Lay out `specs`. `alignment` rounds the shards of padded specs (see ParameterSpec.local_shape).

        num_shards: number of equal, aligned ranges into which the buffer is cut; padding at its end makes it
        divisible. whole_matrices: do not cut matrices that fit into a range; padding is then between matrices.
        """
        self.tensor_rank = tensor_rank
        self._segments: dict[str, Segment] = {}
        self.cut: frozenset[str] = frozenset()
        if whole_matrices:
            self._place(list(specs), tensor_size, alignment, num_shards)
            return
        position = 0
        decay_stop = matrix_stop = 0
        for spec in sorted(specs, key=lambda spec: (not spec.decay, not spec.matrix)):
            segment = self._add(spec, tensor_size, alignment, position)
            position = -(-segment.stop // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
            if spec.decay:
                decay_stop = position
                if spec.matrix:
                    matrix_stop = position
        shards = SEGMENT_ALIGNMENT * num_shards
        self.num_elements = -(-position // shards) * shards
        self.matrices, self.decayed = slice(0, matrix_stop), slice(matrix_stop, decay_stop)
        self.undecayed = slice(decay_stop, self.num_elements)

    def _place(self, specs: list[ParameterSpec], tensor_size: int, alignment: int, num_shards: int) -> None:
        placement = place(specs, num_shards, tensor_size=tensor_size, alignment=alignment)
        for spec in specs:
            self._add(spec, tensor_size, alignment, placement.starts[spec.name])
        self.num_elements = placement.num_elements
        self.decayed, self.undecayed = slice(0, placement.decayed), slice(placement.decayed, placement.elementwise)
        self.matrices = slice(placement.elementwise, placement.num_elements)
        self.cut = placement.cut

    def _add(self, spec: ParameterSpec, tensor_size: int, alignment: int, start: int) -> Segment:
        shape = spec.local_shape(tensor_size, alignment)
        box = spec.box(self.tensor_rank, tensor_size, alignment)
        segment = Segment(spec, box, shape, start, start + prod(shape))
        self._segments[spec.name] = segment
        return segment

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def __getitem__(self, name: str) -> Segment:
        return self._segments[name]

    def counted(self) -> Iterator[Segment]:
        """Yield the segments whose elements this tensor rank counts in a global sum: replicated ones count only on
        rank 0."""
        for segment in self:
            if segment.spec.partition_axis is not None or self.tensor_rank == 0:
                yield segment


@dataclass(frozen=True)
class Sharding:
    """The division of a unit's state over replicas, and the index of one of them (Rajbhandari et al. 2020, arXiv
    1910.02054).

    stage: 0 nothing is sharded, 1 master weights and moments, 2 gradients too, 3 weights too. index, count: this
    replica's index among those that share a copy, and their number. whole_matrices: do not cut matrices that fit into
    a shard.
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
        """Return this replica's part of `num_elements`, which `count` divides."""
        size = num_elements // self.count
        return slice(self.index * size, (self.index + 1) * size)


WHOLE = Sharding()
"""Nothing is sharded."""


class TableShard:
    """The range `shard` of a table's elements, and the positions of parameters in buffers of the shard or of the whole
    table."""

    table: SegmentTable
    shard: slice

    def held(self, segment: Segment) -> range:
        """Return the range of a parameter's owned elements, counted from its first one, that is in this rank's
        shard."""
        start = min(max(self.shard.start - segment.start, 0), segment.owned)
        return range(start, max(start, min(self.shard.stop - segment.start, segment.owned)))

    def place(self, segment: Segment) -> slice:
        """Return the range of the elements of `held` in a buffer of this rank's shard."""
        first = segment.start - self.shard.start
        held = self.held(segment)
        return slice(first + held.start, first + held.stop) if held else slice(0, 0)

    def in_shard(self, shard: Tensor, segment: Segment) -> Tensor:
        """Return a parameter's owned elements in a buffer of this rank's shard: those of `held`, flat."""
        return shard[self.place(segment)]

    def within_shard(self, part: slice) -> slice:
        """Return the range, in a buffer of this rank's shard, of the elements of `part` that the shard has."""
        return slice(
            *(min(max(end, self.shard.start), self.shard.stop) - self.shard.start for end in (part.start, part.stop))
        )

    @staticmethod
    def view(flat: Tensor, segment: Segment) -> Tensor:
        """Return one parameter's stored shard as a tensor of its local shape."""
        return flat[segment.start : segment.stop].view(segment.local_shape)

    @staticmethod
    def owned_view(flat: Tensor, segment: Segment) -> Tensor:
        """Return one parameter's owned elements, in the shape of its box, without padding."""
        return flat[segment.start : segment.start + segment.owned].view(segment.box.shape)
