"""PipeDream's partitioners: cut layers into stages, each on its own number of workers, by dynamic programming.

`flat` has all workers on equal links: Harlap et al. (2018), "PipeDream: Fast and Efficient Pipeline Parallel DNN
Training", arXiv 1806.03377, partitioning algorithm. `hierarchical` has links that slow down from level to level:
Narayanan et al. (2019), "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19, partitioning
algorithm. Both minimise the time of the slowest stage per mini-batch; both use every worker, as the papers do. The
formulas are taken from accounts of the papers (the second's as recalled), not read again in them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product

from megapipe.planner.checks import require_counts, require_positive


@dataclass(frozen=True)
class Layer:
    """Profile of one layer and mini-batch: seconds of forward and backward, bytes of its output and of its weights.

    Raises ValueError when one is negative.
    """

    seconds: float
    activation_bytes: float
    weight_bytes: float

    def __post_init__(self) -> None:
        require_positive(dict(vars(self)), zero=True)


@dataclass(frozen=True)
class Level:
    """A level of the machine, from the innermost: how many of the level below one of it has, over which link.

    width: m_k. bytes_per_second: B_k, between those.
    """

    width: int
    bytes_per_second: float

    def __post_init__(self) -> None:
        require_counts({"width": self.width})
        require_positive({"bytes_per_second": self.bytes_per_second})


@dataclass(frozen=True)
class PartitionStage:
    """Layers first to last - 1, replicated over `workers` of a level.

    inner: how each of these runs the stage over the level below; empty at the innermost, where they are devices.
    """

    first: int
    last: int
    workers: int
    inner: tuple["PartitionStage", ...] = ()


@dataclass(frozen=True)
class Partition:
    """Stages in order, and the seconds per mini-batch of what is slowest: a stage or a hand-over between two."""

    seconds: float
    stages: tuple[PartitionStage, ...]

    @property
    def in_flight(self) -> int:
        """NOAM, mini-batches that keep the pipeline full: workers over replicas of the first stage, rounded up."""
        return -(-sum(stage.workers for stage in self.stages) // self.stages[0].workers)


def flat(layers: Sequence[Layer], workers: int, bytes_per_second: float) -> Partition:
    """The best partition over `workers` on equal links: arXiv 1806.03377, partitioning algorithm.

    T(i..j, m) = max(sum of seconds, sum of W_l) / m, where `W_l = 4 (m - 1) |w_l| / (m x bandwidth)`; a hand-over
    takes twice the activation over the bandwidth.

    Raises:
        ValueError: no layers, a count below 1, or a bandwidth that is not above 0.
    """
    _check(layers)
    require_counts({"workers": workers})
    require_positive({"bytes_per_second": bytes_per_second})
    compute, weights = _sums(layers)

    @cache
    def stage(first: int, last: int, count: int) -> Partition:
        synchronised = 4 * (count - 1) * weights(first, last) / (count * bytes_per_second)
        return Partition(max(compute(first, last), synchronised) / count, (PartitionStage(first, last, count),))

    handed_over = [2 * layer.activation_bytes / bytes_per_second for layer in layers]
    return _cut(0, len(layers), workers, stage, handed_over)[len(layers), workers]


def hierarchical(layers: Sequence[Layer], levels: Sequence[Level]) -> Partition:
    """The best partition over levels of links, SOSP'19, partitioning algorithm; `levels` from the innermost.

    `T^k(i..j, m) = max(A^(k-1)(i..j, m_(k-1)), 2 (m - 1) sum of |w_l| / B_k) / m`, and A^0 the sum of seconds; a
    hand-over of level k takes twice the activation over B_k.

    Raises:
        ValueError: no layers or no levels.
    """
    _check(layers)
    if not levels:
        raise ValueError("levels is empty; name at least one link")
    compute, weights = _sums(layers)

    def on_one(first: int, last: int) -> Partition:
        return Partition(compute(first, last), ())

    inner: Callable[[int, int], Partition] = on_one
    for level in levels:
        inner = _level(len(layers), level, inner, weights, [layer.activation_bytes for layer in layers])
    return inner(0, len(layers))


def _level(
    num_layers: int,
    level: Level,
    inner: Callable[[int, int], Partition],
    weights: Callable[[int, int], float],
    activations: list[float],
) -> Callable[[int, int], Partition]:
    """A^k with all of the level's width, of any run of layers."""
    below = {
        (first, last): inner(first, last) for first in range(num_layers) for last in range(first + 1, num_layers + 1)
    }

    @cache
    def stage(first: int, last: int, count: int) -> Partition:
        of_one = below[first, last]
        synchronised = 2 * (count - 1) * weights(first, last) / level.bytes_per_second
        return Partition(
            max(of_one.seconds, synchronised) / count, (PartitionStage(first, last, count, of_one.stages),)
        )

    handed_over = [2 * size / level.bytes_per_second for size in activations]
    best = [_cut(first, num_layers, level.width, stage, handed_over) for first in range(num_layers)]
    return lambda first, last: best[first][last, level.width]


def _cut(
    start: int,
    stop: int,
    workers: int,
    stage: Callable[[int, int, int], Partition],
    handed_over: list[float],
) -> dict[tuple[int, int], Partition]:
    """A(start..last, m) by last and m: a last stage on m' workers behind the best partition of the rest.

    handed_over: seconds of the hand-over behind each layer.
    """
    best: dict[tuple[int, int], Partition] = {}
    for last, count in product(range(start + 1, stop + 1), range(1, workers + 1)):
        found = stage(start, last, count)
        for cut, own in product(range(start + 1, last), range(1, count)):
            before = best[cut, count - own]
            behind = stage(cut, last, own)
            seconds = max(before.seconds, handed_over[cut - 1], behind.seconds)
            if seconds < found.seconds:
                found = Partition(seconds, before.stages + behind.stages)
        best[last, count] = found
    return best


def _sums(layers: Sequence[Layer]) -> tuple[Callable[[int, int], float], Callable[[int, int], float]]:
    """Seconds and weight bytes of layers first to last - 1."""
    seconds = list(accumulate((layer.seconds for layer in layers), initial=0.0))
    weights = list(accumulate((layer.weight_bytes for layer in layers), initial=0.0))
    return (
        lambda first, last: math.fsum((seconds[last], -seconds[first])),
        lambda first, last: math.fsum((weights[last], -weights[first])),
    )


def _check(layers: Sequence[Layer]) -> None:
    if not layers:
        raise ValueError("layers is empty; name at least one layer")
