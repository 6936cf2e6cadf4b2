"""Galvatron's decision tree: the parallel strategies that a layer may take.

Miao et al. (2022), "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism", arXiv
2211.13878, decision-tree construction of the search space.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from megapipe.planner.checks import require_counts

Method = Literal["data", "sharded", "tensor"]
"""Replicas with a whole state, replicas that share one (ZeRO stage 3), or devices that share the layer's compute."""
METHODS: tuple[Method, ...] = ("data", "sharded", "tensor")


@dataclass(frozen=True)
class Strategy:
    """A leaf of a tree: how the devices of one pipeline stage work on a layer.

    pipeline: stages of the whole machine. levels: (method, degree) from the outermost, whose groups reach farthest, to
    the innermost, whose groups are neighbours. recompute: the layer's forward runs again in its backward.
    """

    pipeline: int
    levels: tuple[tuple[Method, int], ...]
    recompute: bool = False

    def degree(self, method: Method) -> int:
        """Of a method; 1 where the strategy does not use it."""
        return dict(self.levels).get(method, 1)

    @property
    def replicas(self) -> int:
        """Parts that a micro-batch is split into: the degree of data or sharded data parallelism."""
        return self.degree("data") * self.degree("sharded")

    def span(self, method: Method) -> int:
        """Neighbouring devices that a group of the method reaches over: its degree and everything further inside."""
        extent = 1
        for name, degree in reversed(self.levels):
            extent *= degree
            if name == method:
                return extent
        return 1

    def block(self, device: int) -> int:
        """Which of the `replicas` parts of a micro-batch a device of the stage has, counted from 0."""
        index, scale = 0, 1
        for name, degree in reversed(self.levels):
            device, place = divmod(device, degree)
            if name != "tensor":
                index += place * scale
                scale *= degree
        return index


def strategies(devices: int, *, pruned: bool = True, recompute: bool = False) -> tuple[Strategy, ...]:
    """All strategies of a machine, over every pipeline degree that is a power of 2.

    pruned: leave out those that mix data with sharded data parallelism, which sharding alone betters in both memory
    and traffic (the paper's takeaways). recompute: each with and without recomputation.

    Raises:
        ValueError: `devices` is not a power of 2.
    """
    require_counts({"devices": devices})
    if devices & (devices - 1):
        raise ValueError(f"devices must be a power of 2, got {devices}")
    depths = [2**power for power in range(devices.bit_length())]
    return tuple(each for depth in depths for each in stage_strategies(devices, depth, pruned, recompute))


def stage_strategies(
    devices: int, pipeline: int, pruned: bool = True, recompute: bool = False
) -> tuple[Strategy, ...]:
    """Those of one pipeline degree, which divides the devices; both are powers of 2."""
    power = (devices // pipeline).bit_length() - 1
    found = []
    for count in range(len(METHODS) + 1):
        for methods in permutations(METHODS, count):
            if pruned and {"data", "sharded"} <= set(methods):
                continue
            for powers in _compositions(power, count):
                levels = tuple((method, 2**part) for method, part in zip(methods, powers, strict=True))
                found += [Strategy(pipeline, levels, again) for again in ((False, True) if recompute else (False,))]
    return tuple(found)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `total` as a sum of so many numbers of at least 1."""
    if parts == 0:
        yield from [()] if total == 0 else []
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)
