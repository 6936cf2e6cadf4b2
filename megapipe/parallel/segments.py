"""The segment table: where each parameter of a unit lies in the unit's flat buffers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megapipe.costs.parameters import SEGMENT_ALIGNMENT, Box, ParameterSpec


@dataclass(frozen=True)
class Segment:
    """One parameter's shard inside a flat buffer.

    start, stop: elements of the flat buffer, tensor-parallel padding included.
    owned: how many leading elements are real; the rest is padding, whose value and gradient stay zero.
    """

    spec: ParameterSpec
    box: Box
    local_shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def owned(self) -> int:
        """Elements of the global tensor that this shard holds."""
        return self.box.num_elements


class SegmentTable:
    """Segments of one unit, decayed parameters first, matrices first of all, so that each optimizer group is one
    contiguous range: matrices end at `matrix_stop`, decayed parameters at `decay_stop`."""

    def __init__(
        self,
        specs: Iterable[ParameterSpec],
        *,
        tensor_rank: int = 0,
        tensor_size: int = 1,
        alignment: int = 1,
        num_shards: int = 1,
    ) -> None:
        """Lay `specs` out. `alignment` rounds the shards of padded specs (see ParameterSpec.local_shape).

        num_shards: equal, aligned ranges that the whole is to be cut into; padding at its end makes it divide.
        """
        self._segments: dict[str, Segment] = {}
        position = 0
        self.decay_stop = self.matrix_stop = 0
        for spec in sorted(specs, key=lambda spec: (not spec.decay, not spec.matrix)):
            local_shape = spec.local_shape(tensor_size, alignment)
            stored = 1
            for extent in local_shape:
                stored *= extent
            box = spec.box(tensor_rank, tensor_size, alignment)
            self._segments[spec.name] = Segment(spec, box, local_shape, position, position + stored)
            position = -(-(position + stored) // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
            if spec.decay:
                self.decay_stop = position
                if spec.matrix:
                    self.matrix_stop = position
        shards = SEGMENT_ALIGNMENT * num_shards
        self.num_elements = -(-position // shards) * shards
        self.tensor_rank = tensor_rank

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def __getitem__(self, name: str) -> Segment:
        return self._segments[name]

    def __len__(self) -> int:
        return len(self._segments)

    def counted(self) -> Iterator[Segment]:
        """Segments whose elements this tensor rank counts in a global sum: replicated ones count on rank 0 alone."""
        for segment in self:
            if segment.spec.partition_axis is not None or self.tensor_rank == 0:
                yield segment
