"""The cost model for the many layouts of one search: what layouts have in common is found once."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.scheduling import splits_backwards
from megapipe.planner.cost.assumptions import ENGINE, Assumptions
from megapipe.planner.cost.estimate import Estimate, RankMemory
from megapipe.planner.cost.layer_costs import LayerCost
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.cost.memory import LayerSizes, StateSizes, rank_memories
from megapipe.planner.cost.model import estimate, estimate_run, layer_costs
from megapipe.planner.cost.run_layout import RunLayout, lay_on
from megapipe.planner.search.layouts import Configurations, Layout
from megapipe.planner.search.space import Recompute, ZeroStage
from megapipe.schedules import ScheduleError


class _LayerKey(NamedTuple):
    """Fields of a layout that the cost of a layer depends on."""

    data: int
    tensor: int
    pipeline: int
    context: int
    micro_size: int
    sequence: int
    zero: ZeroStage
    recompute: Recompute
    splits: bool


class Evaluation:
    """`planner.cost.model.estimate` of valid layouts of one run on one machine, in two steps: bytes, then all.

    Answers are those of `estimate`, number by number.

    Args:
        base: all that layouts leave as it is.
        hardware, times, assumptions: as of `estimate`.
    """

    def __init__(
        self, base: PretrainConfig, hardware: Hardware, times: LayerTimes, assumptions: Assumptions = ENGINE
    ) -> None:
        self._base, self._hardware, self._times = base, hardware, times
        self._assumptions = assumptions.on(hardware)
        self._configurations = Configurations(base)
        self._placement = cache(self._find_placement)
        self._staged: dict[tuple[object, ...], RunLayout] = {}
        self._run = cache(self._find_run)
        self._memory = cache(self._find_memory)
        self._splits = cache(self._find_splits)
        self._layer_sizes: dict[tuple[object, ...], LayerSizes] = {}
        self._state_sizes: dict[tuple[object, ...], StateSizes] = {}
        self._layer_costs: dict[_LayerKey, tuple[LayerCost, ...]] = {}
        self.estimate = cache(self._estimate)

    def num_bytes(self, layout: Layout) -> int:
        """Of the fullest rank. Raises ConfigError as `estimate`."""
        if self._base.schedule.file:
            return self.estimate(layout).peak_bytes
        return max(memory.total for memory in self._memory(layout))

    def fits(self, layout: Layout) -> bool:
        """Whether every rank fits the smallest device at its pipeline coordinate. Raises ConfigError as `estimate`."""
        if self._base.schedule.file:
            return self.estimate(layout).fits
        limits = self._run(layout).placement.memory_limits
        return all(each.total <= limit for each, limit in zip(self._memory(layout), limits, strict=True))

    def _estimate(self, layout: Layout) -> Estimate:
        """Its cost. Raises ConfigError where a schedule file is for another cut of the model, which shows first
        here."""
        if self._base.schedule.file:
            return self._of_file(layout)
        run = self._run(layout)
        return estimate_run(run, self._layers(layout, run), self._memory(layout), self._assumptions)

    def _of_file(self, layout: Layout) -> Estimate:
        config = self._configurations.of(layout)
        try:
            return estimate(config, self._hardware, times=self._times, assumptions=self._assumptions)
        except ScheduleError as error:
            raise ConfigError(f"schedule.file {config.schedule.file}: {error}") from error

    def _find_placement(self, data: int, pipeline: int, context: int, tensor: int) -> Placement:
        sizes = {"data": data, "pipeline": pipeline, "context": context, "tensor": tensor}
        return Placement(self._hardware, sizes)

    def _find_run(self, layout: Layout) -> RunLayout:
        shape = layout.shape
        placement = self._placement(shape.data, shape.pipeline, shape.context, shape.tensor)
        config = self._configurations.of(layout)
        stages = shape.pipeline, shape.schedule, shape.chunks
        run = self._staged[stages] = lay_on(config, placement, self._staged.get(stages))
        return run

    def _find_memory(self, layout: Layout) -> tuple[RankMemory, ...]:
        run, shape = self._run(layout), layout.shape
        of_micro = shape.tensor, shape.context, shape.micro_size, layout.sequence, layout.recompute
        if of_micro not in self._layer_sizes:
            self._layer_sizes[of_micro] = LayerSizes.of(run)
        of_state = shape.tensor, shape.data * shape.context, layout.zero
        if of_state not in self._state_sizes:
            self._state_sizes[of_state] = StateSizes.of(run)
        return rank_memories(run, self._layer_sizes[of_micro], self._state_sizes[of_state])

    def _layers(self, layout: Layout, run: RunLayout) -> tuple[LayerCost, ...]:
        key = self._key(layout)
        if key not in self._layer_costs:
            self._layer_costs[key] = layer_costs(run, self._times, self._assumptions)
        return self._layer_costs[key]

    def _key(self, layout: Layout) -> _LayerKey:
        """Schedules cut the same layers into other stages."""
        shape = layout.shape
        return _LayerKey(
            shape.data,
            shape.tensor,
            shape.pipeline,
            shape.context,
            shape.micro_size,
            layout.sequence,
            layout.zero,
            layout.recompute,
            self._splits(shape.schedule),
        )

    def _find_splits(self, schedule: str) -> bool:
        return splits_backwards(replace(self._base, schedule=replace(self._base.schedule, name=schedule)))
