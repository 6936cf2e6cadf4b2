"""How long the busiest rank of a layout works on a micro-batch at the least, with the model cut into its stages."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.placement import Placement
from megapipe.planner.cost.replicas import side_by_side
from megapipe.planner.cost.run_layout import RunLayout, lay_on
from megapipe.planner.cost.traffic_counts import TrafficCounts, traffic_counts
from megapipe.planner.search.figures import NO_TRAFFIC, LayerFigures, MicrobatchSeconds
from megapipe.planner.search.layouts import Configurations, Layout

Floats = npt.NDArray[np.float64]

UPDATES_IN_BETWEEN = {"pipedream"}
"""Schedules that update within a step, so that their sums run beside more than one backward."""


class StageSeconds:
    """Of layouts of one run on one machine. figures: of the run. slow_down: as of `Assumptions`."""

    def __init__(self, base: PretrainConfig, hardware: Hardware, figures: LayerFigures, slow_down: float) -> None:
        self._configurations, self._hardware = Configurations(base), hardware
        self._figures, self._slow_down = figures, slow_down
        self._cuts: dict[tuple[object, ...], _Cut] = {}
        self._counts: dict[tuple[object, ...], TrafficCounts] = {}

    def busiest(self, layout: Layout, work: MicrobatchSeconds, num_microbatches: int) -> float:
        """Seconds with the traffic of replicas that goes with every micro-batch, edges' weights left out.

        work: of one micro-batch. num_microbatches: of a step.
        """
        shape = layout.shape
        cut = self._cut_of(layout)
        forward = cut.together(work.embedding.forward, work.block.forward, work.head.forward)
        backward = cut.together(*(each.backward + each.again for each in (work.embedding, work.block, work.head)))
        traffic = self._figures.traffic(shape, layout.zero) if layout.zero >= 2 else NO_TRAFFIC
        if any(traffic) and shape.schedule not in UPDATES_IN_BETWEEN:
            counts = self._counts_of(layout, num_microbatches)
            gathers = cut.blocks * traffic.gather * counts.gathers / 2
            sums = cut.blocks * traffic.reduction * counts.sums
            forward = side_by_side(forward, gathers, self._slow_down)
            backward = side_by_side(backward, gathers + sums, self._slow_down)
        return float(np.bincount(cut.ranks, forward + backward).max())

    def _counts_of(self, layout: Layout, num_microbatches: int) -> TrafficCounts:
        """Of a micro-batch; the same for all layouts that share out as much over the same stages, whatever the number
        of replicas."""
        shape = layout.shape
        key = shape.schedule, shape.chunks, shape.pipeline, num_microbatches, layout.zero
        if key not in self._counts:
            self._counts[key] = traffic_counts(self._laid(layout, self._cut_of(layout).run))
        return self._counts[key]

    def _cut_of(self, layout: Layout) -> "_Cut":
        shape = layout.shape
        key = shape.schedule, shape.chunks, shape.pipeline
        if key not in self._cuts:
            run = self._laid(layout)
            blocks = np.array(run.stages.units_per_stage, dtype=np.float64)
            blocks[0] -= 1
            blocks[-1] -= 1
            self._cuts[key] = _Cut(run, blocks, np.array(run.ranks))
        return self._cuts[key]

    def _laid(self, layout: Layout, like: RunLayout | None = None) -> RunLayout:
        sizes = {name: getattr(layout.shape, name) for name in ("data", "pipeline", "context", "tensor")}
        return lay_on(self._configurations.of(layout), Placement(self._hardware, sizes), like)


class _Cut(NamedTuple):
    """A model in stages. run: one that has them. blocks, ranks: of every stage."""

    run: RunLayout
    blocks: Floats
    ranks: npt.NDArray[np.int64]

    def together(self, embedding: float, block: float, head: float) -> Floats:
        """Of every stage, what its layers have."""
        found = self.blocks * block
        found[0] += embedding
        found[-1] += head
        return found
