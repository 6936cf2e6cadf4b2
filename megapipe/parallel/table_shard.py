"""One rank's shard of the elements that a segment table lays out."""

from torch import Tensor

from megapipe.parallel.segments import Segment, SegmentTable


class TableShard:
    """The elements `shard` of `table`, and where parameters lie in buffers of these alone or of the whole table."""

    table: SegmentTable
    shard: slice

    def held(self, segment: Segment) -> range:
        """Which of a parameter's owned elements, counted from its first, lie in this rank's shard."""
        start = min(max(self.shard.start - segment.start, 0), segment.owned)
        return range(start, max(start, min(self.shard.stop - segment.start, segment.owned)))

    def place(self, segment: Segment) -> slice:
        """Where in a buffer of this rank's shard the elements of `held` lie."""
        first = segment.start - self.shard.start
        held = self.held(segment)
        return slice(first + held.start, first + held.stop) if held else slice(0, 0)

    def in_shard(self, shard: Tensor, segment: Segment) -> Tensor:
        """A parameter's owned elements in a buffer of this rank's shard: those of `held`, flat."""
        return shard[self.place(segment)]

    def within_shard(self, part: slice) -> slice:
        """Where in a buffer of this rank's shard those elements of the table lie that it has of `part`."""
        return slice(
            *(min(max(end, self.shard.start), self.shard.stop) - self.shard.start for end in (part.start, part.stop))
        )

    @staticmethod
    def view(flat: Tensor, segment: Segment) -> Tensor:
        """One parameter's stored shard as a tensor of its local shape."""
        return flat[segment.start : segment.stop].view(segment.local_shape)

    @staticmethod
    def owned_view(flat: Tensor, segment: Segment) -> Tensor:
        """One parameter's owned elements, shaped as its box: no padding."""
        return flat[segment.start : segment.start + segment.owned].view(segment.box.shape)
