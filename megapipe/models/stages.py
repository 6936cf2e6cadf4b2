"""Splitting the layers of a model into contiguous stages."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise


def even_split(costs: Sequence[float], num_stages: int) -> list[range]:
    """Contiguous ranges of layers, one a stage, whose dearest stage is as cheap as can be; every stage gets a layer.

    Among those, the split with the smallest sum of squared stage costs, so that the other stages are even as well.
    costs: of each layer, at least 0, in any unit. Raises ValueError for more stages than layers, or a wrong cost.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot fill {num_stages} stages; choose from 1 to {len(costs)} stages")
    for layer, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"layer {layer} has cost {cost}; costs are finite and at least 0")
    total = [0, *accumulate(costs)]
    limit = _cheapest(total, num_stages, float("inf"), max)[0]
    return _cheapest(total, num_stages, limit, lambda before, cost: before + cost * cost)[1]


def _cheapest(
    total: Sequence[float], num_stages: int, limit: float, combine: Callable[[float, float], float]
) -> tuple[float, list[range]]:
    """(value, ranges) of the split with the least value, by dynamic programming over its number of stages.

    total[n]: cost of the first n layers. limit: no stage is dearer. combine: value of the stages before and the cost
    of one more stage -> value with it; it never falls when the value before rises.
    """
    num_layers = len(total) - 1
    best: list[tuple[float, list[int]] | None] = [(0.0, [0]), *([None] * num_layers)]
    for _ in range(num_stages):
        best = [_extended(best[:stop], total, stop, limit, combine) for stop in range(num_layers + 1)]
    found = best[num_layers]
    if found is None:
        raise ValueError(f"no split of {num_layers} layers into {num_stages} stages keeps every stage within {limit}")
    value, bounds = found
    return value, [range(start, stop) for start, stop in pairwise(bounds)]


def _extended(
    before: Sequence[tuple[float, list[int]] | None],
    total: Sequence[float],
    stop: int,
    limit: float,
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]] | None:
    """The best split of the first `stop` layers, given the best splits of fewer layers into one stage less."""
    best = None
    for start, previous in enumerate(before):
        cost = total[stop] - total[start]
        if previous is None or cost > limit:
            continue
        value = combine(previous[0], cost)
        if best is None or value < best[0]:
            best = (value, [*previous[1], stop])
    return best
