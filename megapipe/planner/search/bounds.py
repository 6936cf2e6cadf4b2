"""Lower bounds of a layout's step time and of its fullest rank's memory.

Bounds depend on how ranks, stages and samples are divided, where stages are placed and whether backwards are split,
but on no schedule's name. A generator may define a tighter bound on the micro-batches that its ranks hold
(`Generator.held`). Bounds only omit costs that `planner.cost.model.estimate` adds, so they never exceed it.

Seconds and bytes of a layer depend on the ranks that share it, on the micro-batch and on the recomputation
(`LayerFigures`); the pipeline, the replicas and the schedule only weight them. So `of_mesh` and `of_branch` bound
whole branches of the space by the best figures of their choices, without creating any layout.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megapipe.config.parallel import is_fp8
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.description import Hardware, hardware_device_type
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.scheduling import schedule_options
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, lay_out, layers_of, predictions_of
from megapipe.layout.units import Unit, UnitCosts, layer_units, tied_unit
from megapipe.planner.cached import cached_method
from megapipe.planner.cost.estimate import ENGINE, Assumptions
from megapipe.planner.cost.layer_costs import group_seconds, layer_exchange_seconds, shard_groups, side_by_side
from megapipe.planner.cost.layer_times import LayerTimes, PhaseSeconds
from megapipe.planner.cost.run_layout import RunLayout, lay_on
from megapipe.planner.cost.step_time import ROUNDING, TrafficCounts, traffic_counts
from megapipe.planner.search.space import Branch, Choice, Configurations, Layout, Recompute, Shape, ZeroStage
from megapipe.schedules.registry import find_generator
from megapipe.spec.attention import attention_path
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.layers import layer_flops, one_of_each
from megapipe.spec.parameters import LayerSpec, tied_names

Floats = npt.NDArray[np.float64]

Mesh = tuple[int, int, int, int]
"""Data, tensor, pipeline and context ranks."""
Micro = tuple[int, int, int]
"""Tensor ranks, context ranks and micro-batch size."""
Method = tuple[int, Recompute]
"""Values of `Layout.sequence` and `recompute`, on which the figures of a micro-batch depend."""
Number = TypeVar("Number", float, Floats)


class LayerWork(NamedTuple):
    """Seconds of a micro-batch in one layer, including exposed waits for tensor and context ranks.

    again: recomputed forward of a layer that is recomputed as a whole.
    """

    forward: float
    backward: float
    again: float

    @property
    def whole(self) -> float:
        """Return the sum of all phases."""
        return self.forward + self.backward + self.again


class MicrobatchWork(NamedTuple):
    """Seconds of one micro-batch in the embedding, in the fastest block and in the head."""

    embedding: LayerWork
    block: LayerWork
    head: LayerWork

    def parts(self) -> list[float]:
        """Return the total seconds of the three layers, then their forwards, then backwards without recomputation."""
        return [*(each.whole for each in self), *(each.forward for each in self), *(each.backward for each in self)]


class MicrobatchBytes(NamedTuple, Generic[Number]):
    """Bytes of one micro-batch on one rank. block, embedding, head: activations saved from a layer's forward to its
    backward. working: activations that the backward of a block recomputes. stream: a message between stages."""

    block: Number
    embedding: Number
    head: Number
    working: Number
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
    """Time and memory figures of the layers of one run on one machine.

    times: times of layers. The times of a micro-batch must depend neither on the pipeline nor on the replicas.
    """

    def __init__(self, base: PretrainConfig, hardware: Hardware, devices: int, times: LayerTimes) -> None:
        self._base, self._hardware, self._devices, self._times = base, hardware, devices, times
        self._configurations = Configurations(base)
        self._layers = layers_of(base)
        self._embedding, *blocks, self._head = self._layers
        self._tied = tied_names(self._layers)
        self._kinds = one_of_each(blocks)
        # Blocks of one kind differ only in their times, if some compute in fp8.
        timed = {(each.variant, is_fp8(base, each.index)): each for each in reversed(blocks)}
        self._blocks = list(timed.values())
        self._precision: Precision = base.training.precision  # type: ignore[assignment]
        self._device = hardware_device_type(hardware)
        self._path = attention_path(base.model, self._precision, self._device, base.data.sequence_length)

    def _costs(self, micro: Micro, method: Method) -> LayoutCosts:
        """Return the sizes of the layers on a single pipeline rank, which has all of them."""
        (tensor, context, micro_size), (sequence, recompute) = micro, method
        data, schedule = self._devices // (tensor * context), self._base.schedule
        shape = Shape(data, tensor, 1, context, micro_size, schedule.name, schedule.chunks)
        config = self._configurations.of(Layout(shape, sequence, 0, recompute))
        return LayoutCosts(config, self._layers, data, self._path, VOCABULARY_ALIGNMENT, device=self._device)

    @cached_method
    def held(self, micro: Micro, method: Method) -> MicrobatchBytes[float]:
        costs = self._costs(micro, method)
        whole, stream = float(min(map(costs.kept, self._kinds))), float(costs.stream)
        edges = float(costs.kept(self._embedding)), float(costs.kept(self._head))
        if costs.config.recompute.method != "full":
            return MicrobatchBytes(whole, *edges, 0.0, stream)
        block = min(whole, stream / costs.config.recompute.every)
        return MicrobatchBytes(block, *edges, max(0.0, whole - stream), stream)

    @cached_method
    def work(self, micro: Micro, method: Method) -> MicrobatchWork:
        config = self._costs(micro, method).config
        works = [self._of_layer(config, each) for each in self._blocks]
        block = min(works, key=lambda work: work.whole)
        if len(self._kinds) > 1:  # the fastest forward and the fastest backward may be those of different blocks
            block = LayerWork(*map(min, zip(*works, strict=True)))
        return MicrobatchWork(self._of_layer(config, self._embedding), block, self._of_layer(config, self._head))

    def _of_layer(self, config: PretrainConfig, layer: LayerSpec) -> LayerWork:
        seconds = self._times.of(config, layer)
        # With recompute.num_blocks, only some of the blocks are recomputed.
        whole = config.recompute.method == "full" and layer.kind == "block"
        again = seconds.recompute if whole and config.recompute.num_blocks is None else 0.0
        backward = seconds.backward_input + seconds.backward_weight + (0.0 if whole else seconds.recompute)
        products, waiting = PhaseSeconds(*seconds[:3]), PhaseSeconds()
        parallel, kind = config.parallel, (layer.kind, layer.index)
        micro = parallel.tensor, parallel.context, config.batch.micro_size
        if parallel.tensor > 1:
            chunks = parallel.sequence_chunks
            traffic = self._waiting(micro, chunks if parallel.sequence else 0, "tensor")[kind]
            # Chunks of sequence parallelism overlap as in `cost.layer_costs`, but without slow-down.
            exposed = _outlasting(traffic.scaled(1.0 - 1.0 / chunks), products)
            waiting = exposed.plus(traffic.scaled(1.0 / chunks)) if chunks > 1 else traffic
        if parallel.context > 1 and seconds.waits is None:
            traffic = self._waiting(micro, 0, "context")[kind]
            # Rings overlap with attention, which takes no longer than all products together.
            waiting = waiting.plus(_outlasting(traffic, products) if parallel.context_attention == "ring" else traffic)
        again += waiting.forward if again else 0.0
        return LayerWork(seconds.forward + waiting.forward, backward + waiting.backward_input, again)

    @cached_method
    def _waiting(self, micro: Micro, sequence: int, group: str) -> dict[tuple[str, int], PhaseSeconds]:
        """Return the exchange times of a group, tensor or context, for each layer by its kind and index."""
        (tensor, context, _), layers = micro, (self._embedding, *self._blocks, self._head)
        costs = self._costs(micro, (sequence, "none"))
        placement = self.placement(costs.data, tensor, 1, context)
        return {(each.kind, each.index): layer_exchange_seconds(costs, placement, each, group) for each in layers}

    def _units(self, tensor: int, zero: ZeroStage, replicas: int) -> UnitCosts:
        parallel = replace(self._base.parallel, tensor=tensor, data=replicas, context=1)
        config = replace(self._base, parallel=parallel, zero=replace(self._base.zero, stage=zero))
        return UnitCosts(config, replicas, VOCABULARY_ALIGNMENT)

    @cached_method
    def state(self, tensor: int, zero: ZeroStage, replicas: int) -> StateFigures[float]:
        units = self._units(tensor, zero, replicas)
        embedding, head, *kinds = (
            layer_units(layer, self._tied, units.config.zero) for layer in (self._embedding, self._head, *self._kinds)
        )

        def lasting(members: Iterable[Unit]) -> float:
            return float(sum(units.state(unit).total for unit in members))

        ends = {spec.name for spec in self._head.parameters.values()}
        tied = lasting(tied_unit(names, [self._head]) for names in self._tied if names[0] in ends)
        sharded = 0
        if units.shards > 1:
            sharded = min(sum(units.elements(unit) for unit in each if units.shards_of(unit) > 1) for each in kinds)
        weights = float(sharded * ELEMENT_BYTES[self._precision] if zero >= 3 else 0)
        gradients = float(sharded * FULL_BYTES if zero >= 2 else 0)
        block = min(map(lasting, kinds))
        return StateFigures(block, lasting(embedding) + tied, lasting(head) + tied, tied, weights, gradients)

    @cached_method
    def placement(self, data: int, tensor: int, pipeline: int, context: int) -> Placement:
        """Return the ranks of a mesh on the nodes."""
        sizes = {"data": data, "tensor": tensor, "pipeline": pipeline, "context": context}
        return Placement(self._hardware, sizes)

    @cached_method
    def traffic(self, data: int, tensor: int, pipeline: int, context: int, zero: ZeroStage) -> tuple[float, float]:
        """Return the seconds to gather a block's weights, and to reduce its gradients, over its replicas. They are 0
        without sharding or with one replica, and where finding the slowest group would take long: for measured links,
        or for a mesh that divides nodes unevenly."""
        placement, replicas = self.placement(data, tensor, pipeline, context), data * context
        if zero == 0 or replicas == 1 or placement.inside is None or self._hardware.link_matrix is not None:
            return 0.0, 0.0
        groups = placement.groups("data", "context")
        slowest = min(groups, key=lambda group: (group.crossing or group.inside.bandwidth, -group.size))
        units = self._units(tensor, zero, replicas)

        def seconds(layer: LayerSpec) -> tuple[float, float]:
            gather = reduction = 0.0
            for unit in layer_units(layer, self._tied, units.config.zero):
                if units.shards_of(unit) == 1:  # whole experts are reduced once per step
                    continue
                group, _ = shard_groups(slowest, units.shards_of(unit))
                gather += group_seconds([each for calls in units.gather(unit).values() for each in calls], group)
                reduction += group_seconds([each for calls in units.reduction(unit).values() for each in calls], group)
            return gather, reduction

        gathers, reductions = zip(*map(seconds, self._kinds), strict=True)
        return min(gathers), min(reductions)


def _outlasting(traffic: PhaseSeconds, work: PhaseSeconds) -> PhaseSeconds:
    """Return for each phase the seconds by which traffic takes longer than the work that overlaps with it."""
    return PhaseSeconds(*(max(0.0, sent - hidden) for sent, hidden in zip(traffic, work, strict=True)))


class StageLimits(NamedTuple):
    """Maximum numbers of blocks. most: in any stage. last: in the last stage, which also has the head."""

    most: int
    last: int


class StageLimiter:
    """Maximum numbers of blocks that `schedules.balance.balance_layers` assigns to stages. It minimizes the FLOPs of
    the largest stage. If all blocks are alike, this minimum follows from counts alone."""

    def __init__(self, base: PretrainConfig) -> None:
        self._by_hand, self._blocks = base.parallel.layers_per_stage, base.model.num_layers
        length, predictions = base.data.sequence_length, predictions_of(base)
        self._base, layers = base, layers_of(base)
        self._alike = len(one_of_each(layers[1:-1])) == 1
        embedding, block, *_, head = layers
        self._embedding, self._block, self._head = (
            float(layer_flops(base.model, layer, 1, length, predictions, base.recompute.logits).executed)
            for layer in (embedding, block, head)
        )

    def least(self, pipeline: int, chunks: int) -> Floats:
        """Return the minimum number of blocks of every stage, shape [pipeline, chunks]: the number that does not
        fit into all other stages, and at least one for stages between the first and the last."""
        stages, blocks = pipeline * chunks, self._blocks
        limits, minima = self.of(stages), np.zeros((pipeline, chunks))
        if stages == 1:
            return minima + blocks
        left = blocks - (stages - 2) * limits.most - limits.last
        minima += max(1, left)
        minima[0, 0] = max(0, left)
        minima[-1, -1] = max(0, blocks - (stages - 1) * limits.most)
        return minima

    @cached_method
    def of(self, num_stages: int) -> StageLimits:
        if self._by_hand is not None or num_stages == 1:
            most = max(self._by_hand or [self._blocks])
            return StageLimits(most, most)
        if not self._alike:
            sizes = self._divided(num_stages)
            return StageLimits(max(sizes), sizes[-1])
        edges = (0.0, self._embedding, self._head)
        tried = sorted({edge + count * self._block for edge in edges for count in range(self._blocks + 1)})
        least = next(each for each in tried if self._fits(each, num_stages))
        return StageLimits(self._room(least, 0.0), self._room(least, self._head))

    def _divided(self, num_stages: int) -> list[int]:
        """Return the blocks of each stage."""
        base, length = self._base, self._base.data.sequence_length
        layers, logits = layers_of(base), base.recompute.logits
        laid = lay_out(layers, base.model, num_stages, length, None, predictions_of(base), logits)
        return [len(laid.blocks(stage)) for stage in range(num_stages)]

    def _fits(self, bottleneck: float, num_stages: int) -> bool:
        room = self._room(bottleneck, self._embedding) + self._room(bottleneck, self._head)
        room += (num_stages - 2) * self._room(bottleneck, 0.0)
        return bottleneck >= max(self._embedding, self._head) and room >= self._blocks

    def _room(self, bottleneck: float, taken: float) -> int:
        # Round towards more blocks, to compensate for rounding errors in sums of FLOPs.
        return math.floor((bottleneck - taken) / self._block * (1 + ROUNDING) + ROUNDING)


class LayoutBounds:
    """Lower bounds of layouts of one run on one machine. See `LayerFigures` and `estimate` for the arguments."""

    def __init__(
        self,
        base: PretrainConfig,
        hardware: Hardware,
        devices: int,
        times: LayerTimes,
        assumptions: Assumptions = ENGINE,
    ) -> None:
        self._base, self._hardware, self._assumptions = base, hardware, assumptions.on(hardware)
        self._memory_limit = max(node.device.memory_bytes for node in hardware.nodes(devices))
        self._figures, self._limits = LayerFigures(base, hardware, devices, times), StageLimiter(base)
        self._configurations = Configurations(base)
        # With these ZeRO stages, a step ends with exposed gathers of updated weights.
        self._gathers_after = () if assumptions.gathers_beside_forward else (1, 2)
        self._cuts: dict[tuple[object, ...], _Cut] = {}
        self._counts: dict[tuple[object, ...], TrafficCounts] = {}

    def of_mesh(self, mesh: Branch, micro_sizes: Sequence[int], choices: Sequence[Choice]) -> tuple[float, float]:
        """Return lower bounds of the seconds of a step and of the bytes of the fullest rank, for all layouts of a
        branch. They hold because some rank has at least the average number of blocks."""
        base, methods = self._base, _methods(choices)
        num_bytes = base.model.num_layers * self._least_state(mesh, choices) / mesh.pipeline
        if base.schedule.file:
            return 0.0, num_bytes
        seconds = math.inf
        for size in micro_sizes:
            embeddings, blocks, heads = self._works((mesh.tensor, mesh.context, size), methods).T[:3]
            block = float(blocks.min())
            whole = base.model.num_layers * block + float((embeddings + heads).min())
            on_average = max(self._most_blocks(mesh) * block, whole / mesh.pipeline)
            seconds = min(seconds, base.batch.global_size // (size * mesh.data) * on_average)
        return seconds * (1.0 - ROUNDING), num_bytes * (1.0 - ROUNDING)

    def of_branch(self, branch: Branch, shapes: Sequence[Shape], choices: Sequence[Choice]) -> tuple[float, float]:
        """Return the same bounds for a branch with a micro-batch size: minima over shapes and methods that may fit.

        The bytes count only blocks, spread over the ranks as in `_num_bytes`, each with the activations of the
        micro-batches that a rank holds, without their inputs.
        """
        if self._base.schedule.file:
            return self.of_mesh(branch, (), choices)
        methods, count, blocks = _methods(choices), self._count(shapes[0]), self._base.model.num_layers
        micro = _micro(shapes[0])
        helds = [self._figures.held(micro, each) for each in methods]
        kept = np.array([max(0.0, each.block - each.stream) for each in helds])  # in addition to a block's input
        always = np.stack([self._held(each.schedule, each.chunks, each.pipeline, count).always for each in shapes])
        each_block = self._least_state(branch, choices) + always[:, None, :] * kept[:, None]
        num_bytes = blocks / (1.0 / each_block).sum(axis=2) * (1.0 - ROUNDING)
        fits = num_bytes <= self._memory_limit
        if not fits.any():
            return math.inf, float(num_bytes.min())
        weights = np.stack([self._cut_of(each).weights(count) for each in shapes])
        seconds = (self._works(micro, methods) @ weights).max(axis=2)
        return float(seconds[fits].min() * (1.0 - ROUNDING)), float(num_bytes.min())

    def of(self, shape: Shape, choices: tuple[Choice, ...]) -> tuple[Floats, Floats]:
        """Return lower bounds of the seconds of a step and of the bytes of the fullest rank, shape [choices] each.

        The seconds are infinite for choices whose bytes exceed the memory limit.
        """
        table = self._table(_micro(shape), shape.data * shape.context, choices)
        num_bytes = self._num_bytes(shape, table)
        fits = num_bytes <= self._memory_limit
        if not fits.any():
            return np.full(len(choices), math.inf), num_bytes
        return np.where(fits, self._seconds(shape, table, choices), math.inf), num_bytes

    def closer(self, layout: Layout) -> float:
        """Return a tighter lower bound of the seconds of a step, which includes the traffic of each rank's stages."""
        if self._base.schedule.file:
            return 0.0
        shape, count, slow = layout.shape, self._count(layout.shape), self._assumptions.slow_down
        cut = self._cut_of(shape)
        micro, method = _micro(shape), (layout.sequence, layout.recompute)
        work, by_rank = self._figures.work(micro, method), self._works(micro, (method,))[0] @ cut.weights(count)
        gather, reduction = self._figures.traffic(*shape[:4], layout.zero)
        # In steps with several updates, sums overlap with more than one backward.
        if layout.zero >= 2 and (gather or reduction) and cut.updates_per_step == 1:
            forward = cut.together(*(each.forward for each in work))
            backward = cut.together(*(each.backward + each.again for each in work))
            if (key := layout.traffic(self._base)) not in self._counts:
                self._counts[key] = traffic_counts(self._laid(layout, cut.run))
            counts = self._counts[key]
            gathers = cut.blocks * gather * counts.gathers / 2
            sums = cut.blocks * reduction * counts.sums
            more = side_by_side(forward, gathers, slow) - forward
            more += side_by_side(backward, gathers + sums, slow) - backward
            by_rank += count * np.bincount(cut.ranks, more)
        after = gather * self._most_blocks(shape) if layout.zero in self._gathers_after else 0.0
        return float((by_rank.max() + after) * (1.0 - ROUNDING))

    def _count(self, shape: Shape) -> int:
        """Return the number of micro-batches of a replica in a step."""
        return self._base.batch.global_size // (shape.micro_size * shape.data)

    def _most_blocks(self, shape: Shape | Branch) -> int:
        """Return a lower bound of the number of blocks on the rank that has the most."""
        return -(-self._base.model.num_layers // shape.pipeline)

    @cached_method
    def _works(self, micro: Micro, methods: tuple[Method, ...]) -> Floats:
        """Return `MicrobatchWork.parts` of each method, shape [methods, 9]."""
        return np.array([self._figures.work(micro, each).parts() for each in methods])

    def _least_state(self, branch: Branch, choices: Sequence[Choice]) -> float:
        """Return the minimum bytes of a block between steps."""
        zeros, replicas = {zero for _, zero, _ in choices}, branch.data * branch.context
        return min(self._figures.state(branch.tensor, zero, replicas).block for zero in zeros)

    @cached_method
    def _table(self, micro: Micro, replicas: int, choices: tuple[Choice, ...]) -> "_Table":
        methods = [(sequence, method) for sequence, _, method in choices]
        works = np.array([self._figures.work(micro, each).parts() for each in methods])
        helds = np.array([self._figures.held(micro, each) for each in methods])
        states = np.array([self._figures.state(micro[0], zero, replicas) for _, zero, _ in choices])
        return _Table(works, MicrobatchBytes(*helds.T[:, :, None]), StateFigures(*states.T[:, :, None]))

    @cached_method
    def _traffic(self, mesh: Mesh, choices: tuple[Choice, ...]) -> tuple[Floats, ...]:
        """Return for each choice the ZeRO stage, and the seconds of a block's gather in the passes, of its exposed
        gather after the step, and of its reduction."""
        zeros = [zero for _, zero, _ in choices]
        gather, reduction = np.array([self._figures.traffic(*mesh, zero) for zero in zeros]).T
        return np.array(zeros), gather, gather * np.isin(zeros, self._gathers_after), reduction

    def _seconds(self, shape: Shape, table: "_Table", choices: tuple[Choice, ...]) -> Floats:
        """Return the larger of two bounds. The first is each rank's compute and its wait for the first micro-batch.
        The second is the compute and the replicas' traffic of the blocks that some rank has.

        A micro-batch passes all blocks of a stage in a row. Blocks that are still in a buffer from the previous pass
        need no traffic: for each stage of the rank, at most as many blocks as there are buffers.
        """
        if self._base.schedule.file:
            return np.zeros(len(choices))
        zero, count, most = self._base.zero, self._count(shape), self._most_blocks(shape)
        cut, slow = self._cut_of(shape), self._assumptions.slow_down
        compute = (table.work @ cut.weights(count)).max(axis=1)
        zeros, gather, after, reduction = self._traffic(shape[:4], choices)
        kept = cut.run.chunks / most
        gathers = np.where(zeros >= 3, gather * max(0.0, 1.0 - zero.weight_buffers * kept), 0.0)
        # With one micro-batch, the only sum of a step comes after its last backward.
        reduced = max(0.0, 1.0 - zero.gradient_buffers * kept) if count > 1 else 0.0
        sums = np.where(zeros >= 2, reduction * reduced, 0.0)
        whole, forward = table.work[:, 1], table.work[:, 4]
        block = side_by_side(forward, gathers, slow) + side_by_side(whole - forward, gathers + sums, slow)
        seconds = np.where(zeros >= 2, np.maximum(compute, count * most * block), compute)
        return np.asarray((seconds + most * after) * (1.0 - ROUNDING))

    def _num_bytes(self, shape: Shape, table: "_Table") -> Floats:
        """Return a lower bound of the bytes of the fullest rank.

        Rank r with n blocks holds at least c_r n bytes plus other bytes. The first j ranks have at least R blocks,
        because the other ranks have no room for more. If these are spread as evenly as possible, in proportion to
        1 / c_r, each rank holds R / sum(1 / c_r) bytes, and no division has a fullest rank below that. The result is
        the maximum over j.
        """
        zero, kept, state = self._base.zero, table.held, table.state
        if self._base.schedule.file:  # its stages may be on any rank
            return self._base.model.num_layers * state.block[:, 0] / shape.pipeline
        held = self._held(shape.schedule, shape.chunks, shape.pipeline, self._count(shape))
        each_block = state.block + held.always * kept.block
        # A stage's input stays in the message slot in which it arrived; slots are counted once for all layers.
        other = held.more * kept.block + held.slots * kept.stream
        other[:, :1] += state.embedding + held.first * kept.embedding
        if held.ends_last:
            other[:, -1:] += state.head + held.last * kept.head
        if shape.pipeline == 1:
            other -= state.tied
        if held.fewest:
            if held.ends_last:
                # A block's backward runs after the head's, which has freed its tensors of that micro-batch.
                other[:, -1:] -= min(held.last, 1.0) * np.minimum(kept.head, kept.working)
            other += kept.working + min(zero.weight_buffers, held.fewest) * state.weights
            other += min(zero.gradient_buffers, held.fewest) * state.gradients
        shares = 1.0 / each_block
        bounds = (held.needed + (other * shares).cumsum(axis=1)) / shares.cumsum(axis=1)
        return np.asarray(bounds.max(axis=1))

    @cached_method
    def _held(self, schedule: str, chunks: int | None, pipeline: int, count: int) -> "_Held":
        """Return minimum contents of ranks, which depend neither on replicas nor on tensor ranks."""
        base, generator = self._base, find_generator(schedule)
        stages = generator.chunks if chunks is None else chunks
        ends_last = generator.placement(pipeline, stages).stages[-1].rank == pipeline - 1
        held = least = np.zeros((pipeline, stages))
        if ends_last and base.parallel.layers_per_stage is None:
            least = self._limits.least(pipeline, stages)
        if generator.held is not None:
            held = generator.held(pipeline, count, stages, schedule_options(base))
        limits = self._limits.of(pipeline * stages)
        room = np.full(pipeline, float(stages * limits.most))
        room[-1] += limits.last - limits.most if ends_last else 0
        after = room[::-1].cumsum()[::-1] - room
        always, fewest = held.min(axis=1), int(least.sum(axis=1).min())
        more = ((held - always[:, None]) * least).sum(axis=1)
        first, last, needed = float(held[0, 0]), float(held[-1, -1]), np.maximum(0.0, base.model.num_layers - after)
        return _Held(always, more, 1.0 - held.sum(axis=1), first, last, needed, fewest, ends_last)

    def _cut_of(self, shape: Shape) -> "_Cut":
        key = shape.schedule, shape.chunks, shape.pipeline
        if key not in self._cuts:
            run = self._laid(Layout(shape, 0, 0, "none"))
            blocks = np.array(run.stages.units_per_stage, dtype=np.float64)
            blocks[0] -= 1
            blocks[-1] -= 1
            policy = run.policy
            updates = policy.updates_per_step
            self._cuts[key] = _Cut(run, blocks, np.array(run.ranks), policy.flushes, run.splits, updates)
        return self._cuts[key]

    def _laid(self, layout: Layout, like: RunLayout | None = None) -> RunLayout:
        placement = self._figures.placement(*layout.shape[:4])
        return lay_on(self._configurations.of(layout), placement, like)


def _micro(shape: Shape) -> Micro:
    return shape.tensor, shape.context, shape.micro_size


def _methods(choices: Sequence[Choice]) -> tuple[Method, ...]:
    return tuple(dict.fromkeys((sequence, method) for sequence, _, method in choices))


class _Held(NamedTuple):
    """Minimum contents of pipeline ranks, shape [pipeline] unless it is a number.

    always: micro-batches of each block. more: additional micro-batches, summed over all blocks. slots: 1 minus the
    micro-batches of all chunks, whose inputs are in the rank's message slots. first, last: micro-batches of the
    embedding and of the head. needed: blocks on the ranks up to and including this one. fewest: blocks on any rank.
    ends_last: whether the head is on the last rank.
    """

    always: Floats
    more: Floats
    slots: Floats
    first: float
    last: float
    needed: Floats
    fewest: int
    ends_last: bool


class _Table(NamedTuple):
    """Figures of a rank for each choice of a shape. work: `MicrobatchWork.parts`, shape [choices, 9]. held, state:
    bytes, shape [choices, 1]."""

    work: Floats
    held: MicrobatchBytes[Floats]
    state: StateFigures[Floats]


@dataclass(frozen=True, eq=False)
class _Cut:
    """A model divided into stages. run: a run with these stages. blocks, ranks: number of blocks and rank of every
    stage. flushes, splits, updates_per_step: properties of the schedule; `splits`: whether backwards are split."""

    run: RunLayout
    blocks: Floats
    ranks: npt.NDArray[np.int64]
    flushes: bool
    splits: bool
    updates_per_step: int

    def together(self, embedding: float, block: float, head: float) -> Floats:
        """Return the sum over the layers of each stage, shape [stages]."""
        sums = self.blocks * block
        sums[0] += embedding
        sums[-1] += head
        return sums

    @cached_method
    def weights(self, num_microbatches: int) -> Floats:
        """Return for each rank how often each of `MicrobatchWork.parts` counts in a step, shape [9, ranks].

        With a flush, a rank starts when the first micro-batch has passed all stages before the rank's first stage.
        After the last backward of this stage, a micro-batch has to pass the same stages backward. This does not count
        if backwards are split, because another action may be the rank's last one.
        """
        layers, before = self._layers
        forward, backward = float(self.flushes), float(self.flushes and not self.splits)
        return np.concatenate([num_microbatches * layers, forward * before, backward * before])

    @cached_property
    def _layers(self) -> tuple[Floats, Floats]:
        """Return the numbers of embeddings, blocks and heads on each rank, and in the stages before its first one;
        both have shape [3, ranks]."""
        layers = np.zeros((3, len(self.blocks)))
        layers[0, 0], layers[1], layers[2, -1] = 1.0, self.blocks, 1.0
        by_rank = np.stack([np.bincount(self.ranks, each, self.run.pipeline) for each in layers]).astype(np.float64)
        before: Floats = np.concatenate([np.zeros((3, 1)), layers.cumsum(axis=1)], axis=1)
        return by_rank, before[:, np.unique(self.ranks, return_index=True)[1]]
