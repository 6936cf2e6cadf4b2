"""PipeDream's partitioners: cut layers into stages, each on its own number of workers, by dynamic programming.

`flat` has all workers on equal links: Harlap et al. (2018), "PipeDream: Fast and Efficient Pipeline Parallel DNN
Training", arXiv 1806.03377, partitioning algorithm. `hierarchical` has links that slow down from level to level:
Narayanan et al. (2019), "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19, partitioning
algorithm. Both minimise the time of the slowest stage per mini-batch, and both use every worker, as in the papers. The
formulas come from secondary descriptions of the papers (the second one's from memory) and were not checked in them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product


@dataclass(frozen=True)
class Layer:
    """Profile of one layer for one mini-batch: seconds of forward and backward, bytes of output and of weights."""

    seconds: float
    activation_bytes: float
    weight_bytes: float


@dataclass(frozen=True)
class Level:
    """A level of the machine, such as the devices of a server, or the servers of a cluster.

    width: m_k, number of components of the level below. bytes_per_second: B_k, bandwidth between these components.
    """

    width: int
    bytes_per_second: float


@dataclass(frozen=True)
class PartitionStage:
    """Layers first to last - 1, replicated over `workers` components of a level.

    inner: stages into which each component divides these layers on the level below; empty for devices.
    """

    first: int
    last: int
    workers: int
    inner: tuple["PartitionStage", ...] = ()


@dataclass(frozen=True)
class Partition:
    """Stages in order, and the seconds per mini-batch of the slowest stage or transfer between stages."""

    seconds: float
    stages: tuple[PartitionStage, ...]

    @property
    def in_flight(self) -> int:
        """Return NOAM, the mini-batches that fill the pipeline: workers / replicas of the first stage, rounded up."""
        return -(-sum(stage.workers for stage in self.stages) // self.stages[0].workers)


def flat(layers: Sequence[Layer], workers: int, bytes_per_second: float) -> Partition:
    """Return the best partition over `workers` workers with equal links (arXiv 1806.03377, partitioning algorithm).

    T(i..j, m) = max(sum of seconds, sum of W_l) / m, where `W_l = 4 (m - 1) |w_l| / (m x bandwidth)`; a transfer takes
    twice the activation over the bandwidth.
    """
    return _best(layers, [Level(workers, bytes_per_second)], lambda count: 4 * (count - 1) / count)


def hierarchical(layers: Sequence[Layer], levels: Sequence[Level]) -> Partition:
    """Return the best partition over levels of links (SOSP'19, partitioning algorithm). levels: the innermost first.

    `T^k(i..j, m) = max(A^(k-1)(i..j, m_(k-1)), 2 (m - 1) sum of |w_l| / B_k) / m`, and A^0 is the sum of seconds; a
    transfer of level k takes twice the activation over B_k.
    """
    return _best(layers, levels, lambda count: 2 * (count - 1))


def _best(layers: Sequence[Layer], levels: Sequence[Level], passes: Callable[[int], float]) -> Partition:
    """Return the best partition. passes: number of replicas -> how often weights cross a link in a gradient sum."""
    seconds = list(accumulate((layer.seconds for layer in layers), initial=0.0))
    weights = list(accumulate((layer.weight_bytes for layer in layers), initial=0.0))

    def best(k: int, first: int, last: int) -> Partition:
        """Return A^k(first..last) on the full width of level k; level 0 is one device."""
        if k == 0:
            return Partition(math.fsum((seconds[last], -seconds[first])), ())
        return best_from(k, first)[last, levels[k - 1].width]

    @cache
    def stage(k: int, first: int, last: int, count: int) -> Partition:
        """Return T^k(first..last, m): the layers as one stage."""
        of_one = best(k - 1, first, last)
        synchronised = passes(count) * math.fsum((weights[last], -weights[first])) / levels[k - 1].bytes_per_second
        slowest = max(of_one.seconds, synchronised) / count
        return Partition(slowest, (PartitionStage(first, last, count, of_one.stages),))

    @cache
    def best_from(k: int, first: int) -> dict[tuple[int, int], Partition]:
        """Return A^k(first..last, m) by (last, m): the best partition of the first layers, then a last stage."""
        level = levels[k - 1]
        partitions: dict[tuple[int, int], Partition] = {}
        for last, count in product(range(first + 1, len(layers) + 1), range(1, level.width + 1)):
            fastest = stage(k, first, last, count)
            for cut, workers in product(range(first + 1, last), range(1, count)):
                before, after = partitions[cut, count - workers], stage(k, cut, last, workers)
                transfer = 2 * layers[cut - 1].activation_bytes / level.bytes_per_second
                slowest = max(before.seconds, transfer, after.seconds)
                if slowest < fastest.seconds:
                    fastest = Partition(slowest, before.stages + after.stages)
            partitions[last, count] = fastest
        return partitions

    return best(len(levels), 0, len(layers))
