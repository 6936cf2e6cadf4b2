"""Positions of parameters in a flat buffer of equal shards that cut as few matrices as possible.

An optimizer that steps whole matrices (Muon) then has most of them whole on one rank. Parameters that it does not
treat as matrices are first and may be cut anywhere. Matrices longer than an equal part of the buffer are last and are
cut: if they were whole, every shard would have the length of the longest one. The others are between these two groups,
placed by the longest-first rule of scheduling (Graham 1969, "Bounds on multiprocessing timing anomalies") in the
emptiest shards that have room.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod

from megapipe.spec.parameters import SEGMENT_ALIGNMENT, ParameterSpec


@dataclass(frozen=True)
class MatrixPlacement:
    """Elements of a unit's flat buffer, `num_shards` equal shards of `shard_size`.

    starts, stops: parameter -> its half-open range of elements; starts are multiples of 64. decayed: end of the
    decayed parameters that are not matrices. elementwise: end of all that are not matrices; matrices follow.
    cut: names of the matrices that are not whole in any shard.
    """

    shard_size: int
    num_shards: int
    starts: dict[str, int]
    stops: dict[str, int]
    decayed: int
    elementwise: int
    cut: frozenset[str]

    @property
    def num_elements(self) -> int:
        """Elements of the buffer, including padding.

        At most the sum of those of the parameters, 64 per shard, and the longest whole matrix times the number of
        shards; so at most twice the parameters plus 64 per shard.
        """
        return self.shard_size * self.num_shards

    @property
    def gathered_elements(self) -> int:
        """Elements, in fp32, that the ranks of a copy gather in an update for the matrices that are cut."""
        return self.num_elements if self.cut else 0

    def elementwise_in(self, shard: int) -> int:
        """Return the elements of a shard that do not belong to a matrix."""
        return min(max(self.elementwise - shard * self.shard_size, 0), self.shard_size)

    def has_some(self, name: str, shard: int) -> bool:
        """Return whether a shard has elements of a parameter."""
        start, stop = shard * self.shard_size, (shard + 1) * self.shard_size
        return self.starts[name] < stop and start < self.stops[name]


def place(
    specs: Iterable[ParameterSpec], num_shards: int, *, tensor_size: int = 1, alignment: int = 1
) -> MatrixPlacement:
    """Return the positions of the parameters of a unit. tensor_size, alignment: as in `ParameterSpec.local_shape`."""
    ordered = sorted(specs, key=lambda spec: (spec.matrix, not spec.decay))
    lengths = {spec.name: prod(spec.local_shape(tensor_size, alignment)) for spec in ordered}
    sizes = {name: _aligned(length) for name, length in lengths.items()}
    total = sum(sizes.values())
    starts: dict[str, int] = {}
    position = decayed = 0
    for spec in ordered:
        if not spec.matrix:
            starts[spec.name] = position
            position += sizes[spec.name]
            decayed = position if spec.decay else decayed
    matrices = {spec.name: sizes[spec.name] for spec in ordered if spec.matrix}
    long = {name: size for name, size in matrices.items() if size * num_shards > total}
    whole = {name: size for name, size in matrices.items() if name not in long}
    order = sorted(whole, key=lambda name: -whole[name])
    behind = sum(long.values())

    def place_at(shard_size: int) -> list[int] | None:
        stop = num_shards * shard_size - behind
        bins = [(max(i * shard_size, position), min((i + 1) * shard_size, stop)) for i in range(num_shards)]
        return _packed([whole[name] for name in order], bins)

    shard_size = _smallest(place_at, -(-total // num_shards), max(whole.values(), default=0))
    packed = place_at(shard_size)
    assert packed is not None
    starts |= dict(zip(order, packed, strict=True))
    first = num_shards * shard_size - behind
    for name, size in long.items():
        starts[name] = first
        first += size
    cut = frozenset(
        name for name in long if starts[name] // shard_size != (starts[name] + sizes[name] - 1) // shard_size
    )
    stops = {name: start + lengths[name] for name, start in starts.items()}
    return MatrixPlacement(shard_size, num_shards, starts, stops, decayed, position, cut)


def _smallest(place_at: Callable[[int], list[int] | None], share: int, longest: int) -> int:
    """Return the smallest shard size, by bisection, for which `place_at` returns positions; `share` plus `longest`
    always suffices."""
    low, high = (-(-size // SEGMENT_ALIGNMENT) for size in (max(share, longest), share + longest))
    while low < high:
        middle = (low + high) // 2
        if place_at(middle * SEGMENT_ALIGNMENT) is None:
            low = middle + 1
        else:
            high = middle
    return low * SEGMENT_ALIGNMENT


def _packed(sizes: Sequence[int], bins: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return a start for each size, longest first, in the bin with most room (the first of equals); None if one does
    not fit.

    bins: start and stop of each.
    """
    room = [(start - stop, number, start) for number, (start, stop) in enumerate(bins)]
    heapify(room)
    starts = []
    for size in sizes:
        negative, number, start = room[0]
        if size > -negative:
            return None
        heapreplace(room, (negative + size, number, start + size))
        starts.append(start)
    return starts


def _aligned(size: int) -> int:
    return -(-size // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
