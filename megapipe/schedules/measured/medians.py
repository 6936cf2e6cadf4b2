"""The simulator's times, taken from what a run took: medians by kind and stage."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from megapipe.schedules.actions import COMPUTE_STREAM, Action, Kind
from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.measured.run import Execution, MeasuredRun
from megapipe.schedules.measured.trace_file import Event
from megapipe.schedules.measured.window import MILLISECOND, Window
from megapipe.schedules.simulation import Costs, Link

WAITED = 0.02
"""Milliseconds from which a rank counts as having waited for a message: it saw when it arrived."""


@dataclass(frozen=True)
class MeasuredCosts:
    """``costs`` in milliseconds. ``clock_excess``: a message seemed to arrive that long before it was sent."""

    costs: Costs
    clock_excess: float


def measured_costs(run: MeasuredRun, window: Window) -> MeasuredCosts:
    """Times of compute and updates over all recorded steps, without waiting; those of messages over the window.

    A message's time is known where its receiver waited for it, from its send to its arrival; between ranks where
    nobody waited it counts as nothing. The sum of scalars takes from its last rank's start to its end on the others,
    which includes what is left of gradient reductions then.
    """
    stages = range(len(run.schedule.header.stages))
    times = _work(run)
    links, excess = _links(window)

    def of(kind: Kind) -> tuple[float, ...]:
        return tuple(times.get((kind, stage), 0.0) for stage in stages)

    costs = Costs(
        forward=of(Kind.FORWARD),
        recompute=of(Kind.RECOMPUTE),
        backward=of(Kind.BACKWARD),
        backward_input=of(Kind.BACKWARD_INPUT),
        backward_weight=of(Kind.BACKWARD_WEIGHT),
        update=of(Kind.UPDATE),
        reduce_gradients=(0.0,) * len(stages),
        gather_weights=(0.0,) * len(stages),
        reduce_scalars=_scalars(run),
        links=links,
    )
    return MeasuredCosts(costs, excess)


def _events(run: MeasuredRun) -> Iterator[tuple[Execution, list[Action], Event]]:
    """Every event with its execution and the actions that it covers: one, or neighbouring updates."""
    for execution, ranks in run.recorded.items():
        for rank, events in enumerate(ranks):
            actions = list(run.schedule.actions(execution.section, rank))
            ordered = sorted(events)
            for position, following in pairwise([*ordered, len(actions)]):
                yield execution, actions[position:following], events[position]


def _work(run: MeasuredRun) -> dict[tuple[Kind, int], float]:
    """Median time of each kind for a whole stage; the units of a chunk or of an update are added up."""
    found: dict[tuple[Kind, int], dict[tuple[Execution, int], float]] = defaultdict(lambda: defaultdict(float))
    for execution, actions, event in _events(run):
        if actions[0].kind in (*COMPUTE_STREAM, Kind.UPDATE):
            share = (event.end - event.start - event.wait) / MILLISECOND / len(actions)
            for action in actions:
                found[action.kind, action.stage][execution, action.microbatch] += share
    return {key: median(values.values()) for key, values in found.items()}


def _links(window: Window) -> tuple[dict[tuple[int, int], Link], float]:
    """The time of a message between two ranks, for each pair that sends; and how far one came before it was sent."""
    table = window.table
    messages = Dependencies(table).messages
    took = window.start[messages.use] + window.wait[messages.use] - window.start[messages.send]
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    for index in np.flatnonzero((window.wait[messages.use] > WAITED) & ~np.isnan(took)).tolist():
        pair = int(table.rank[messages.send[index]]), int(table.rank[messages.use[index]])
        seen[pair].append(float(took[index]))
    links = {pair: Link(latency=max(0.0, median(times))) for pair, times in seen.items()}
    return links, float(np.nanmax(-took, initial=0.0))


def _scalars(run: MeasuredRun) -> float:
    """Median time of a step's sum of scalars, from its start on the last rank to its result.

    Where no rank waited for the result, its end is not known: the sum took as long as where one did, or was over when
    the first update wanted it.
    """
    period, awaited = run.schedule.header.num_microbatches, run.schedule.header.updates_per_step == 1
    starts, ends, waits, wanted = (defaultdict[int, list[int]](list) for _ in range(4))
    for execution, actions, event in _events(run):
        step = execution.step + actions[0].microbatch // period
        waited = event.wait > WAITED * MILLISECOND
        if actions[0].kind == Kind.REDUCE_SCALARS:
            starts[step].append(event.start)
            (waits if waited else ends)[step].append(event.end)
        elif actions[0].kind == Kind.UPDATE and awaited:
            wanted[step].append(event.start)
            waits[step] += [event.start + event.wait] * waited
    whole = [step for step, mine in starts.items() if len(mine) == run.schedule.header.num_ranks]
    known = {step: min(waits[step]) - max(starts[step]) for step in whole if waits[step]}
    if known:
        typical = median(known.values())
        hidden = (step for step in whole if step not in known and wanted[step])
        times = [*known.values(), *(min(typical, min(wanted[step]) - max(starts[step])) for step in hidden)]
    else:
        times = [max(ends[step]) - max(starts[step]) for step in whole]
    return max(0.0, median(times)) / MILLISECOND if times else 0.0
