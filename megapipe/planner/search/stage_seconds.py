"""Lower bounds of the time of a step, with the model cut into its stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.scheduling import schedule_options, splits_backwards
from megapipe.planner.cost.replicas import side_by_side
from megapipe.planner.cost.run_layout import RunLayout, lay_on
from megapipe.planner.cost.traffic_counts import TrafficCounts, traffic_counts
from megapipe.planner.search.figures import NO_TRAFFIC, LayerFigures, MicrobatchSeconds
from megapipe.planner.search.layouts import Configurations, Layout, Shape
from megapipe.schedules.generators.registry import find_generator

Floats = npt.NDArray[np.float64]


class StageSeconds:
    """Of layouts of one run on one machine. figures: of the run. slow_down: as of `Assumptions`."""

    def __init__(self, base: PretrainConfig, hardware: Hardware, figures: LayerFigures, slow_down: float) -> None:
        self._configurations, self._hardware = Configurations(base), hardware
        self._figures, self._slow_down = figures, slow_down
        self._cuts: dict[tuple[object, ...], _Cut] = {}
        self._counts: dict[tuple[object, ...], TrafficCounts] = {}

    def at_least(self, shape: Shape, works: Sequence[MicrobatchSeconds], num_microbatches: int) -> Floats:
        """Return what a step of a shape takes at least for each of several options, without traffic of replicas.

        A rank starts when the first micro-batch has passed all stages before its own first stage. Under a flush, after
        its last backward there, one has to pass the same stages backward; where backwards are split, another action
        may be the rank's last one.

        works: of one micro-batch. num_microbatches: of a step.
        """
        cut = self._cut_of(shape)
        seconds = np.array([each.parts() for each in works])
        return (seconds @ cut.weights(num_microbatches)).max(axis=1)

    def with_traffic(self, layout: Layout, work: MicrobatchSeconds, num_microbatches: int) -> float:
        """Return `at_least` of one layout with the traffic of the blocks of replicas for each micro-batch."""
        shape = layout.shape
        cut = self._cut_of(shape)
        traffic = self._figures.traffic(shape, layout.zero) if layout.zero >= 2 else NO_TRAFFIC
        least = float(self.at_least(shape, [work], num_microbatches)[0])
        if not any(traffic) or cut.updates_per_step > 1:  # whose sums run beside more than one backward
            return least
        forward = cut.together(work.embedding.forward, work.block.forward, work.head.forward)
        backward = cut.together(*(each.backward + each.again for each in (work.embedding, work.block, work.head)))
        counts = self._counts_of(layout, num_microbatches)
        gathers = cut.blocks * traffic.gather * counts.gathers / 2
        sums = cut.blocks * traffic.reduction * counts.sums
        more = side_by_side(forward, gathers, self._slow_down) - forward
        more += side_by_side(backward, gathers + sums, self._slow_down) - backward
        seconds = np.array(work.parts()) @ cut.weights(num_microbatches)
        return float((seconds + num_microbatches * np.bincount(cut.ranks, more)).max())

    def _counts_of(self, layout: Layout, num_microbatches: int) -> TrafficCounts:
        """Of a micro-batch; the same for all layouts that share out as much over the same stages, whatever the number
        of replicas."""
        shape = layout.shape
        key = shape.schedule, shape.chunks, shape.pipeline, num_microbatches, layout.zero
        if key not in self._counts:
            self._counts[key] = traffic_counts(self._laid(layout, self._cut_of(shape).run))
        return self._counts[key]

    def _cut_of(self, shape: Shape) -> "_Cut":
        key = shape.schedule, shape.chunks, shape.pipeline
        if key not in self._cuts:
            run = self._laid(Layout(shape, 0, 0, "none"))
            blocks = np.array(run.stages.units_per_stage, dtype=np.float64)
            blocks[0] -= 1
            blocks[-1] -= 1
            generator = find_generator(shape.schedule)
            policy = generator.policy_of(shape.pipeline, run.num_microbatches, schedule_options(run.config))
            splits = splits_backwards(run.config)
            self._cuts[key] = _Cut(run, blocks, np.array(run.ranks), policy.flushes, splits, policy.updates_per_step)
        return self._cuts[key]

    def _laid(self, layout: Layout, like: RunLayout | None = None) -> RunLayout:
        sizes = {name: getattr(layout.shape, name) for name in ("data", "pipeline", "context", "tensor")}
        return lay_on(self._configurations.of(layout), Placement(self._hardware, sizes), like)


@dataclass(frozen=True)
class _Cut:
    """A model in stages. run: one that has them. blocks, ranks: of every stage. flushes, splits, updates_per_step: of
    the schedule; `splits` whether its backwards are in halves."""

    run: RunLayout
    blocks: Floats
    ranks: npt.NDArray[np.int64]
    flushes: bool
    splits: bool
    updates_per_step: int

    def together(self, embedding: float, block: float, head: float) -> Floats:
        """Return what the layers of each stage have together."""
        found = self.blocks * block
        found[0] += embedding
        found[-1] += head
        return found

    def weights(self, num_microbatches: int) -> Floats:
        """Return by rank the number of times that each of `MicrobatchSeconds.parts` counts in a step, shape
        [9, ranks]."""
        own, before = self._layers
        forward, backward = float(self.flushes), float(self.flushes and not self.splits)
        return np.concatenate([num_microbatches * own, forward * before, backward * before])

    @cached_property
    def _layers(self) -> tuple[Floats, Floats]:
        """Embeddings, blocks and heads of each rank, and of the stages before its first one; shape [3, ranks]."""
        size = int(self.ranks.max()) + 1
        layers = np.zeros((3, len(self.blocks)))
        layers[0, 0], layers[1], layers[2, -1] = 1.0, self.blocks, 1.0
        own = np.stack([np.bincount(self.ranks, each, size) for each in layers]).astype(np.float64)
        before: Floats = np.concatenate([np.zeros((3, 1)), layers.cumsum(axis=1)], axis=1)
        return own, before[:, np.unique(self.ranks, return_index=True)[1]]
