"""What no layout can go below: seconds by its compute and traffic, bytes by its state and the activations in flight.

Both leave out what only ever adds, so that they stay below `planner.cost.model.estimate`, and need no cut of the model
into stages: how many blocks a stage can have at most and at least is enough.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.scheduling import schedule_options
from megapipe.planner.cost.assumptions import ENGINE, Assumptions
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.galvatron.costs import overlapped
from megapipe.planner.search.figures import LayerFigures, LayerWork, MicrobatchSeconds
from megapipe.planner.search.layouts import Layout, Shape
from megapipe.planner.search.space import Recompute, ZeroStage
from megapipe.planner.search.stage_limits import StageLimiter
from megapipe.planner.search.stage_seconds import StageSeconds
from megapipe.schedules.generators.registry import find_generator
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES, Precision

Floats = npt.NDArray[np.float64]

ROUNDING = 1e-9
"""Relative, by which sums of the same terms in another order may differ at the most."""


class LayoutBounds:
    """Lower bounds of layouts of one run on one machine; arguments as of `LayerFigures` and `estimate`."""

    def __init__(
        self,
        base: PretrainConfig,
        hardware: Hardware,
        devices: int,
        times: LayerTimes,
        assumptions: Assumptions = ENGINE,
    ) -> None:
        self._base, self._assumptions = base, assumptions.on(hardware)
        self._memory_limit = max(node.device.memory_bytes for node in hardware.nodes(devices))
        self._figures = LayerFigures(base, hardware, devices, times)
        self._stages = StageSeconds(base, hardware, self._figures, self._assumptions.slow_down)
        self._limits, self._by_hand = StageLimiter(base), base.parallel.layers_per_stage is not None
        precision: Precision = base.training.precision  # type: ignore[assignment]
        self._weight_bytes = ELEMENT_BYTES[precision]
        self._held_of = cache(self._find_held)
        self._least_of = cache(self._find_least_blocks)
        self._sizes_of = cache(self._find_sizes)
        self._ends_last_of = cache(
            lambda name, ranks, chunks: find_generator(name).placement(ranks, chunks).stages[-1].rank == ranks - 1
        )

    def of(self, shape: Shape, layouts: Sequence[Layout]) -> tuple[list[float], list[float]]:
        """Seconds of a step and bytes of the fullest rank, of layouts that all have this shape; no time where already
        the bytes are too many."""
        options = tuple((each.sequence, each.zero, each.recompute) for each in layouts)
        sizes = self._sizes_of(shape.tensor, shape.context, shape.micro_size, shape.data * shape.context, options)
        num_bytes = self._num_bytes(shape, sizes).tolist()
        fitting = [at for at, size in enumerate(num_bytes) if size <= self._memory_limit]
        seconds = [math.inf] * len(layouts)
        for at, least in zip(fitting, self._seconds(shape, [layouts[at] for at in fitting]), strict=True):
            seconds[at] = least
        return seconds, num_bytes

    def _find_sizes(
        self,
        tensor: int,
        context: int,
        micro_size: int,
        replicas: int,
        options: tuple[tuple[int, ZeroStage, Recompute], ...],
    ) -> "_Sizes":
        """By option: tokens shared by tensor ranks or not, ZeRO stage, recomputation."""
        figures = self._figures
        helds = [figures.held(tensor, context, micro_size, sequence, again) for sequence, _, again in options]
        states = [figures.state(tensor, zero, replicas) for _, zero, _ in options]
        shared = [
            (state.elements if state.shards > 1 else 0, zero)
            for state, (_, zero, _) in zip(states, options, strict=True)
        ]

        def column(values: Iterable[float]) -> Floats:
            return np.array(list(values), dtype=np.float64)[:, None]

        return _Sizes(
            kept=column(each.block for each in helds),
            stream=column(each.stream for each in helds),
            kept_embedding=column(each.embedding for each in helds),
            kept_head=column(each.head for each in helds),
            working=column(each.working for each in helds),
            state=column(each.block for each in states),
            state_embedding=column(each.embedding for each in states),
            state_head=column(each.head for each in states),
            tied=column(each.tied for each in states),
            weights=column(elements * self._weight_bytes if zero >= 3 else 0 for elements, zero in shared),
            gradients=column(elements * FULL_BYTES if zero >= 2 else 0 for elements, zero in shared),
        )

    def _work(self, layout: Layout) -> MicrobatchSeconds:
        shape = layout.shape
        return self._figures.work(shape.tensor, shape.context, shape.micro_size, layout.sequence, layout.recompute)

    def _chunks(self, shape: Shape) -> int:
        return find_generator(shape.schedule).chunks if shape.chunks is None else shape.chunks

    def _count(self, shape: Shape) -> int:
        return self._base.batch.global_size // (shape.micro_size * shape.data)

    def _seconds(self, shape: Shape, layouts: Sequence[Layout]) -> list[float]:
        """Some rank has at least the average of blocks, rounded up, with the traffic of their replicas."""
        if self._base.schedule.file or not layouts:
            return [0.0] * len(layouts)
        works, count = [self._work(each) for each in layouts], self._count(shape)
        found = self._stages.at_least(shape, works, count).tolist()
        for at, (layout, work) in enumerate(zip(layouts, works, strict=True)):
            if layout.zero >= 2:
                found[at] = max(found[at], count * self._most_blocks(shape) * self._with_traffic(layout, work.block))
        return [self._after_update(*each) for each in zip(layouts, found, strict=True)]

    def _most_blocks(self, shape: Shape) -> int:
        """Return the blocks that some rank has at least."""
        return -(-self._base.model.num_layers // shape.pipeline)

    def _after_update(self, layout: Layout, seconds: float) -> float:
        """Return the time of a step with the gathers of updated weights."""
        if layout.zero in (1, 2) and not self._assumptions.gathers_beside_forward:
            seconds += self._most_blocks(layout.shape) * self._figures.traffic(layout.shape, layout.zero).gather
        return seconds * (1.0 - ROUNDING)

    def closer(self, layout: Layout) -> float:
        """Return the seconds of a step at least, nearer to the estimate: with the traffic of each rank's stages."""
        if self._base.schedule.file:
            return 0.0
        seconds = self._stages.with_traffic(layout, self._work(layout), self._count(layout.shape))
        return self._after_update(layout, seconds)

    def _with_traffic(self, layout: Layout, work: LayerWork) -> float:
        """Seconds of a block with what its replicas exchange for every micro-batch beside it, on average over a rank
        with many blocks.

        A micro-batch passes all blocks of a stage in a row. As many of them as there are buffers may still lie there
        from the last pass, or stay for the next: of all stages of the rank no more than that many each.
        """
        zero, slow_down = self._base.zero, self._assumptions.slow_down
        shape = layout.shape
        traffic, kept = self._figures.traffic(shape, layout.zero), self._chunks(shape) / self._most_blocks(shape)
        gathers = traffic.gather * max(0.0, 1.0 - zero.weight_buffers * kept) if layout.zero >= 3 else 0.0
        reductions = traffic.reduction * max(0.0, 1.0 - zero.gradient_buffers * kept)
        if self._count(shape) == 1:  # the one sum of a step counts behind its last backward
            reductions = 0.0
        return overlapped(work.forward, gathers, slow_down) + overlapped(
            work.backward + work.again, gathers + reductions, slow_down
        )

    def _least_blocks(self, shape: Shape, chunks: int) -> Floats:
        """Of every stage, shape [pipeline, chunks] as ranks hold them: stages between the first and the last have at
        least one, and each as many as the others have no room for."""
        if self._by_hand or not self._ends_last(shape):
            return np.zeros((shape.pipeline, chunks))
        return self._least_of(shape.pipeline, chunks)

    def _find_least_blocks(self, pipeline: int, chunks: int) -> Floats:
        stages = pipeline * chunks
        found = np.zeros((pipeline, chunks))
        limits, blocks = self._limits.of(stages), self._base.model.num_layers
        if stages == 1:
            return found + blocks
        found += max(1, blocks - (stages - 2) * limits.most - limits.last)
        found[0, 0] = max(0, blocks - (stages - 2) * limits.most - limits.last)
        found[-1, -1] = max(0, blocks - (stages - 1) * limits.most)
        return found

    def _num_bytes(self, shape: Shape, sizes: "_Sizes") -> Floats:
        """Of the fullest rank.

        Rank r with n blocks holds at least c_r n bytes and something besides. The first j ranks have at least R of
        the blocks, as the others have no room for more; spread as evenly as can be, in proportion to 1 / c_r, these
        take R / sum(1 / c_r), and no cut has a fullest rank below that. The best j counts.
        """
        pipeline = shape.pipeline
        if self._base.schedule.file:  # its stages may lie on any rank
            return self._base.model.num_layers * sizes.state[:, 0] / pipeline
        held = self._held_of(shape.schedule, shape.chunks, pipeline, self._count(shape))
        each_block = sizes.state + held.always * sizes.kept
        # A stage's input lies in the slot that it arrived in, which counts once for all.
        besides = held.more * sizes.kept + held.slots * sizes.stream
        besides[:, :1] += sizes.state_embedding + held.first * sizes.kept_embedding
        if self._ends_last(shape):
            besides[:, -1:] += sizes.state_head + held.last * sizes.kept_head
        if pipeline == 1:
            besides -= sizes.tied
        if held.fewest:
            zero = self._base.zero
            besides += sizes.working + min(zero.weight_buffers, held.fewest) * sizes.weights
            besides += min(zero.gradient_buffers, held.fewest) * sizes.gradients
        shares = 1.0 / each_block
        found = (held.needed + (besides * shares).cumsum(axis=1)) / shares.cumsum(axis=1)
        return np.asarray(found.max(axis=1))

    def _ends_last(self, shape: Shape) -> bool:
        """Return whether the head is on the last rank."""
        return self._ends_last_of(shape.schedule, shape.pipeline, self._chunks(shape))

    def _find_held(self, schedule: str, chunks: int | None, pipeline: int, count: int) -> "_Held":
        """Neither the replicas nor the tensor ranks of a shape change anything here."""
        shape = Shape(1, 1, pipeline, 1, 1, schedule, chunks)
        stages = self._chunks(shape)
        least, generator = self._least_blocks(shape, stages), find_generator(schedule)
        options = schedule_options(self._base)
        held = np.zeros(least.shape) if generator.held is None else generator.held(pipeline, count, stages, options)
        always = held.min(axis=1)
        return _Held(
            always=always,
            more=((held - always[:, None]) * least).sum(axis=1),
            slots=1.0 - held.sum(axis=1),
            first=float(held[0, 0]),
            last=float(held[-1, -1]),
            needed=np.maximum(0.0, self._base.model.num_layers - self._room_behind(shape, stages)),
            fewest=int(least.sum(axis=1).min()),
        )

    def _room_behind(self, shape: Shape, chunks: int) -> Floats:
        """Blocks that the ranks behind each have room for."""
        limits = self._limits.of(shape.pipeline * chunks)
        room = np.full(shape.pipeline, float(chunks * limits.most))
        if self._ends_last(shape):
            room[-1] += limits.last - limits.most
        return room[::-1].cumsum()[::-1] - room


class _Held(NamedTuple):
    """What pipeline ranks hold at the least, shape [pipeline] where not a number.

    always: micro-batches of each block. more: of blocks together, above that. slots: less the micro-batches of all
    chunks, those that a rank's messages lie in. first, last: micro-batches of the embedding and of the head. needed:
    blocks of the ranks up to each. fewest: blocks of a rank.
    """

    always: Floats
    more: Floats
    slots: Floats
    first: float
    last: float
    needed: Floats
    fewest: int


class _Sizes(NamedTuple):
    """Bytes of a rank, by option of a shape; shape [options, 1] each.

    kept: of a block's activations, as `Held` has them, and so on. state: of a block, as `State` has it, and so on.
    weights, gradients: of a block's, whole, where ranks share them.
    """

    kept: Floats
    stream: Floats
    kept_embedding: Floats
    kept_head: Floats
    working: Floats
    state: Floats
    state_embedding: Floats
    state_head: Floats
    tied: Floats
    weights: Floats
    gradients: Floats
