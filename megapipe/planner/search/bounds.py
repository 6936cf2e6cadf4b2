"""Lower bounds of a layout's step time and of its fullest rank's memory.

Bounds use the stages of a layout and the costs of its layers, which `Evaluation` computes for estimates, but no order
of actions. They depend on where stages are placed and whether backwards are split, but on no schedule's name. A
generator may define a bound on the micro-batches that its ranks hold (`Generator.held`). Bounds only omit costs that
`planner.cost.model.estimate` adds, so they never exceed it.

Seconds and bytes of a layer depend on the ranks that share it, on the micro-batch and on the recomputation
(`LayerFigures`); the pipeline, the replicas and the schedule only weight them. So `of_mesh` and `of_branch` bound
whole branches of the space by the best figures of their choices, without creating any layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Generic, NamedTuple, cast

import numpy as np

from megapipe.layout.scheduling import schedule_options
from megapipe.layout.stages import cached_method
from megapipe.layout.units import layer_units
from megapipe.planner.cost.layer_costs import Number, overlapped, replica_seconds
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.planner.cost.step_time import ROUNDING
from megapipe.planner.search.evaluation import Evaluation
from megapipe.planner.search.space import Branch, Choice, Layout, Recompute, Shape, ZeroStage
from megapipe.schedules.actions import Floats
from megapipe.schedules.registry import find_generator
from megapipe.spec.ops import ELEMENT_BYTES, FULL_BYTES, Precision

Mesh = tuple[int, int, int, int]
"""Data, tensor, pipeline and context ranks."""
Micro = tuple[int, int, int]
"""Tensor ranks, context ranks and micro-batch size."""
Method = tuple[int, Recompute]
"""Values of `Layout.sequence` and `recompute`, on which the figures of a micro-batch depend."""


class MicrobatchBytes(NamedTuple, Generic[Number]):
    """Bytes of one micro-batch on one rank. block, embedding, head: activations saved from a layer's forward to its
    backward. working: activations that the backward of a block recomputes. freed: activations of the head that are
    freed before that, at most `working`. stream: a message between stages."""

    block: Number
    embedding: Number
    head: Number
    working: Number
    freed: Number
    stream: Number


class StateFigures(NamedTuple, Generic[Number]):
    """Bytes between steps of a block, of the embedding and of the head; the latter two include tied weights.

    tied: bytes that a rank with both embedding and head holds only once. weights, gradients: bytes of a block before
    sharding; 0 if not sharded.
    """

    block: Number
    embedding: Number
    head: Number
    tied: Number
    weights: Number
    gradients: Number


class LayerFigures:
    """Time and memory figures of the layers of one run on one machine. The times of a micro-batch must depend neither
    on the pipeline nor on the replicas. If blocks differ, each figure is the lowest of any block."""

    def __init__(self, costs: Evaluation, devices: int) -> None:
        self._costs, self._devices = costs, devices

    def _layout(self, mesh: Mesh, zero: ZeroStage = 0, micro_size: int = 1, method: Method = (0, "none")) -> Layout:
        """Return a layout with the run's own schedule, for costs that do not depend on it."""
        schedule, (sequence, recompute) = self._costs.base.schedule, method
        return Layout(Shape(*mesh, micro_size, schedule.name, schedule.chunks), sequence, zero, recompute)

    def _on_one_rank(self, micro: Micro, method: Method) -> Layout:
        """Return a layout with one pipeline rank."""
        tensor, context, micro_size = micro
        return self._layout((self._devices // (tensor * context), tensor, 1, context), 0, micro_size, method)

    @cached_method
    def held(self, micro: Micro, method: Method) -> MicrobatchBytes[float]:
        run = self._costs.in_one_stage(self._on_one_rank(micro, method))
        embedding, *blocks, head = (float(run.costs.kept(layer)) for layer in run.layers)
        block, stream, recompute = min(blocks), float(run.costs.stream), run.config.recompute
        if recompute.method != "full":
            return MicrobatchBytes(block, embedding, head, 0.0, 0.0, stream)
        working = max(0.0, block - stream)
        inputs = min(block, stream / recompute.every)
        return MicrobatchBytes(inputs, embedding, head, working, min(head, working), stream)

    @cached_method
    def work(self, micro: Micro, method: Method) -> Floats:
        """Return the seconds of one micro-batch in the embedding, a block and the head, including exposed waits for
        tensor and context ranks: in all phases, in the forward, and in the backward without the recomputation of whole
        layers, shape [3 phases, 3 layers]."""
        costs, recompute = self._costs.microbatch(self._on_one_rank(micro, method)), self._costs.base.recompute
        # Layers that are recomputed as a whole.
        whole = np.array([False, *[method[1] == "full"] * (len(costs) - 2), False])
        get = attrgetter("whole_forward", "whole_backward", "compute.recompute", "whole_again")
        forward, backward, within, again = np.array([get(each) for each in costs]).T
        backward = backward + np.where(whole, 0.0, within)
        # With recompute.num_blocks, only some of the blocks are recomputed.
        again = np.where(whole & (recompute.num_blocks is None), again, 0.0)
        phases = np.stack([forward + backward + again, forward, backward])
        return np.stack([phases[:, 0], phases[:, 1:-1].min(axis=1), phases[:, -1]], axis=1)

    @cached_method
    def state(self, tensor: int, zero: ZeroStage, replicas: int) -> StateFigures[float]:
        sizes = self._costs.states(self._layout((replicas, tensor, 1, 1), zero))
        kinds = range(len(sizes.layers))

        def lasting(*members: int) -> float:
            return float(sizes.of_rank(tuple(map(members.count, kinds)), 1, 1).total)

        embedding, *blocks, head = map(lasting, kinds)
        precision = cast(Precision, self._costs.base.training.precision)
        whole = float(min(sizes.elements[1:-1]) if sizes.of_units.shards > 1 else 0)
        weights, gradients = whole * ELEMENT_BYTES[precision] * (zero >= 3), whole * FULL_BYTES * (zero >= 2)
        tied = embedding + head - lasting(0, kinds[-1])
        return StateFigures(min(blocks), embedding, head, tied, weights, gradients)

    @cached_method
    def traffic(self, mesh: Mesh, zero: ZeroStage) -> tuple[float, float]:
        """Return the seconds to gather a block's weights, and to reduce its gradients, over its replicas. They are 0
        without sharding or with one replica, and for measured links, where finding the slowest group takes long."""
        run = self._costs.in_one_stage(self._layout(mesh, zero))
        measured = run.hardware.link_matrix is not None
        if zero == 0 or run.costs.replicas == 1 or measured:
            return 0.0, 0.0
        units = (layer_units(layer, run.tied, run.config.zero) for layer in run.layers[1:-1])
        # Whole experts are reduced once per step.
        sharded = ([unit for unit in each if run.costs.of_units.shards_of(unit) > 1] for each in units)
        seconds = [np.sum([(0.0, 0.0), *(replica_seconds(run, unit) for unit in each)], axis=0) for each in sharded]
        reduction, gather = np.min(seconds, axis=0).tolist()
        return gather, reduction


class LayoutBounds:
    """Lower bounds of the layouts of one run on a number of devices. costs: of these layouts."""

    def __init__(self, costs: Evaluation, devices: int) -> None:
        self._costs, self._base = costs, costs.base
        self._memory_limit = max(node.device.memory_bytes for node in costs.hardware.nodes(devices))
        self._figures = LayerFigures(costs, devices)
        self._cuts: dict[tuple[object, ...], _Cut] = {}
        # With these ZeRO stages, a step ends with exposed gathers of updated weights.
        self._gathers_after = () if costs.assumptions.gathers_beside_forward else (1, 2)

    def of_mesh(self, mesh: Branch, micro_sizes: Sequence[int], choices: Sequence[Choice]) -> tuple[float, float]:
        """Return lower bounds of the seconds of a step and of the bytes of the fullest rank, for all layouts of a
        branch. They hold because some rank has at least the average number of blocks."""
        base, methods = self._base, _methods(choices)
        num_bytes = base.model.num_layers * self._least_state(mesh, choices) / mesh.pipeline
        if base.schedule.file:
            return 0.0, num_bytes
        seconds = math.inf
        # By the roofline, a sample takes no longer in a larger micro-batch: its kernels and calls are not more.
        for size in micro_sizes if self._costs.measured else (max(micro_sizes),):
            embeddings, blocks, heads = self._works((mesh.tensor, mesh.context, size), methods).T[:3]
            block = float(blocks.min())
            whole = base.model.num_layers * block + float((embeddings + heads).min())
            on_average = max(-(-base.model.num_layers // mesh.pipeline) * block, whole / mesh.pipeline)
            seconds = min(seconds, base.batch.global_size // (size * mesh.data) * on_average)
        return seconds * (1.0 - ROUNDING), num_bytes * (1.0 - ROUNDING)

    def of_branch(self, branch: Branch, shapes: Sequence[Shape], choices: Sequence[Choice]) -> tuple[float, float]:
        """Return the same bounds for a branch with a micro-batch size: minima over shapes and methods that may fit.

        The bytes count only blocks, each with the activations of the micro-batches that a rank holds, without their
        inputs.
        """
        if self._base.schedule.file:
            return self.of_mesh(branch, (), choices)
        methods, micro, cuts = _methods(choices), _micro(shapes[0]), [self._cut_of(each) for each in shapes]
        count = self._count(shapes[0])
        helds = [self._figures.held(micro, each) for each in methods]
        # Bytes in addition to a block's input.
        kept = np.array([max(0.0, each.block - each.stream) for each in helds])
        blocks = np.stack([cut.layers_by_rank[1] for cut in cuts])
        held = np.stack([self._contents(cut, count)[0].block for cut in cuts])
        num_bytes = (self._least_state(branch, choices) * blocks + kept[:, None, None] * held).max(axis=2)
        num_bytes *= 1.0 - ROUNDING
        fits = num_bytes <= self._memory_limit
        if not fits.any():
            return math.inf, float(num_bytes.min())
        weights = np.stack([cut.weights(count) for cut in cuts])
        seconds = (self._works(micro, methods) @ weights).max(axis=2).T
        return float(seconds[fits].min() * (1.0 - ROUNDING)), float(num_bytes.min())

    def of(self, shape: Shape, choices: tuple[Choice, ...]) -> tuple[Floats, Floats]:
        """Return lower bounds of the seconds of a step and of the bytes of the fullest rank, shape [choices] each.

        The seconds are infinite for choices whose bytes exceed the memory limit.
        """
        if self._base.schedule.file:  # its stages may be on any rank
            seconds, num_bytes = self.of_mesh(Branch(*shape[:5]), (), choices)
            return np.full(len(choices), seconds), np.full(len(choices), num_bytes)
        cut, count = self._cut_of(shape), self._count(shape)
        works, sizes = self._tables(_micro(shape), shape.data * shape.context, choices)
        held, state = self._contents(cut, count)
        each_bytes = (sizes @ np.array([*held, *state])).max(axis=1)
        fits = each_bytes <= self._memory_limit
        each_seconds = self._seconds(shape, works, choices) if fits.any() else np.full(len(choices), math.inf)
        return np.where(fits, each_seconds, math.inf), each_bytes

    def closer(self, layout: Layout) -> float:
        """Return a tighter lower bound of the seconds of a step, which includes the traffic of each rank's stages."""
        if self._base.schedule.file:
            return 0.0
        shape, slow = layout.shape, self._costs.assumptions.slow_down
        cut, count = self._cut_of(shape), self._count(shape)
        work = self._figures.work(_micro(shape), (layout.sequence, layout.recompute))
        by_rank = work.ravel() @ cut.weights(count)
        gather, reduction = self._figures.traffic(shape[:4], layout.zero)
        # In steps with several updates, sums overlap with more than one backward.
        if layout.zero >= 2 and (gather or reduction) and cut.run.policy.updates_per_step == 1:
            whole, forward = work[:2] @ cut.layers
            counts = self._costs.traffic(layout)
            gathers, sums = cut.layers[1] * gather * counts.gathers / 2, cut.layers[1] * reduction * counts.sums
            more = overlapped(forward, gathers, slow) + overlapped(whole - forward, gathers + sums, slow) - whole
            by_rank += count * cut.by_rank(more)
        after = gather * cut.most if layout.zero in self._gathers_after else 0.0
        return float((by_rank.max() + after) * (1.0 - ROUNDING))

    def _count(self, shape: Shape) -> int:
        """Return the number of micro-batches of a replica in a step."""
        return self._base.batch.global_size // (shape.micro_size * shape.data)

    @cached_method
    def _works(self, micro: Micro, methods: tuple[Method, ...]) -> Floats:
        """Return `LayerFigures.work` of each method, shape [methods, 9]."""
        return np.array([self._figures.work(micro, each).ravel() for each in methods])

    def _least_state(self, branch: Branch, choices: Sequence[Choice]) -> float:
        """Return the minimum bytes of a block between steps."""
        zeros, replicas = {zero for _, zero, _ in choices}, branch.data * branch.context
        return min(self._figures.state(branch.tensor, zero, replicas).block for zero in zeros)

    @cached_method
    def _tables(self, micro: Micro, replicas: int, choices: tuple[Choice, ...]) -> tuple[Floats, Floats]:
        """Return for each choice `LayerFigures.work`, shape [choices, 9], and the bytes of a micro-batch and of the
        state, shape [choices, 12]."""
        methods = tuple((sequence, method) for sequence, _, method in choices)
        states = (self._figures.state(micro[0], zero, replicas) for _, zero, _ in choices)
        helds = (self._figures.held(micro, each) for each in methods)
        return self._works(micro, methods), np.array([(*one, *two) for one, two in zip(helds, states, strict=True)])

    @cached_method
    def _traffic(self, mesh: Mesh, choices: tuple[Choice, ...]) -> tuple[Floats, ...]:
        """Return for each choice the ZeRO stage, and the seconds of a block's gather in the passes, of its exposed
        gather after the step, and of its reduction."""
        zeros = [zero for _, zero, _ in choices]
        gather, reduction = np.array([self._figures.traffic(mesh, zero) for zero in zeros]).T
        return np.array(zeros), gather, gather * np.isin(zeros, self._gathers_after), reduction

    def _seconds(self, shape: Shape, works: Floats, choices: tuple[Choice, ...]) -> Floats:
        """Return the larger of two bounds. The first is each rank's compute and its wait for the first micro-batch.
        The second is the compute and the replicas' traffic of the blocks that some rank has.

        A micro-batch passes all blocks of a stage in a row. Blocks that are still in a buffer from the previous pass
        need no traffic: for each stage of the rank, at most as many blocks as there are buffers.
        """
        (_, weights), (_, gradients) = self._base.zero.whole_layers()
        count, cut = self._count(shape), self._cut_of(shape)
        most, slow = cut.most, self._costs.assumptions.slow_down
        compute = (works @ cut.weights(count)).max(axis=1)
        zeros, gather, after, reduction = self._traffic(shape[:4], choices)
        kept = cut.run.chunks / most
        gathers = np.where(zeros >= 3, gather * max(0.0, 1.0 - weights * kept), 0.0)
        # With one micro-batch, the only sum of a step comes after its last backward.
        reduced = max(0.0, 1.0 - gradients * kept) if count > 1 else 0.0
        sums = np.where(zeros >= 2, reduction * reduced, 0.0)
        whole, forward = works[:, 1], works[:, 4]
        block = overlapped(forward, gathers, slow) + overlapped(whole - forward, gathers + sums, slow)
        seconds = np.where(zeros >= 2, np.maximum(compute, count * most * block), compute)
        return np.asarray((seconds + most * after) * (1.0 - ROUNDING))

    @cached_method
    def _contents(self, cut: "_Cut", count: int) -> tuple[MicrobatchBytes[Floats], StateFigures[Floats]]:
        """Return a lower bound of how often each size counts on each rank, shape [ranks] each."""
        run, held = cut.run, np.zeros(len(cut.run.ranks))
        if (at_peak := find_generator(run.config.schedule.name).held) is not None:
            held[run.by_chunk] = at_peak(run.pipeline, count, run.chunks, schedule_options(run.config))
        (embeddings, blocks, heads), kept = cut.layers_by_rank, cut.by_rank(cut.layers * held)
        some = np.minimum(1.0, blocks)
        # A block's backward runs after the head's, which has freed its tensors of that micro-batch.
        freed = -some * cut.by_rank(cut.layers[2] * np.minimum(1.0, held))
        # A stage's input stays in the message slot in which it arrived; slots are counted once for all layers.
        slots = 1.0 - cut.by_rank(held)
        weights, gradients = (np.minimum(least, blocks) for least, _ in self._base.zero.whole_layers())
        return (
            MicrobatchBytes(kept[1], kept[0], kept[2], some, freed, slots),
            StateFigures(blocks, embeddings, heads, -embeddings * heads, weights, gradients),
        )

    def _cut_of(self, shape: Shape) -> "_Cut":
        key = shape.schedule, shape.chunks, shape.pipeline
        if key not in self._cuts:
            run = self._costs.run(Layout(shape, 0, 0, "none"))
            self._cuts[key] = _Cut(run, run.policy.flushes, run.splits, np.eye(run.pipeline)[list(run.ranks)])
        return self._cuts[key]


def _micro(shape: Shape) -> Micro:
    return shape.tensor, shape.context, shape.micro_size


def _methods(choices: Sequence[Choice]) -> tuple[Method, ...]:
    return tuple(dict.fromkeys((sequence, method) for sequence, _, method in choices))


@dataclass(frozen=True, eq=False)
class _Cut:
    """A model divided into stages. run: a run with these stages. flushes, splits: whether steps of its schedule end
    with an empty pipeline, and whether backwards are split. one_hot: 1 for the rank of a stage, [stages, ranks]."""

    run: RunLayout
    flushes: bool
    splits: bool
    one_hot: Floats

    @cached_property
    def layers(self) -> Floats:
        """Return the numbers of embeddings, blocks and heads of each stage, shape [3, stages]."""
        layers = np.zeros((3, len(self.run.ranks)))
        layers[0, 0] = layers[2, -1] = 1.0
        layers[1] = self.run.stages.units_per_stage - layers[0] - layers[2]
        return layers

    def by_rank(self, values: Floats) -> Floats:
        """Return the sums over the stages of each rank. values: shape [..., stages]."""
        return values @ self.one_hot

    @cached_property
    def layers_by_rank(self) -> Floats:
        """Return the numbers of `layers` of each rank, shape [3, ranks]."""
        return self.by_rank(self.layers)

    @property
    def most(self) -> int:
        """Return the number of blocks on the rank that has the most."""
        return int(self.layers_by_rank[1].max())

    @cached_method
    def weights(self, num_microbatches: int) -> Floats:
        """Return for each rank how often each figure of `LayerFigures.work` counts in a step, shape [9, ranks].

        With a flush, a rank starts when the first micro-batch has passed all stages before the rank's first stage.
        After the last backward of this stage, a micro-batch has to pass the same stages backward. This does not count
        if backwards are split, because another action may be the rank's last one.
        """
        passed = np.concatenate([np.zeros((3, 1)), self.layers.cumsum(axis=1)], axis=1)
        before = passed[:, np.unique(self.run.ranks, return_index=True)[1]]
        forward, backward = float(self.flushes), float(self.flushes and not self.splits)
        return np.concatenate([num_microbatches * self.layers_by_rank, forward * before, backward * before])
