"""How long the micro-batches of a step take in a pipeline, by a walk of the schedule's order of compute actions.

Times count up to the end of the last rank's last backward: updates wait there for the gradients' norm.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.schedules import Options
from megapipe.schedules.build import order
from megapipe.schedules.generators.registry import find_generator
from megapipe.schedules.simulation.order_times import OrderCosts, OrderGraph

Floats = npt.NDArray[np.float64]
STEPS = 4
"""Optimizer steps that a schedule without a flush is walked for, half of which fill the pipeline."""
PERIODS = (12, 36)
"""Periods of an order that are walked in the hope that all others repeat them."""


class Waiting(NamedTuple):
    """Seconds of a step that the busiest rank waits for other ranks' compute, and for their messages besides."""

    bubble: float
    messages: float


def waiting_of(name: str, options: Options, costs: OrderCosts, num_microbatches: int, work: float) -> Waiting:
    """Return what the rank with the most work waits for in one step of a named schedule.

    Args:
        name, options: of the schedule.
        costs: of one layout.
        num_microbatches: of a step of one replica.
        work: seconds of a micro-batch on the busiest rank.
    """
    if costs.latency.shape[-1] == 1:
        return Waiting(0.0, 0.0)
    links = np.array([0.0, 1.0])[:, None, None]
    both = OrderCosts(*(np.repeat(each, 2, axis=0) for each in costs))
    both = both._replace(latency=both.latency * links, transfer=both.transfer * links)
    alone, whole = (float(each) for each in step_seconds(name, options, both, num_microbatches))
    bubble = max(0.0, alone - num_microbatches * work)
    return Waiting(bubble, max(0.0, whole - num_microbatches * work - bubble))


def step_seconds(name: str, options: Options, costs: OrderCosts, num_microbatches: int) -> Floats:
    """Return the seconds of a step up to its last backward, for each layout; without a flush those of a later step.

    Long steps are not walked in full where a shorter one shows that all clocks repeat (`OrderGraph.slope`): what the
    micro-batches between add is then exact. Arguments as of `waiting_of`.
    """
    ranks = costs.latency.shape[-1]
    generator = find_generator(name)
    options, period = generator.settled(ranks, num_microbatches, options)
    key = name, tuple(sorted(options.items())), ranks
    for periods in PERIODS:
        shown = num_microbatches - (num_microbatches // period - periods) * period
        if 3 * shown > 2 * num_microbatches:
            break
        (graph, *others) = _graphs(*key, shown)
        if others:
            break
        ends = graph.ends(costs)
        slope = graph.slope(ends, period)
        if slope is not None:
            found: Floats = ends.max(axis=0) + (num_microbatches - shown) // period * slope
            return found
    finishes: list[Floats] = [graph.ends(costs).max(axis=0) for graph in _graphs(*key, num_microbatches)]
    return finishes[0] if len(finishes) == 1 else (finishes[1] - finishes[0]) / (STEPS - STEPS // 2)


@lru_cache(maxsize=64)
def _graphs(name: str, options: tuple[tuple[str, object], ...], ranks: int, count: int) -> tuple[OrderGraph, ...]:
    """Return the graph of a step, or without a flush those of `STEPS` / 2 and of `STEPS` steps."""
    schedule = order(name, ranks, count, **dict(options))  # type: ignore[arg-type]
    return tuple(OrderGraph(schedule, steps) for steps in ((1,) if schedule.flushes else (STEPS // 2, STEPS)))
