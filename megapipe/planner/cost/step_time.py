"""The terms of an estimated step, and how long its micro-batches take by a walk of the schedule's order."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.layout.order_walk import Order, ShardedRanks, few_ranks
from megapipe.layout.scheduling import schedule_options
from megapipe.planner.cost.estimate import Assumptions, Term
from megapipe.planner.cost.layer_costs import Beside, StageCosts, scalar_seconds, side_by_side, tied_seconds
from megapipe.planner.cost.memory import cut_of, sharding_of
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.schedules import Options
from megapipe.schedules.build import order
from megapipe.schedules.registry import find_generator
from megapipe.schedules.simulation.order_times import OrderCosts, OrderGraph

Floats = npt.NDArray[np.float64]
STEPS = 4
"""Optimizer steps that are walked or simulated of a schedule without a flush; half of them fill the pipeline."""
WALKED_PERIODS = (9, 36)
"""Numbers of periods of an order that are walked first: if all clocks repeat, the remaining periods repeat them."""


class Waiting(NamedTuple):
    """Seconds of a step in which the busiest rank waits for other ranks' compute, and for their messages."""

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


def step_seconds(
    name: str, options: Options, costs: OrderCosts, num_microbatches: int, after: Floats | None = None
) -> Floats:
    """Return the seconds of a step up to its last backward, for each layout; without a flush those of a later step.

    Long steps are not walked in full where a shorter one shows that all clocks repeat (`OrderGraph.slope`): what the
    micro-batches between add is then exact. after: as of `OrderGraph.finish`; other arguments as of `waiting_of`.
    """
    ranks = costs.latency.shape[-1]
    generator = find_generator(name)
    options, period = generator.settled(ranks, num_microbatches, options)
    key = name, tuple(sorted(options.items())), ranks
    for periods in WALKED_PERIODS:
        shown = num_microbatches - (num_microbatches // period - periods) * period
        if 3 * shown > 2 * num_microbatches:
            break
        (graph, *others) = _graphs(*key, shown)
        if others:
            break
        ends = graph.ends(costs)
        slope = graph.slope(ends, period)
        if slope is not None:
            found: Floats = graph.finish(ends, after) + (num_microbatches - shown) // period * slope
            return found
    finishes: list[Floats] = [graph.finish(graph.ends(costs), after) for graph in _graphs(*key, num_microbatches)]
    return finishes[0] if len(finishes) == 1 else (finishes[1] - finishes[0]) / (STEPS - STEPS // 2)


@lru_cache(maxsize=64)
def _graphs(name: str, options: tuple[tuple[str, object], ...], ranks: int, count: int) -> tuple[OrderGraph, ...]:
    """Return the graph of a step, or without a flush those of `STEPS` / 2 and of `STEPS` steps."""
    schedule = order(name, ranks, count, **dict(options))  # type: ignore[arg-type]
    return tuple(OrderGraph(schedule, steps) for steps in ((1,) if schedule.flushes else (STEPS // 2, STEPS)))


PERIODS = 3
"""Periods of an order, the last of which counts for all that follow."""


class TrafficCounts(NamedTuple):
    """By stage, per micro-batch: gathers of all its weights, for forward and backward together, and sums of all its
    gradients. gathers, sums: nothing of what stays in its buffer from the first micro-batch of a step to the last;
    all_gathers, all_sums: that too."""

    gathers: Floats
    sums: Floats
    all_gathers: Floats
    all_sums: Floats


def traffic_counts(run: RunLayout) -> TrafficCounts:
    """Return those of a run; zeros where state is not sharded that far."""
    zero, count = run.config.zero, run.num_microbatches
    if zero.stage < 2 or run.costs.of_units.shards == 1:
        return TrafficCounts(*np.zeros((4, len(run.ranks))))
    units = np.array(run.stages.units_per_stage)
    cut = cut_of(run)
    asked, (of_weights, of_gradients) = Order.of(run.config, count), sharding_of(run, cut)
    sums = _counted(asked, of_gradients, "sums")
    gathers = np.zeros_like(sums) if of_weights is None else _counted(asked, of_weights, "gathers")
    gathers, sums = (each[cut.like_few_stages] / units / count for each in (gathers, sums))
    once = 1.0 / count * (1 + 1e-9)
    steady = np.where((sums > once) | ((count == 1) & (units > zero.gradient_buffers)), sums, 0.0)
    return TrafficCounts(np.where(gathers > once, gathers, 0.0), steady, gathers, sums)


@lru_cache(maxsize=1024)
def _counted(asked: Order, sharding: ShardedRanks, part: Literal["gathers", "sums"]) -> Floats:
    """Return the gathers or sums of each stage of a few ranks in a step."""
    short, period = asked.short(PERIODS)
    found: Floats = getattr(few_ranks(short, sharding), part)
    left = asked.num_microbatches - short.num_microbatches
    if left:
        fewer = short._replace(num_microbatches=short.num_microbatches - period)
        found = found + (found - getattr(few_ranks(fewer, sharding), part)) * (left // period)
    return found


def step_terms(run: RunLayout, costs: StageCosts, assumptions: Assumptions, source: str) -> tuple[Term, ...]:
    """Return the terms of a step's time, without those of 0 seconds.

    costs: of the stages. assumptions: with the machine's slow-down filled in. source: of the kernels' times.
    """
    found = _Step(run, costs, assumptions, source).terms()
    return tuple(replace(term, seconds=float(term.seconds)) for term in found if term.seconds)


def hop_seconds(run: RunLayout, assumptions: Assumptions) -> list[tuple[float, float]]:
    """Return latency and transfer of a message from each pipeline rank to the next, and from the last to the first.

    Scattered sends include the gather that puts the pieces of a message together again.
    """
    message, tensor = run.costs.stream, run.costs.tensor
    if run.pipeline == 1:
        return [(0.0, 0.0)]
    if not assumptions.scattered_sends or tensor == 1 or run.config.parallel.sequence:
        times = [run.placement.send(message, stage) for stage in range(run.pipeline)]
        return [(time.latency, time.transfer) for time in times]
    gathered = run.placement.slowest("all_gather", message, "tensor").seconds
    times = [run.placement.send(message / tensor, stage) for stage in range(run.pipeline)]
    return [(time.latency + gathered, time.transfer) for time in times]


class _Pace(NamedTuple):
    """Seconds of a micro-batch: on each rank, shape [ranks], and of its backwards by chunk, shape [chunks, ranks]."""

    work: Floats
    backward: Floats


class _Step:
    def __init__(self, run: RunLayout, costs: StageCosts, assumptions: Assumptions, source: str) -> None:
        self.run, self.costs, self.assumptions, self.source = run, costs, assumptions, source
        config = run.config
        self.generator = find_generator(config.schedule.name)
        self.options = schedule_options(config)
        self.policy = self.generator.policy_of(run.pipeline, run.num_microbatches, self.options)
        self.splits = self.generator.splits or config.schedule.two_bp
        self.flushes = self.policy.flushes
        self.count = run.num_microbatches
        self.units = np.bincount(costs.ranks, costs.layers)

    @cached_property
    def traffic(self) -> TrafficCounts:
        return traffic_counts(self.run)

    def terms(self) -> Iterator[Term]:
        """Yield all terms. Traffic of sharded weights and gradients of a micro-batch overlaps with its compute."""
        costs, slow, splits = self.costs, self.assumptions.slow_down, self.splits
        backward = costs.input_half + costs.weight_half(apart=splits)
        gathers, sums = self._steady_traffic()
        whole = costs.whole_again + backward
        forward_traffic = side_by_side(costs.whole_forward, gathers, slow) - costs.whole_forward
        backward_traffic = side_by_side(whole, gathers + sums, slow) - whole
        if self.policy.updates_per_step > 1:
            backward_traffic = self._up_to_the_update(whole, gathers + sums)
        pace = _Pace(
            costs.by_rank(costs.whole_forward + forward_traffic + backward + costs.whole_again + backward_traffic),
            self._by_chunk(backward + costs.whole_again + forward_traffic + backward_traffic),
        )
        busiest = int(pace.work.argmax())
        work = float(pace.work[busiest])
        hops = np.array(hop_seconds(self.run, self.assumptions))
        # A weight half, after which gradients are summed, blocks no other rank.
        blocking = side_by_side(whole, gathers, slow) - whole if splits else backward_traffic
        without, between = self._without_buffer(), costs.whole_again * self._between_backwards()
        late_forward, late_backward = forward_traffic * without, blocking * without + between
        apart, after = costs.weight_half(apart=splits), backward_traffic - blocking
        waiting = waiting_of(
            self.run.config.schedule.name,
            self.options,
            OrderCosts(
                (forward_traffic - late_forward)[None],
                (costs.whole_forward + late_forward)[None],
                (costs.whole_again + blocking - late_backward)[None],
                (costs.input_half + apart + late_backward)[None],
                (costs.input_half + late_backward)[None],
                (apart + after)[None],
                *self._links(hops),
            ),
            self.count,
            work,
        )
        yield from self._of_rank(busiest)
        exposed = float(costs.by_rank(forward_traffic + backward_traffic)[busiest]) * self.count
        yield Term(
            "data", exposed, "sharded weights and gradients of every micro-batch, overlapping with compute (ZeRO)"
        )
        yield Term("bubble", waiting.bubble, "walk of the schedule's order: waiting for other ranks' compute")
        messages = waiting.messages
        before = self.count * work + waiting.bubble + messages
        if self.assumptions.waits_for_sends and self.run.pipeline > 1:
            # Each chunk receives and sends, forward and backward; a send and the receive of its like are one.
            messages += 2 * self.run.chunks * float(hops.sum(axis=1).max()) * self.count
        yield Term("pipeline", messages, "messages that a stage waits for: latency + bytes / bandwidth")
        yield from self._at_the_end(pace, before)

    def _links(self, hops: Floats) -> tuple[Floats, Floats]:
        """Return latencies and transfers for `OrderCosts`. hops: by rank, both of a message to the next rank."""
        size = self.run.pipeline
        ranks, found = np.arange(size), np.zeros((2, size, size))
        following = (ranks + 1) % size
        found[:, following, ranks] = hops.T
        found[:, ranks, following] = hops.T
        return found[0][None], found[1][None]

    def _up_to_the_update(self, backward: Floats, traffic: Floats) -> Floats:
        """Return by stage how long an update after every micro-batch waits for sums that its backward did not hide. A
        unit's sum starts when its gradient is there, so the last one is always exposed."""
        before = backward * self.costs.first_backward
        each = zip(backward, traffic, before, self.costs.last_reduction, strict=True)
        return np.array([Beside(*values).exposed(self.assumptions.slow_down) for values in each])

    def _between_backwards(self) -> Floats:
        """Return by stage the share of recomputation between backwards of a micro-batch: all but the part that the
        first backward needs, which may be ready before the gradient arrives."""
        found = np.zeros(len(self.costs.ranks))
        for stage, spans in enumerate(self.run.recomputed):
            units = sum(len(span) for span in spans)
            first = len(spans[-1]) if spans and spans[-1].stop == self.run.stages.units_per_stage[stage] else 0
            found[stage] = 1.0 - first / units if units else 0.0
        return found

    def _without_buffer(self) -> Floats:
        """Return by stage the share of sharded weights and gradients that has no buffer while a micro-batch passes.
        The traffic of the others happens earlier or later, while other stages compute."""
        zero = self.run.config.zero
        buffers = zero.gradient_buffers if zero.stage < 3 else min(zero.weight_buffers, zero.gradient_buffers)
        found: Floats = np.maximum(0.0, 1.0 - buffers / self.costs.layers)
        return found

    def _by_chunk(self, values: Floats) -> Floats:
        """Return values of stages as [chunks, ranks], the chunks of a rank in the order of its stages."""
        order = np.argsort(self.costs.ranks, kind="stable")
        return values[order].reshape(self.run.pipeline, self.run.chunks).T

    def _of_rank(self, rank: int) -> Iterator[Term]:
        costs = self.costs

        def once(values: Floats) -> float:
            return float(costs.by_rank(values)[rank]) * self.count

        yield Term("compute", once(costs.forward + costs.backward_input + costs.backward_weight), self.source)
        yield Term("recompute", once(costs.recompute + costs.made_again), f"recomputed forwards: {self.source}")
        yield Term("tensor", once(costs.tensor.microbatch(apart=self.splits)), costs.tensor.source)
        yield Term("context", once(costs.context.microbatch(apart=self.splits)), costs.context.source)

    def _steady_traffic(self) -> tuple[Floats, Floats]:
        """Return by stage the exchanges of replicas in a micro-batch: gathers before each pass, sums of gradients."""
        counts = self.traffic
        sums = counts.sums if self.policy.updates_per_step == 1 else np.ones(len(counts.sums))
        reduction = self.costs.sharded_reduction if self.policy.updates_per_step == 1 else self.costs.reduction
        return self.costs.sharded_gather * counts.gathers / 2, reduction * sums

    def _at_the_end(self, pace: _Pace, before: float) -> Iterator[Term]:
        """Yield the terms after the last backward. before: seconds up to it."""
        sums = max(self._reductions(pace, before), self._streamed() - before)
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
        """Return the update of the slowest rank; without a flush, each rank's update is a part of its own work."""
        if self.flushes:
            return float(self.costs.by_rank(self.costs.update).max())
        updates = self._of_update
        work = pace.work * self.count
        return float((work + updates * self.policy.updates_per_step).max() - work.max())

    @cached_property
    def _of_update(self) -> Floats:
        """Return by rank the seconds of an update without a flush and of the gathers that follow it."""
        return self.costs.by_rank(self.costs.update + self.costs.gather_after)

    def _reductions(self, pace: _Pace, before: float) -> float:
        """Return the seconds that sums of gradients add after the last backward, on the rank that ends last."""
        if self.policy.updates_per_step > 1 or not self.costs.reduction.any():
            return 0.0
        earlier = np.concatenate([[0.0], np.cumsum(pace.backward.mean(axis=0))[:-1]])
        spare = earlier if self.flushes else np.zeros(self.run.pipeline)
        return max(0.0, float((self._sums_left(pace, before) - spare).max()))

    def _streamed(self) -> float:
        """Return the seconds of the busiest rank's stream of gathers and sums in a step, one after another, if each
        stage has both: no step that empties the pipeline ends earlier.

        The terms of single micro-batches and of the end do not see a stream that little compute keeps always busy.
        """
        if not self.flushes or self.run.config.zero.stage < 2:
            return 0.0
        counts = self.traffic
        costs = self.costs
        each = costs.sharded_gather * counts.all_gathers + costs.sharded_reduction * counts.all_sums
        once = costs.reduction - costs.sharded_reduction
        return float(costs.by_rank(each * self.count + once).max())

    def _sums_left(self, pace: _Pace, before: float) -> Floats:
        """Return by rank the seconds that its sums add after its last backward, and their slow-down of compute.

        Chunk by chunk, the last one first: the sums of a chunk start unit by unit in its last micro-batch's backward,
        and the remaining ones overlap with the backwards of the next chunk.
        """
        backward, traffic = pace.backward, self._by_chunk(self.costs.reduction)
        overlap = backward * (1 - self._by_chunk(self.costs.first_backward))
        # Sums of every micro-batch run in the background of its backward: the last layer's is left, and those of units
        # whose gradients are whole.
        last = self._by_chunk(self.costs.last_reduction)
        once = self._by_chunk(self.costs.reduction - self.costs.sharded_reduction)
        traffic = np.where(self._by_chunk(self.traffic.sums) > 0, np.maximum(last, once), traffic)
        passes = min(self.run.pipeline, self.count) if self.generator.repeats else self.count
        left = hidden = np.zeros(self.run.pipeline)
        for chunk in reversed(range(self.run.chunks)):
            passed = backward[chunk] * (passes - 1) if chunk < self.run.chunks - 1 else 0.0
            waiting = np.maximum(0.0, left - passed)
            behind = np.maximum(last[chunk], waiting + traffic[chunk] - overlap[chunk])
            if chunk == 0:
                behind = np.maximum(0.0, behind - self._slack(before))
            hidden = hidden + left + traffic[chunk] - behind
            left = behind
        return np.asarray(left + (self.assumptions.slow_down - 1) * np.maximum(0.0, hidden))

    def _slack(self, before: float) -> Floats:
        """Return the seconds by rank from a batch's last backward to the first forward that needs its update.

        Without a flush a lazy update waits for all micro-batches of the next batch that are not under way yet, at the
        pace of the step. before: its seconds up to the last backward.
        """
        if self.flushes or self.policy.gradient_buffers == 1:
            return np.zeros(self.run.pipeline)
        pairs = self.count - self.run.pipeline + 1 + np.arange(self.run.pipeline)
        found = np.asarray(pairs * (before / self.count), dtype=np.float64)
        # The last rank ends its batch before the update of the previous batch.
        found[-1] += self._of_update[-1]
        return found

    def _gathers(self) -> float:
        """Return the seconds in which weights that updates left in shards are gathered before the next forward."""
        totals = self.costs.by_rank(self.costs.gather_after)
        if not totals.any() or not self.flushes:
            return 0.0
        if not self.assumptions.gathers_beside_forward:
            return float(totals.max())
        each = zip(self.costs.by_rank(self.costs.whole_forward), totals, self.units, strict=True)
        return max(
            Beside(float(forward), float(total), float(forward / units), float(total / units)).exposed(
                self.assumptions.slow_down
            )
            for forward, total, units in each
        )
