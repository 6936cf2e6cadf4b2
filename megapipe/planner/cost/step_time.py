"""Terms of an estimated step. A walk through the schedule's order gives the time of its micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megapipe.layout.order_walk import Order, ShardedRanks, few_ranks
from megapipe.layout.scheduling import schedule_options
from megapipe.planner.cost.estimate import Assumptions, Term
from megapipe.planner.cost.layer_costs import StageCosts, exposed_seconds, overlapped, scalar_seconds, tied_seconds
from megapipe.planner.cost.memory import cut_of, sharding_of
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.schedules import Options, Schedule
from megapipe.schedules.actions import BACKWARDS, KIND, STAGE, Floats
from megapipe.schedules.registry import find_generator
from megapipe.schedules.simulation.order_times import OrderCosts, OrderGraph

Entry = TypeVar("Entry", np.float64, np.bool_)
ROUNDING = 1e-9
"""Maximum relative difference between sums of the same terms in different orders."""
STEPS = 4
"""Optimizer steps to walk or simulate for a schedule without a flush; the first half fills the pipeline."""
WALKED_PERIODS = (10, 36)
"""Numbers of periods of an order to try first: if all ranks' times repeat, the remaining periods repeat them too."""


def waiting_of(
    name: str, options: Options, costs: OrderCosts, num_microbatches: int, work: float, after: Floats
) -> tuple[float, float, float]:
    """Return the seconds of one step that the rank with the most work waits for other ranks' compute and for their
    messages, and the seconds that the work after each rank's last action adds to the step.

    Args:
        name, options: name and options of the schedule.
        costs: costs of one layout.
        num_microbatches: number of micro-batches of one replica in a step.
        work: seconds of a micro-batch on the busiest rank.
        after: seconds of work that follow each rank's last action, shape [ranks].
    """
    if costs.latency.shape[-1] == 1:
        return 0.0, 0.0, float(after[0])
    links = np.array([0.0, 1.0])[:, None, None]
    cases = costs.repeated(2)
    cases = cases._replace(latency=cases.latency * links, transfer=cases.transfer * links)
    (alone, whole), (_, later) = step_seconds(name, options, cases, num_microbatches, (0.0, after)).tolist()
    bubble = max(0.0, alone - num_microbatches * work)
    return bubble, max(0.0, whole - num_microbatches * work - bubble), later - whole


def step_seconds(
    name: str, options: Options, costs: OrderCosts, num_microbatches: int, afters: Sequence[Floats | float] = (0.0,)
) -> Floats:
    """Return the seconds of a step up to the end of each of `afters`, shape [afters, layouts]; without a flush, of a
    later step.

    A long step is not walked in full if a shorter one shows that all ranks' times repeat (`OrderGraph.slope`): the
    time that the remaining micro-batches add is then exact. afters: seconds of work after each rank's last action, see
    `OrderGraph.finish`. See `waiting_of` for the other arguments.
    """
    ranks = costs.latency.shape[-1]
    generator = find_generator(name)
    options, period = generator.settled(ranks, num_microbatches, options)
    key = name, tuple(sorted(options.items())), ranks
    for periods in WALKED_PERIODS:
        shown = num_microbatches - (num_microbatches // period - periods) * period
        if 5 * shown > 4 * num_microbatches:
            break
        (graph, *others) = _graphs(*key, shown)
        if others:
            break
        ends = graph.ends(costs)
        slope = graph.slope(ends, period)
        if slope is not None:
            finish = graph.finish(ends, costs.after_backward, afters)
            return finish + (num_microbatches - shown) // period * slope
    graphs = _graphs(*key, num_microbatches)
    after = costs.after_backward
    finishes = [graph.finish(graph.ends(costs), after, afters) for graph in graphs]
    return finishes[0] if len(finishes) == 1 else (finishes[1] - finishes[0]) / (STEPS - STEPS // 2)


@lru_cache(maxsize=64)
def _graphs(name: str, options: tuple[tuple[str, object], ...], ranks: int, count: int) -> tuple[OrderGraph, ...]:
    """Return the graph of one step; without a flush, return the graphs of `STEPS` / 2 and of `STEPS` steps."""
    schedule = Order(name, options, ranks, count).actions
    return tuple(OrderGraph(schedule, steps) for steps in ((1,) if schedule.flushes else (STEPS // 2, STEPS)))


def split_fractions(schedule: Schedule) -> Floats:
    """Return for each stage the fraction of its backwards that are split."""
    rows = np.concatenate(schedule.sections.body)
    counts = [
        np.bincount(rows[rows[:, KIND] == kind, STAGE], minlength=len(schedule.header.stages)) for kind in BACKWARDS
    ]
    fractions: Floats = counts[1] / np.maximum(1, sum(counts))
    return fractions


@lru_cache(maxsize=1024)
def _split_fractions(full: Order) -> Floats:
    """Return the fractions of an order; one of few micro-batches shows whether it splits all backwards."""
    for asked in (full.short()[0], full):
        fractions = split_fractions(asked.actions)
        if (fractions == 1.0).all():
            break
    return fractions


PERIODS = 3
"""Periods of an order to count; every later period has the same traffic as the last of these."""


class TrafficCounts(NamedTuple):
    """Traffic of each stage per micro-batch, shape [stages]: the number of gathers of all its weights, for forward and
    backward together, and the number of sums of all its gradients. gathers, sums: 0 if each unit stays in its buffer
    during the whole step; all_gathers, all_sums: these are counted too."""

    gathers: Floats
    sums: Floats
    all_gathers: Floats
    all_sums: Floats


def traffic_counts(run: RunLayout) -> TrafficCounts:
    """Return the traffic of a run; all zeros if neither gradients nor weights are sharded."""
    zero, count = run.config.zero, run.num_microbatches
    if zero.stage < 2 or run.costs.of_units.shards == 1:
        return TrafficCounts(*np.zeros((4, len(run.ranks))))
    units = np.array(run.stages.units_per_stage)
    cut = cut_of(run)
    full, (of_weights, of_gradients) = Order.of(run.config, count), sharding_of(run, cut)
    sums = _counted(full, of_gradients, "sums")
    gathers = 0 * sums if of_weights is None else _counted(full, of_weights, "gathers")
    gathers, sums = (each[cut.like_few_stages] / units / count for each in (gathers, sums))
    once = 1.0 / count * (1 + 1e-9)
    steady = np.where((sums > once) | ((count == 1) & (units > zero.gradient_buffers)), sums, 0.0)
    return TrafficCounts(np.where(gathers > once, gathers, 0.0), steady, gathers, sums)


@lru_cache(maxsize=1024)
def _counted(full: Order, sharding: ShardedRanks, part: Literal["gathers", "sums"]) -> Floats:
    """Return the number of gathers or sums in a step, for each stage of a few ranks."""
    short, period = full.short(PERIODS)
    counts: Floats = getattr(few_ranks(short, sharding), part)
    left = full.num_microbatches - short.num_microbatches
    if left:
        fewer = short._replace(num_microbatches=short.num_microbatches - period)
        before = getattr(few_ranks(fewer, sharding), part)
        counts = counts + (counts - before) * (left // period)
    return counts


def hop_seconds(run: RunLayout, assumptions: Assumptions) -> list[tuple[float, float]]:
    """Return latency and transfer of a message from each pipeline rank to the next; the last sends to the first.

    Scattered sends include the gather that puts the pieces of a message together.
    """
    message, tensor, gathered = float(run.costs.stream), run.costs.tensor, 0.0
    if assumptions.scattered_sends and tensor > 1 and run.pipeline > 1 and not run.config.parallel.sequence:
        gathered = run.placement.slowest("all_gather", message, "tensor").seconds
        message /= tensor
    times = [run.placement.send(message, stage) for stage in range(run.pipeline)]
    return [(time.latency + gathered, time.transfer) for time in times]


class _Pace(NamedTuple):
    """Seconds of a micro-batch: all work of each rank, shape [ranks], and each chunk's backward, [chunks, ranks]."""

    work: Floats
    backward: Floats


class _Exposed(NamedTuple):
    """Seconds that replicas' traffic adds to a pass of a micro-batch through each stage. late: the part of
    units whose traffic waits for a free buffer."""

    whole: Floats
    late: Floats


def work_terms(costs: StageCosts, rank: int, count: int, apart: Floats, again: str) -> Iterator[Term]:
    """Yield the terms of a rank's kernels, and of its waits in its layers, in `count` micro-batches.

    apart: fraction of each stage's backwards that are split. again: name of recomputation in the source of its term.
    """
    compute = costs.forward + costs.backward_input + costs.backward_weight
    for name, seconds, source in (
        ("compute", compute, costs.source),
        ("recompute", costs.recompute + costs.made_again, f"{again}: {costs.source}"),
        ("tensor", costs.tensor.microbatch(apart=apart), costs.tensor.source),
        ("context", costs.context.microbatch(apart=apart), costs.context.source),
    ):
        yield Term(name, float(costs.by_rank(seconds)[rank]) * count, source)


class StepTimer:
    """The time of a step. A micro-batch's traffic of sharded weights and gradients overlaps with its compute.

    costs: costs of the stages. assumptions: with the machine's slow-down filled in. apart: fraction of each stage's
    backwards that are split.
    """

    def __init__(self, run: RunLayout, costs: StageCosts, assumptions: Assumptions) -> None:
        self.run, self.costs, self.assumptions = run, costs, assumptions
        self.generator = find_generator(run.config.schedule.name)
        self.policy, self.flushes, self.count = run.policy, run.policy.flushes, run.num_microbatches
        self.units = np.bincount(costs.ranks, costs.layers)
        self.apart = np.zeros(len(costs.ranks))
        if run.splits:
            self.apart = _split_fractions(Order.of(run.config, self.count))

    @cached_property
    def traffic(self) -> TrafficCounts:
        return traffic_counts(self.run)

    def terms(self) -> tuple[Term, ...]:
        """Return the terms of a step's time, without terms of 0 seconds."""
        return tuple(replace(term, seconds=float(term.seconds)) for term in self._terms() if term.seconds)

    def least_seconds(self) -> float:
        """Return a lower bound of the sum of all terms, without a walk through the order: each rank's work, and the
        passes of the first and of the last micro-batch through the stages before its own."""
        if not self.flushes:
            return 0.0
        costs, pace, sums = self.costs, self._pace, self._sums_left(self._pace, 0.0)
        last, tied = float(sums.min()), tied_seconds(self.run)
        hops = np.array(hop_seconds(self.run, self.assumptions)).sum(axis=1)[costs.ranks]
        hops[:-1] *= np.diff(costs.ranks) == 1
        first = np.unique(costs.ranks, return_index=True)[1]
        backward = costs.input_half + costs.weight_half(apart=self.apart)
        work = self.count * costs.by_rank(costs.whole_forward + costs.whole_again + backward)
        work += np.append(0.0, costs.whole_forward + hops).cumsum()[first]
        passed = 0.0 if self.run.splits else np.append(0.0, backward + hops).cumsum()[first]
        seconds = max(float((work + passed).max()), self.count * float(pace.work.max())) + max(last, tied)
        seconds = max(seconds, float((work + sums).max()), self._streamed())
        return (seconds + scalar_seconds(self.run) + self._update(pace) + self._gathers()) * (1.0 - ROUNDING)

    @cached_property
    def _exposed(self) -> tuple[_Exposed, _Exposed, _Exposed]:
        """Return how long traffic delays a forward, a backward, and a backward without its gradient sums."""
        forward, backward, split = self._exposed_traffic()
        if self.policy.updates_per_step > 1:
            traffic = self._up_to_the_update()
            backward = _Exposed(traffic, traffic * np.maximum(0.0, 1.0 - self._buffers / self.costs.layers))
        return forward, backward, split

    @cached_property
    def _pace(self) -> _Pace:
        costs, (forward, backward, _) = self.costs, self._exposed
        whole = costs.input_half + costs.weight_half(apart=self.apart) + costs.whole_again
        whole += forward.whole + backward.whole
        return _Pace(costs.by_rank(costs.whole_forward + whole), self._by_chunk(whole))

    def _terms(self) -> Iterator[Term]:
        costs, splits, pace = self.costs, self.run.splits, self._pace
        (forward_traffic, late_forward), (backward_traffic, late_backward), split = self._exposed
        busiest = int(pace.work.argmax())
        work = float(pace.work[busiest])
        hops = np.array(hop_seconds(self.run, self.assumptions))
        # A weight half, after which gradients are summed, blocks no other rank.
        late = split.late if splits else late_backward
        early = np.minimum(split.whole - split.late, backward_traffic - late)
        after = backward_traffic - early - late
        within = after if splits else np.zeros_like(after)
        rerun = costs.whole_again * self._between_backwards()
        bubble, messages, left = waiting_of(
            self.run.config.schedule.name,
            schedule_options(self.run.config),
            OrderCosts(
                (forward_traffic - late_forward)[None],
                (costs.whole_forward + late_forward)[None],
                (costs.whole_again - rerun + early)[None],
                (costs.input_half + costs.weight_half(apart=0.0) + late + rerun + within)[None],
                (costs.input_half + late + rerun)[None],
                (costs.weight_half(apart=1.0) + within)[None],
                *self._links(hops),
                None if splits else after[None],
            ),
            self.count,
            work,
            self._sums_left(pace, 0.0) if self.flushes else np.zeros(self.run.pipeline),
        )
        yield from work_terms(costs, busiest, self.count, self.apart, "recomputed forwards")
        exposed = float(costs.by_rank(forward_traffic + backward_traffic)[busiest]) * self.count
        yield Term(
            "data", exposed, "sharded weights and gradients of every micro-batch, overlapping with compute (ZeRO)"
        )
        yield Term("bubble", bubble, "walk of the schedule's order: waiting for other ranks' compute")
        before = self.count * work + bubble + messages
        if self.assumptions.waits_for_sends and self.run.pipeline > 1:
            # Each chunk receives and sends in forward and backward; a send overlaps with the receive of the same kind.
            messages += 2 * self.run.chunks * float(hops.sum(axis=1).max()) * self.count
        yield Term("pipeline", messages, "messages that a stage waits for: latency + bytes / bandwidth")
        # Without a flush, sums count on the rank that finishes last.
        sums = left if self.flushes else max(0.0, float(self._sums_left(pace, before).max()))
        yield from self._at_the_end(pace, before, sums)

    def _links(self, hops: Floats) -> tuple[Floats, Floats]:
        """Return latencies and transfers for `OrderCosts`. hops: both times of a message to the next rank, by rank."""
        size = self.run.pipeline
        ranks, times = np.arange(size), np.zeros((2, size, size))
        following = (ranks + 1) % size
        times[:, following, ranks] = hops.T
        times[:, ranks, following] = hops.T
        return times[0][None], times[1][None]

    def _exposed_traffic(self) -> tuple[_Exposed, _Exposed, _Exposed]:
        """Return how long traffic delays a forward, a backward, and a backward without its gradient sums.

        While a unit computes, the weights of the next unit in the pass are gathered, and the gradients of the previous
        one are summed. If this traffic takes longer than the unit's compute, the unit waits for it.
        """
        units = self.costs.units
        if units is None:
            nothing = _Exposed(*np.zeros((2, len(self.costs.ranks))))
            return nothing, nothing, nothing
        sizes = self.costs.layers
        ends = np.cumsum(sizes)
        starts = ends - sizes
        index = np.arange(ends[-1])
        following, preceding = index + 1, index - 1
        following[ends - 1], preceding[starts] = starts, ends - 1
        # The traffic of the remaining units happens earlier or later, while other stages compute.
        late = (following - np.repeat(starts, sizes) >= self._buffers) & (following > index)

        def exposed(compute: Floats, traffic: Floats) -> _Exposed:
            added = overlapped(compute, traffic, self.assumptions.slow_down) - compute
            whole = np.add.reduceat(added, starts)
            return _Exposed(whole, np.add.reduceat(added * late, starts))

        gathers = units.sharded_gather * np.repeat(self.traffic.gathers, sizes) / 2
        backward = units.whole_again + units.input_half + units.weight_half(apart=np.repeat(self.apart, sizes))
        sums = units.sharded_reduction * np.repeat(self.traffic.sums, sizes)
        whole = exposed(backward, gathers[preceding] + sums[following])
        return exposed(units.whole_forward, gathers[following]), whole, exposed(backward, gathers[preceding])

    @cached_property
    def _buffers(self) -> int:
        """Return the number of units whose sharded weights and gradients a stage holds whole."""
        zero = self.run.config.zero
        return zero.gradient_buffers if zero.stage < 3 else min(zero.weight_buffers, zero.gradient_buffers)

    def _up_to_the_update(self) -> Floats:
        """Return for each stage how long an update after every micro-batch waits for traffic that its backward does
        not hide. A unit's sum starts when its gradient is complete, so the last sum is always exposed. While the first
        gradient is computed, the next unit's weights are gathered."""
        costs = self.costs
        backward = costs.whole_again + costs.input_half + costs.weight_half(apart=self.apart)
        gathers = costs.sharded_gather * self.traffic.gathers / 2
        before = np.maximum(0.0, backward * costs.first_backward - gathers / costs.layers)
        traffic, last = gathers + costs.reduction, costs.last_reduction
        stages = zip(backward, traffic, before, last, strict=True)
        slow = self.assumptions.slow_down
        return np.array([exposed_seconds(*values, slow_down=slow) for values in stages])

    def _between_backwards(self) -> Floats:
        """Return for each stage the fraction of recomputation that runs between the backwards of a micro-batch. The
        part that the first backward needs is excluded, because it may be ready before the gradient arrives."""
        fractions = np.zeros(len(self.costs.ranks))
        for stage, spans in enumerate(self.run.recomputed):
            units = sum(len(span) for span in spans)
            first = len(spans[-1]) if spans and spans[-1].stop == self.run.stages.units_per_stage[stage] else 0
            fractions[stage] = 1.0 - first / units if units else 0.0
        return fractions

    def _by_chunk(self, values: npt.NDArray[Entry]) -> npt.NDArray[Entry]:
        """Return values of stages with shape [chunks, ranks]; the chunks of a rank are in the order of its stages."""
        return values[self.run.by_chunk].T

    def _at_the_end(self, pace: _Pace, before: float, sums: float) -> Iterator[Term]:
        """Yield the terms after the last backward. before: seconds up to it. sums: seconds of sums after it."""
        sums = max(sums, self._streamed() - before)
        yield Term("data", sums, "gradient reduction that overlaps with backwards, arXiv 2211.13878")
        tied = tied_seconds(self.run) - sums - self._slack(before)[0]
        yield Term(
            "tied", max(0.0, tied), "reduction of tied gradients over their stages, alongside the other reductions"
        )
        if self.flushes:
            yield Term("scalars", scalar_seconds(self.run), "counts and norms over all ranks")
        yield Term("update", self._update(pace), "bytes of the optimizer state / memory bandwidth")
        yield Term("data", self._gathers(), "gathers of updated weights (ZeRO 1 and 2)")

    def _update(self, pace: _Pace) -> float:
        """Return the seconds of the slowest rank's update; without a flush, updates are part of each rank's work."""
        if self.flushes:
            return float(self.costs.by_rank(self.costs.update).max())
        updates = self._of_update
        work = pace.work * self.count
        return float((work + updates * self.policy.updates_per_step).max() - work.max())

    @cached_property
    def _of_update(self) -> Floats:
        """Return for each rank the seconds of an update without a flush and of the gathers that follow it."""
        return self.costs.by_rank(self.costs.update + self.costs.gather_after)

    def _streamed(self) -> float:
        """Return the total seconds of gathers and sums in a step on the rank with the most; 0 if no limit applies.

        One stream runs them one after another, so a step with a flush cannot end before them. The other terms do not
        show this limit: they look at single micro-batches and at the end of the step.
        """
        if not self.flushes or self.run.config.zero.stage < 2:
            return 0.0
        counts = self.traffic
        costs = self.costs
        per_microbatch = costs.sharded_gather * counts.all_gathers + costs.sharded_reduction * counts.all_sums
        once = costs.reduction - costs.sharded_reduction
        return float(costs.by_rank(per_microbatch * self.count + once).max())

    def _sums_left(self, pace: _Pace, before: float) -> Floats:
        """Return for each rank the seconds that gradient sums add after its last backward, and by how much they slow
        down compute.

        Chunks run from the last to the first. The sums of a chunk start unit by unit in the backward of its last
        micro-batch, and the remaining ones overlap with the backwards of the next chunk.
        """
        if self.policy.updates_per_step > 1:
            return np.zeros(self.run.pipeline)
        backward, traffic = pace.backward, self._by_chunk(self.costs.reduction)
        overlap = backward * (1 - self._by_chunk(self.costs.first_backward))
        # Sums of every micro-batch run in the background of its backward. What remains are the last layer's sum and
        # the sums of units whose gradients are not sharded.
        steady = self.traffic.sums > 0
        last = self._by_chunk(self.costs.last_reduction + np.where(steady, 0.0, self.costs.still_reducing))
        once = self._by_chunk(self.costs.reduction - self.costs.sharded_reduction)
        traffic = np.where(self._by_chunk(steady), np.maximum(last, once), traffic)
        passes = min(self.run.pipeline, self.count) if self.generator.repeats else self.count
        left = hidden = np.zeros(self.run.pipeline)
        for chunk in reversed(range(self.run.chunks)):
            passed = backward[chunk] * (passes - 1) if chunk < self.run.chunks - 1 else 0.0
            waiting = np.maximum(0.0, left - passed)
            remaining = np.maximum(last[chunk], waiting + traffic[chunk] - overlap[chunk])
            if chunk == 0:
                remaining = np.maximum(0.0, remaining - self._slack(before))
            hidden = hidden + left + traffic[chunk] - remaining
            left = remaining
        return np.asarray(left + (self.assumptions.slow_down - 1) * np.maximum(0.0, hidden))

    def _slack(self, before: float) -> Floats:
        """Return for each rank the seconds from a batch's last backward to the first forward that needs its update.

        Without a flush, a delayed update waits for all micro-batches of the next batch that have not started yet; each
        takes the step's average time. before: seconds of the step up to the last backward.
        """
        if self.flushes or self.policy.gradient_buffers == 1:
            return np.zeros(self.run.pipeline)
        pairs = self.count - self.run.pipeline + 1 + np.arange(self.run.pipeline)
        slack = np.asarray(pairs * (before / self.count), dtype=np.float64)
        # The last rank ends its batch before the update of the previous batch.
        slack[-1] += self._of_update[-1]
        return slack

    def _gathers(self) -> float:
        """Return the seconds to gather weights, which updates leave in shards, before the next forward."""
        totals = self.costs.by_rank(self.costs.gather_after)
        if not totals.any() or not self.flushes:
            return 0.0
        if not self.assumptions.gathers_beside_forward:
            return float(totals.max())
        forwards = self.costs.by_rank(self.costs.whole_forward)
        sizes = np.array([forwards, totals, forwards / self.units, totals / self.units])
        slow = self.assumptions.slow_down
        return max(exposed_seconds(*each, slow_down=slow) for each in sizes.T.tolist())
