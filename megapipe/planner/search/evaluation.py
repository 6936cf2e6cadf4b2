"""The costs of a run's layouts on a machine, each part computed once for all layouts that have it in common."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from megapipe.config import ConfigError
from megapipe.config.parallel import ScheduleConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import own_parts
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.stages import cached_method
from megapipe.planner.cost.estimate import ENGINE, Assumptions, Estimate, RankMemory
from megapipe.planner.cost.layer_costs import LayerCost, MicrobatchCost, microbatch_cost, stage_costs, state_cost
from megapipe.planner.cost.layer_times import LayerTimes, SharedRoofline
from megapipe.planner.cost.memory import LayerSizes, RankOrders, StateSizes, least_bytes, rank_memories
from megapipe.planner.cost.model import estimate, estimate_of
from megapipe.planner.cost.run_layout import RunLayout, lay_on
from megapipe.planner.cost.step_time import StepTimer, TrafficCounts, traffic_counts
from megapipe.planner.search.space import Configurations, Layout
from megapipe.schedules import ScheduleError

Part = TypeVar("Part")


class Evaluation:
    """Computes `planner.cost.model.estimate` of valid layouts of one run on one machine, in two steps: first the
    bytes, then everything. Results equal those of `estimate`. Bounds are computed from the same parts.

    base: configuration of all fields that layouts do not set. hardware, times, assumptions: as in `estimate`.
    """

    def __init__(
        self, base: PretrainConfig, hardware: Hardware, times: LayerTimes, assumptions: Assumptions = ENGINE
    ) -> None:
        self.base, self.hardware, self.times, self.assumptions = base, hardware, times, assumptions.on(hardware)
        self.measured = not isinstance(times, SharedRoofline)
        self._configurations = Configurations(base)
        self._known: dict[tuple[object, ...], Any] = {}

    def _once(self, key: tuple[object, ...], compute: Callable[[], Part]) -> Part:
        """Return the result of `compute`; calls with an equal key return the result of the first one."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def num_bytes(self, layout: Layout) -> int:
        """Return the bytes of the fullest rank. Raises ConfigError like `estimate`."""
        return max(memory.total for memory in self._memory(layout))

    @cached_method
    def least_bytes(self, layout: Layout) -> float:
        """Return a lower bound of `num_bytes`."""
        return 0.0 if self.base.schedule.file else least_bytes(*self._held(layout))

    @cached_method
    def least_seconds(self, layout: Layout) -> float:
        """Return a lower bound of the estimate's seconds."""
        return 0.0 if self.base.schedule.file else self._step(layout).least_seconds()

    def fits(self, layout: Layout) -> bool:
        """Return whether every rank fits the smallest device at its pipeline coordinate. Raises like `estimate`."""
        memory = self._memory(layout)  # raises before `run` if a schedule file does not fit
        limits = self.run(layout).placement.memory_limits
        return all(each.total <= limit for each, limit in zip(memory, limits, strict=True))

    @cached_method
    def estimate(self, layout: Layout) -> Estimate:
        """Return the estimate. Raises ConfigError if a schedule file is for another division of the model, which no
        earlier check detects."""
        if not self.base.schedule.file:
            return estimate_of(self.run(layout), self._step(layout).terms(), self._memory(layout))
        config = self._configurations.of(layout)
        try:
            return estimate(config, self.hardware, times=self.times, assumptions=self.assumptions)
        except ScheduleError as error:
            raise ConfigError(f"schedule {config.schedule.file}: {error}") from error

    @cached_method
    def run(self, layout: Layout) -> RunLayout:
        """Return the layout of the run, with its stages."""
        shape = layout.shape
        like = self._once((shape.pipeline, shape.schedule, shape.chunks), lambda: self._laid(layout, None))
        return self._laid(layout, like)

    def in_one_stage(self, layout: Layout) -> RunLayout:
        """Return a run whose layers have the sizes and links of a layout. It has one stage, so that it can stand for
        all pipelines and schedules."""
        return self._laid(layout, self._one_stage)

    @cached_property
    def _one_stage(self) -> RunLayout:
        parallel = replace(self.base.parallel, data=1, tensor=1, pipeline=1, context=1, layers_per_stage=None)
        parallel = replace(parallel, sequence=False, sequence_chunks=1)
        config = replace(self.base, parallel=parallel, schedule=ScheduleConfig())
        return lay_on(config, Placement(self.hardware, {}))

    def _laid(self, layout: Layout, like: RunLayout | None) -> RunLayout:
        shape = layout.shape
        placement = self._once(shape[:4], lambda: Placement(self.hardware, shape.mesh))
        return lay_on(self._configurations.of(layout), placement, like)

    @cached_method
    def _memory(self, layout: Layout) -> tuple[RankMemory, ...]:
        if self.base.schedule.file:
            return self.estimate(layout).memory
        return rank_memories(self.run(layout), self._held(layout))

    def _held(self, layout: Layout) -> tuple[RankOrders, LayerSizes, StateSizes]:
        """Return what determines the bytes of a layout."""
        shape = layout.shape
        of_micro = shape.tensor, shape.context, shape.micro_size, layout.sequence, layout.recompute
        return (
            self._once((RankOrders, layout.order), lambda: RankOrders.of(self.run(layout))),
            self._once((LayerSizes, of_micro), lambda: LayerSizes.of(self.run(layout))),
            self.states(layout),
        )

    def states(self, layout: Layout) -> StateSizes:
        """Return the sizes of the parameters, which depend on no schedule."""
        shape = layout.shape
        key = StateSizes, shape.tensor, shape.data * shape.context, layout.zero
        return self._once(key, lambda: StateSizes.of(self.in_one_stage(layout)))

    def microbatch(self, layout: Layout) -> list[MicrobatchCost]:
        """Return the costs of a micro-batch in one layer of each kind, which depend on no pipeline."""
        shape, given = layout.shape, (self.times, self.assumptions)
        key = shape.tensor, shape.context, shape.micro_size, layout.sequence, layout.recompute

        def costs() -> list[MicrobatchCost]:
            run = self.in_one_stage(layout)
            again = any(own_parts(run.config, each) for each in run.layers)
            # Only the recomputed kernels differ.
            if layout.recompute == "full" and not again and not self.measured:
                like = self.microbatch(layout._replace(recompute="none"))
                times = (self.times.of(run.config, each) for each in run.layers)
                return [each._replace(compute=compute) for each, compute in zip(like, times, strict=True)]
            return [microbatch_cost(run, *each, *given) for each in zip(run.layers, run.flops, strict=True)]

        return self._once((microbatch_cost, key, self._apart(layout)), costs)

    def traffic(self, layout: Layout) -> TrafficCounts:
        """Return the number of gathers and sums of each stage."""
        return self._once((TrafficCounts, layout.traffic(self.base)), lambda: traffic_counts(self.run(layout)))

    def _apart(self, layout: Layout) -> Layout | None:
        """Return a layout with which no other layout shares seconds, because measured times may depend on all its
        fields; None if times follow from the roofline."""
        return layout if self.measured else None

    @cached_method
    def _step(self, layout: Layout) -> StepTimer:
        run, given = self.run(layout), (self.times, self.assumptions)
        # Sums tensor by tensor depend on the recomputation.
        by_tensor = self.assumptions.tensor_by_tensor and layout.recompute
        of_state = layout.shape[:4], layout.zero, layout.sequence > 0, by_tensor
        states = self._once(
            (state_cost, of_state, self._apart(layout)), lambda: [state_cost(run, each, *given) for each in run.layers]
        )
        layers = [LayerCost(one, *other) for one, other in zip(self.microbatch(layout), states, strict=True)]
        step = StepTimer(run, stage_costs(run, layers), self.assumptions)
        if layout.zero >= 2:
            step.traffic = self.traffic(layout)
        return step
