"""The terms of an estimated step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.layout.scheduling import schedule_options
from megapipe.planner.cost.assumptions import Assumptions
from megapipe.planner.cost.estimate import Term
from megapipe.planner.cost.pipeline_time import waiting_of
from megapipe.planner.cost.replicas import Beside, scalar_seconds, side_by_side, tied_seconds
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.planner.cost.stages import StageCosts
from megapipe.planner.cost.traffic_counts import TrafficCounts, traffic_counts
from megapipe.schedules.generators.registry import find_generator
from megapipe.schedules.simulation.order_times import OrderCosts

Floats = npt.NDArray[np.float64]


def step_terms(run: RunLayout, costs: StageCosts, assumptions: Assumptions, source: str) -> tuple[Term, ...]:
    """All that a step's time is made of. source: of the kernels' times."""
    found = _Step(run, costs, assumptions, source).terms()
    return tuple(replace(term, seconds=float(term.seconds)) for term in found if term.seconds)


def hop_seconds(run: RunLayout, assumptions: Assumptions) -> list[tuple[float, float]]:
    """Latency and transfer of a message from each pipeline rank to the next, the last one's to the first."""
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
        """A sharded weight's and gradient's traffic of every micro-batch runs beside its compute."""
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
        """Latencies and transfers as `OrderCosts` has them. hops: by rank, both of a message to the next rank."""
        size = self.run.pipeline
        ranks, found = np.arange(size), np.zeros((2, size, size))
        following = (ranks + 1) % size
        found[:, following, ranks] = hops.T
        found[:, ranks, following] = hops.T
        return found[0][None], found[1][None]

    def _up_to_the_update(self, backward: Floats, traffic: Floats) -> Floats:
        """By stage, what an update behind every micro-batch waits for sums that its backward did not hide: each unit's
        starts when its gradient is there, so that the last one's always is left."""
        each = zip(backward, traffic, self.costs.layers, strict=True)
        return np.array(
            [Beside(work, talk, int(units)).exposed(self.assumptions.slow_down) for work, talk, units in each]
        )

    def _between_backwards(self) -> Floats:
        """By stage, the share of what runs again that does so between backwards of its micro-batch: all but what the
        first of them needs, which may be there before the gradient arrives."""
        found = np.zeros(len(self.costs.ranks))
        for stage, spans in enumerate(self.run.recomputed):
            units = sum(len(span) for span in spans)
            first = len(spans[-1]) if spans and spans[-1].stop == self.run.stages.units_per_stage[stage] else 0
            found[stage] = 1.0 - first / units if units else 0.0
        return found

    def _without_buffer(self) -> Floats:
        """By stage, the share of a stage's sharded weights and gradients that has no buffer while its
        micro-batch passes: that of the others is over before, or goes on behind, while other stages compute."""
        zero = self.run.config.zero
        buffers = zero.gradient_buffers if zero.stage < 3 else min(zero.weight_buffers, zero.gradient_buffers)
        found: Floats = np.maximum(0.0, 1.0 - buffers / self.costs.layers)
        return found

    def _by_chunk(self, values: Floats) -> Floats:
        """From stages to [chunks, ranks], the chunks of a rank in the order of its stages."""
        order = np.argsort(self.costs.ranks, kind="stable")
        return values[order].reshape(self.run.pipeline, self.run.chunks).T

    def _of_rank(self, rank: int) -> Iterator[Term]:
        costs = self.costs

        def once(values: Floats) -> float:
            return float(costs.by_rank(values)[rank]) * self.count

        yield Term("compute", once(costs.forward + costs.backward_input + costs.backward_weight), self.source)
        yield Term("recompute", once(costs.recompute + costs.made_again), f"recomputed forwards: {self.source}")
        apart = self.splits
        tensor = costs.tensor + (costs.tensor_weight if apart else 0.0)
        context = costs.context + (costs.context_weight if apart else 0.0)
        yield Term("tensor", once(tensor), costs.tensor_source)
        yield Term("context", once(context), costs.context_source)

    def _steady_traffic(self) -> tuple[Floats, Floats]:
        """By stage, what replicas exchange with every micro-batch: gathers ahead of either pass, sums of gradients."""
        counts = self.traffic
        sums = counts.sums if self.policy.updates_per_step == 1 else np.ones(len(counts.sums))
        return self.costs.gather * counts.gathers / 2, self.costs.reduction * sums

    def _at_the_end(self, pace: _Pace, before: float) -> Iterator[Term]:
        """before: seconds up to the last backward."""
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
        """Of the slowest rank; without a flush each rank's is a part of its own work."""
        if self.flushes:
            return float(self.costs.by_rank(self.costs.update).max())
        updates = self._of_update
        work = pace.work * self.count
        return float((work + updates * self.policy.updates_per_step).max() - work.max())

    @cached_property
    def _of_update(self) -> Floats:
        """Seconds by rank of an update without a flush, and of the gathers of what it leaves in shards."""
        gathered = self.costs.gather if self.run.gathers_after_update else 0.0
        return self.costs.by_rank(self.costs.update + gathered)

    def _reductions(self, pace: _Pace, before: float) -> float:
        """What sums of gradients add behind the last backward, of the rank that ends last."""
        if self.policy.updates_per_step > 1 or not self.costs.reduction.any():
            return 0.0
        earlier = np.concatenate([[0.0], np.cumsum(pace.backward.mean(axis=0))[:-1]])
        spare = earlier if self.flushes else np.zeros(self.run.pipeline)
        return max(0.0, float((self._sums_left(pace, before) - spare).max()))

    def _streamed(self) -> float:
        """Seconds that the busiest rank's stream of gathers and sums takes for a step, one behind the other, where
        each stage has both: no step that empties the pipeline ends before.

        What of it hides behind one micro-batch, or is left at the end, knows nothing of the rest: a stream with little
        compute beside it is busy all along.
        """
        if not self.flushes or self.run.config.zero.stage < 2:
            return 0.0
        counts = self.traffic
        each = self.costs.gather * counts.all_gathers + self.costs.reduction * counts.all_sums
        return float(self.costs.by_rank(each).max()) * self.count

    def _sums_left(self, pace: _Pace, before: float) -> Floats:
        """By rank, what its sums add behind its own last backward, and how much they slow the compute beside them.

        Chunk by chunk, the last one first: the sums of a chunk start unit by unit in its last micro-batch's backward,
        and what is left of them goes on beside the backwards of the next chunk.
        """
        backward, traffic = pace.backward, self._by_chunk(self.costs.reduction)
        units = np.maximum(1.0, self._by_chunk(self.costs.layers.astype(np.float64)))
        # Sums of every micro-batch run beside its backward: the last unit's alone is left.
        last = traffic / units
        traffic = np.where(self._by_chunk(self.traffic.sums) > 0, last, traffic)
        passes = min(self.run.pipeline, self.count) if self.generator.repeats else self.count
        left = hidden = np.zeros(self.run.pipeline)
        for chunk in reversed(range(self.run.chunks)):
            passed = backward[chunk] * (passes - 1) if chunk < self.run.chunks - 1 else 0.0
            waiting = np.maximum(0.0, left - passed)
            behind = np.maximum(last[chunk], waiting + traffic[chunk] - backward[chunk] * (1 - 1 / units[chunk]))
            if chunk == 0:
                behind = np.maximum(0.0, behind - self._slack(before))
            hidden = hidden + left + traffic[chunk] - behind
            left = behind
        return np.asarray(left + (self.assumptions.slow_down - 1) * np.maximum(0.0, hidden))

    def _slack(self, before: float) -> Floats:
        """Seconds by rank from a batch's last backward to the first forward that needs its update.

        Without a flush a lazy update waits for all micro-batches of the next batch that are not under way yet, at the
        pace of the step. before: its seconds up to the last backward.
        """
        if self.flushes or self.policy.gradient_buffers == 1:
            return np.zeros(self.run.pipeline)
        pairs = self.count - self.run.pipeline + 1 + np.arange(self.run.pipeline)
        found = np.asarray(pairs * (before / self.count), dtype=np.float64)
        # The last rank ends its batch ahead of the update of the batch before.
        found[-1] += self._of_update[-1]
        return found

    def _gathers(self) -> float:
        """Weights that updates left in shards are whole again before the next forward."""
        if not self.run.gathers_after_update or not self.flushes:
            return 0.0
        totals = self.costs.by_rank(self.costs.gather)
        if not self.assumptions.gathers_beside_forward:
            return float(totals.max())
        forward = self.costs.by_rank(self.costs.whole_forward)
        return max(
            Beside(float(forward[rank]), float(total), int(self.units[rank])).exposed(self.assumptions.slow_down)
            for rank, total in enumerate(totals)
        )
