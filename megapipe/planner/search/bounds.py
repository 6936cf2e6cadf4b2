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
from megapipe.planner.cost.assumptions import ENGINE, Assumptions
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.galvatron.costs import overlapped
from megapipe.planner.search.figures import LayerFigures, LayerWork, MicrobatchSeconds
from megapipe.planner.search.in_flight import held_at_least
from megapipe.planner.search.layouts import Layout, Shape
from megapipe.planner.search.space import Recompute, ZeroStage
from megapipe.planner.search.stage_limits import StageLimiter
from megapipe.planner.search.stage_seconds import StageSeconds
from megapipe.schedules.generators.registry import find_generator
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES, Precision

Floats = npt.NDArray[np.float64]

ROUNDING = 1e-9
"""Relative, by which sums of the same terms in another order may differ at the most."""
FILLS = {"1f1b", "gpipe", "interleaved_1f1b", "modular"}
"""Schedules in which a step's first and last micro-batch pass all other ranks, a chunk at a time."""


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
        self._last_of = cache(lambda pipeline, chunks: float(self._find_least_blocks(pipeline, chunks)[-1].sum()))

    def of(self, shape: Shape, layouts: Sequence[Layout]) -> tuple[list[float], list[float]]:
        """Seconds of a step and bytes of the fullest rank, of layouts that all have this shape; no time where already
        the bytes are too many."""
        options = tuple((each.sequence, each.zero, each.recompute) for each in layouts)
        sizes = self._sizes_of(shape.tensor, shape.context, shape.micro_size, shape.data * shape.context, options)
        num_bytes = self._num_bytes(shape, sizes).tolist()
        key, facts = (shape.tensor, shape.context, shape.micro_size), self._facts(shape)
        seconds = [
            self._seconds(facts, each, self._figures.work(*key, each.sequence, each.recompute))
            if size <= self._memory_limit
            else math.inf
            for each, size in zip(layouts, num_bytes, strict=True)
        ]
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

    def _chunks(self, shape: Shape) -> int:
        return find_generator(shape.schedule).chunks if shape.chunks is None else shape.chunks

    def _count(self, shape: Shape) -> int:
        return self._base.batch.global_size // (shape.micro_size * shape.data)

    def _facts(self, shape: Shape) -> "_Facts":
        schedule, chunks = self._base.schedule, self._chunks(shape)
        most = -(-self._base.model.num_layers // shape.pipeline)
        fills = shape.schedule in FILLS and not schedule.two_bp and schedule.group_size is None
        last = None
        if shape.schedule != "zb_v":
            last = 0.0 if self._by_hand or schedule.file else self._last_of(shape.pipeline, chunks)
        return _Facts(shape.pipeline, chunks, self._count(shape), most, last, fills)

    def _seconds(self, facts: "_Facts", layout: Layout, work: MicrobatchSeconds) -> float:
        """m micro-batches on the busiest rank, and under a flush one of them on each of the others.

        Some rank has at least the average of everything, and at least the average of blocks, rounded up; the last one
        has the head beside the blocks that no other has room for.
        """
        if self._base.schedule.file:
            return 0.0
        each_block = self._with_traffic(facts, layout, work.block) if layout.zero >= 2 else work.block.whole
        busiest = max(work.whole / facts.pipeline, facts.blocks * each_block)
        if facts.last is not None:
            busiest = max(busiest, facts.last * work.block.whole + work.head.whole)
        return self._step(facts, layout, work, busiest)

    def _step(self, facts: "_Facts", layout: Layout, work: MicrobatchSeconds, busiest: float) -> float:
        """Of a step whose busiest rank works so long on a micro-batch, at the least."""
        total = facts.num_microbatches * busiest
        if facts.fills:
            total += max(0.0, work.passing - busiest) / facts.chunks
        if layout.zero in (1, 2) and not self._assumptions.gathers_beside_forward:
            total += facts.blocks * self._figures.traffic(layout.shape, layout.zero).gather
        return total

    def closer(self, layout: Layout) -> float:
        """Seconds of a step again, nearer to what they are: with what each rank has, by `StageSeconds`, in place of
        what some rank has at the least."""
        shape = layout.shape
        if self._base.schedule.file:
            return 0.0
        work = self._figures.work(shape.tensor, shape.context, shape.micro_size, layout.sequence, layout.recompute)
        facts = self._facts(shape)
        busiest = self._stages.busiest(layout, work, facts.num_microbatches)
        return self._step(facts, layout, work, busiest) * (1.0 - ROUNDING)

    def _with_traffic(self, facts: "_Facts", layout: Layout, work: LayerWork) -> float:
        """Seconds of a block with what its replicas exchange for every micro-batch beside it, on average over a rank
        with many blocks.

        A micro-batch passes all blocks of a stage in a row. As many of them as there are buffers may still lie there
        from the last pass, or stay for the next: of all stages of the rank no more than that many each.
        """
        zero, slow_down = self._base.zero, self._assumptions.slow_down
        traffic, kept = self._figures.traffic(layout.shape, layout.zero), facts.chunks / facts.blocks
        gathers = traffic.gather * max(0.0, 1.0 - zero.weight_buffers * kept) if layout.zero >= 3 else 0.0
        reductions = traffic.reduction * max(0.0, 1.0 - zero.gradient_buffers * kept)
        if facts.num_microbatches == 1:  # the one sum of a step counts behind its last backward
            reductions = 0.0
        return overlapped(work.forward, gathers, slow_down) + overlapped(
            work.backward + work.again, gathers + reductions, slow_down
        )

    def _least_blocks(self, shape: Shape, chunks: int) -> Floats:
        """Of every stage, shape [pipeline, chunks] as ranks hold them: stages between the first and the last have at
        least one, and each as many as the others have no room for."""
        if self._by_hand or shape.schedule == "zb_v":
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
        if shape.schedule != "zb_v":
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

    def _find_held(self, schedule: str, chunks: int | None, pipeline: int, count: int) -> "_Held":
        """Neither the replicas nor the tensor ranks of a shape change anything here."""
        shape = Shape(1, 1, pipeline, 1, 1, schedule, chunks)
        stages = self._chunks(shape)
        held, least = held_at_least(self._base.schedule, shape, stages, count), self._least_blocks(shape, stages)
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
        if shape.schedule != "zb_v":
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


class _Facts(NamedTuple):
    """What the time of all layouts of a shape depends on.

    pipeline, chunks: ranks, and stages of each. num_microbatches: of a step. blocks: that some rank has at least.
    last: that the last rank has at least, beside the head; None where the head lies elsewhere. fills: whether the
    first and last micro-batch pass all ranks (`FILLS`).
    """

    pipeline: int
    chunks: int
    num_microbatches: int
    blocks: int
    last: float | None
    fills: bool


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
