"""The terms of a step in closed form."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megapipe.planner.cost.assumptions import Assumptions
from megapipe.planner.cost.estimate import Term
from megapipe.planner.cost.pipeline_time import Pipeline, PipelineTime, pipeline_time
from megapipe.planner.cost.replicas import Beside, scalar_seconds, steady_with_traffic, tied_seconds
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.planner.cost.stages import StageCosts
from megapipe.planner.runs.scheduling import schedule_options
from megapipe.schedules.generators.registry import find_generator

Floats = npt.NDArray[np.float64]


def step_terms(run: RunLayout, costs: StageCosts, assumptions: Assumptions, source: str) -> tuple[Term, ...]:
    """All that a step's time is made of. source: of the kernels' times."""
    return tuple(term for term in _Step(run, costs, assumptions, source).terms() if term.seconds)


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


class _Step:
    def __init__(self, run: RunLayout, costs: StageCosts, assumptions: Assumptions, source: str) -> None:
        self.run, self.costs, self.assumptions, self.source = run, costs, assumptions, source
        config = run.config
        self.generator = find_generator(config.schedule.name)
        options = schedule_options(config)
        arguments = self.generator.arguments(self.generator.policy_options, options)
        self.policy = self.generator.policy(run.pipeline, run.num_microbatches, **arguments)
        self.splits = self.generator.splits or config.schedule.two_bp
        self.flushes = max(self.policy.versions_by_rank) == 1 and self.policy.updates_per_step == 1
        self.count = run.num_microbatches
        self.units = np.bincount(costs.ranks, costs.layers)

    def terms(self) -> Iterator[Term]:
        costs, rank = self.costs, self.costs.by_rank
        forward, again = rank(costs.whole_forward), rank(costs.whole_again)
        input_half, weight_half = rank(costs.input_half), rank(costs.weight_half(apart=self.splits))
        backward = again + input_half + weight_half
        slow, traffic = self.assumptions.slow_down, self._steady_traffic()
        with_forward = steady_with_traffic(forward, traffic[0], slow)
        with_backward = steady_with_traffic(backward, traffic[1], slow)
        hops = np.array([sum(each) for each in hop_seconds(self.run, self.assumptions)])
        pipeline = Pipeline(with_forward, with_backward, again + input_half, weight_half, self.run.chunks, hops)
        time = pipeline_time(self.run.config.schedule.name, pipeline, self.count)
        busiest = int(pipeline.work.argmax())
        yield from self._of_rank(busiest)
        beside = float(pipeline.work[busiest] - (forward + backward)[busiest]) * self.count
        yield Term("data", beside, "sharded weights and gradients of every micro-batch beside compute (ZeRO)")
        yield Term("bubble", time.bubble, time.source)
        yield Term("pipeline", time.messages, "messages that a stage waits for: latency + bytes / bandwidth")
        yield from self._at_the_end(pipeline, time)

    def _of_rank(self, rank: int) -> Iterator[Term]:
        costs = self.costs

        def once(values: Floats) -> float:
            return float(costs.by_rank(values)[rank]) * self.count

        yield Term("compute", once(costs.forward + costs.backward_input + costs.backward_weight), self.source)
        yield Term("recompute", once(costs.recompute + costs.made_again), f"forwards again: {self.source}")
        apart = self.splits
        tensor = costs.tensor + (costs.tensor_weight if apart else 0.0)
        context = costs.context + (costs.context_weight if apart else 0.0)
        yield Term("tensor", once(tensor), "rings, doi 10.1177/1094342005051521, section 4.1")
        yield Term("context", once(context), "rings beside attention, arXiv 2310.01889, section 3")

    def _gathers_each_pass(self) -> bool:
        """Whether sharded weights are gathered anew for every micro-batch."""
        zero = self.run.config.zero
        return self._again_each_pass(zero.stage >= 3, zero.weight_buffers)

    def _again_each_pass(self, sharded: bool, buffers: int) -> bool:
        if not sharded or self.run.costs.of_units.shards == 1:
            return False
        if self.run.config.schedule.name == "modular":
            return int(self.costs.layers.max()) > buffers
        return int(self.units.max()) > buffers

    def _steady_traffic(self) -> tuple[Floats, Floats]:
        """What replicas exchange with every micro-batch, beside forwards and beside backwards, by rank."""
        zero, rank = self.run.config.zero, self.costs.by_rank
        gathers = rank(self.costs.gather) if self._gathers_each_pass() else np.zeros(self.run.pipeline)
        often = self._again_each_pass(zero.stage >= 2, zero.gradient_buffers) or self.policy.updates_per_step > 1
        reductions = rank(self.costs.reduction) if often else np.zeros(self.run.pipeline)
        return gathers, gathers + reductions

    def _at_the_end(self, pipeline: Pipeline, time: PipelineTime) -> Iterator[Term]:
        yield Term(
            "data", self._reductions(pipeline), "gradients' sums beside backwards, arXiv 2211.13878, cost estimator"
        )
        yield Term("tied", tied_seconds(self.run), "sum of a tied weight's gradients over its stages")
        yield Term("scalars", scalar_seconds(self.run), "counts and norms over all ranks")
        updates = self.policy.updates_per_step
        yield Term(
            "update",
            float(self.costs.by_rank(self.costs.update).max()) * updates,
            "bytes of the optimizer's state over memory bandwidth",
        )
        yield Term("data", self._gathers(pipeline), "gathers of updated weights (ZeRO 1 and 2)")

    def _reductions(self, pipeline: Pipeline) -> float:
        """What sums of gradients add behind the last backward, of the rank that ends last."""
        if self.policy.updates_per_step > 1:
            return 0.0
        totals = self.costs.by_rank(self.costs.reduction)
        if not totals.any():
            return 0.0
        name, slow = self.run.config.schedule.name, self.assumptions.slow_down
        chunks, backward = self.run.chunks, pipeline.backward
        earlier = np.concatenate([[0.0], np.cumsum(backward / chunks)[:-1]])
        worst = 0.0
        for rank, total in enumerate(totals):
            compute = float(backward[rank]) / chunks
            if name == "modular":
                compute += float(backward[rank]) / chunks * (chunks - 1) * self.count
            elif chunks > 1:
                compute += float(backward[rank]) / chunks * (chunks - 1) * min(self.run.pipeline, self.count)
            if not self.flushes and self.policy.gradient_buffers > 1:
                compute += float(pipeline.work[rank]) * (self.count - self.run.pipeline)
            left = Beside(compute, float(total), int(self.units[rank])).exposed(slow)
            spare = float(earlier[rank]) if self.flushes else 0.0
            worst = max(worst, left - spare)
        return worst

    def _gathers(self, pipeline: Pipeline) -> float:
        """Weights that updates left in shards are whole again before the next forward."""
        if not self.run.costs.of_units.shards > 1 or self.run.config.zero.stage == 3:
            return 0.0
        totals = self.costs.by_rank(self.costs.gather)
        if not self.assumptions.gathers_beside_forward:
            return float(totals.max()) * self.policy.updates_per_step
        return max(
            Beside(float(pipeline.forward[rank]), float(total), int(self.units[rank])).exposed(
                self.assumptions.slow_down
            )
            for rank, total in enumerate(totals)
        )
