"""What no layout can go below: seconds by its compute, bytes by its state and the activations in flight.

Both leave out what only ever adds, so that they stay below `planner.cost.model.estimate` and need no cut of the model
into stages: messages, reductions, gathers and updates of the time; of the memory what a step needs for a moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from megapipe.config.run import PretrainConfig
from megapipe.costs.attention_path import attention_path
from megapipe.costs.layout import LayoutCosts
from megapipe.costs.memory import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.costs.parameters import LayerSpec, tied_names
from megapipe.costs.units import Unit, UnitCosts
from megapipe.planner.cost.exchanges import layer_exchange_seconds
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.hardware.description import Hardware
from megapipe.planner.hardware.device_type import hardware_device_type
from megapipe.planner.hardware.placement import Placement
from megapipe.planner.runs.layout import VOCABULARY_ALIGNMENT, layers_of
from megapipe.planner.search.layouts import Layout, Shape
from megapipe.planner.search.space import Recompute, ZeroStage
from megapipe.planner.search.stage_limits import StageLimiter
from megapipe.schedules.generators.registry import find_generator

Floats = npt.NDArray[np.float64]

FILLS = {"1f1b", "gpipe", "interleaved_1f1b", "modular"}
"""Schedules in which a step's first and last micro-batch pass all other ranks, a chunk at a time."""
WARMS_UP = {"1f1b", "2bw", "pipedream", "zb_h1", "zb_h2"}
"""Schedules whose rank r holds at least p - r micro-batches at its fullest."""
COLLECTS = {"gpipe", "modular"}
"""Schedules whose ranks hold all micro-batches of a step."""


@dataclass(frozen=True)
class Micro:
    """One micro-batch on one rank of a micro-batch's layout: seconds and bytes by layer.

    block, embedding, head: seconds, forward and backward, recomputed layers again. block_bytes to head_bytes: held
    until the backward. stream: bytes of a message between stages.
    """

    block: float
    embedding: float
    head: float
    block_bytes: float
    embedding_bytes: float
    head_bytes: float
    stream: float


@dataclass(frozen=True)
class State:
    """Bytes between steps of a block, and of the first and last layer with a tied weight of their own.

    tied: of these, what both hold and one rank would hold once. buffer: of a block, whole for a while under ZeRO 2
    and 3.
    """

    block: float
    embedding: float
    head: float
    tied: float
    buffer: float


class LayoutBounds:
    """Lower bounds of layouts of one run on one machine.

    times: of layers, as the estimates use them; of a micro-batch they may depend on what one rank does with it, not
    on the pipeline or the replicas.
    """

    def __init__(self, base: PretrainConfig, hardware: Hardware, devices: int, times: LayerTimes) -> None:
        self._base, self._hardware, self._devices, self._times = base, hardware, devices, times
        layers = layers_of(base)
        self._tied = set(tied_names(layers))
        self._specs = {spec.name: spec for layer in layers for spec in layer.parameters.values()}
        # Blocks differ in their times alone, where only some compute in fp8; the first of either kind stands for all.
        training = base.training
        slow = {index for index in (0, training.fp8_first_kept, base.model.num_layers - 1)}
        self._blocks = [layer for layer in layers if layer.kind == "block" and layer.index in slow]
        self._embedding = next(layer for layer in layers if layer.kind == "embedding")
        self._head = next(layer for layer in layers if layer.kind == "head")
        precision: Precision = training.precision  # type: ignore[assignment]
        self._precision = precision
        self._layers = layers
        self._path = attention_path(
            base.model, precision, hardware_device_type(hardware), base.data.sequence_length
        )
        self._limits = StageLimiter(base)
        self._micro = cache(self._find_micro)
        self._state = cache(self._find_state)

    def of(self, shape: Shape, layouts: Sequence[Layout]) -> tuple[list[float], list[float]]:
        """Seconds of a step and bytes of the fullest rank, of layouts that all have this shape."""
        micros = [
            self._micro(shape.tensor, shape.context, shape.micro_size, each.sequence, each.recompute)
            for each in layouts
        ]
        replicas = shape.data * shape.context
        states = [self._state(shape.tensor, each.zero, replicas) for each in layouts]
        seconds = [self._seconds(shape, each) for each in micros]
        return seconds, self._num_bytes(shape, micros, states).tolist()

    def _chunks(self, shape: Shape) -> int:
        if self._base.schedule.file:
            return 1
        return find_generator(shape.schedule).chunks if shape.chunks is None else shape.chunks

    def _count(self, shape: Shape) -> int:
        return self._base.batch.global_size // (shape.micro_size * shape.data)

    def _seconds(self, shape: Shape, micro: Micro) -> float:
        """m micro-batches on the busiest rank, and under a flush one of them on each of the others."""
        blocks, pipeline = self._base.model.num_layers, shape.pipeline
        whole = blocks * micro.block + micro.embedding + micro.head
        busiest = max(whole / pipeline, -(-blocks // pipeline) * micro.block)
        count = self._count(shape)
        if shape.schedule not in FILLS or self._base.schedule.file or self._base.schedule.two_bp:
            return count * busiest
        chunks = self._chunks(shape)
        return count * busiest + (whole - busiest) / chunks

    def _in_flight(self, shape: Shape) -> Floats:
        """Micro-batches of all its layers that each pipeline rank holds at the least at its fullest."""
        pipeline, count = shape.pipeline, self._count(shape)
        ranks = np.arange(pipeline)
        schedule = self._base.schedule
        if schedule.file:
            return np.ones(pipeline)
        if shape.schedule in COLLECTS and not schedule.two_bp:
            return np.full(pipeline, float(count))
        if shape.schedule in WARMS_UP:
            return np.minimum(pipeline - ranks, count).astype(np.float64)
        if shape.schedule == "interleaved_1f1b" and schedule.group_size is None and count % pipeline == 0:
            return np.minimum(pipeline, 2 * (pipeline - 1 - ranks) + 1).astype(np.float64)
        return np.ones(pipeline)

    def _num_bytes(self, shape: Shape, micros: Sequence[Micro], states: Sequence[State]) -> Floats:
        """Of the fullest rank.

        Rank r with n blocks holds c_r n bytes and something besides. The first j ranks have at least R of the blocks,
        as the others have no room for more; spread as evenly as can be, in proportion to 1 / c_r, these take
        R / sum(1 / c_r), and no cut has a fullest rank below that. The best j counts.
        """
        pipeline, chunks = shape.pipeline, self._chunks(shape)
        held = self._in_flight(shape)
        stages = pipeline * chunks
        limits = self._limits.of(stages)
        room = np.full(pipeline, float(chunks * limits.most))
        room[-1] += limits.last - limits.most
        behind = room[::-1].cumsum()[::-1] - room  # of the ranks behind each
        blocks = self._base.model.num_layers
        needed = np.maximum(0.0, blocks - behind)

        def column(values: list[float]) -> Floats:
            return np.array(values)[:, None]

        each = column([state.block for state in states]) + held * column([micro.block_bytes for micro in micros])
        stream = column([micro.stream for micro in micros])
        # A stage's input may lie in the slot that it arrived in, which the estimate counts once for all.
        besides = -held * stream * chunks + stream
        first = column([state.embedding for state in states]) + held[0] * column(
            [micro.embedding_bytes for micro in micros]
        )
        last = column([state.head for state in states]) + held[-1] * column([micro.head_bytes for micro in micros])
        besides = np.broadcast_to(besides, each.shape).copy()
        besides[:, :1] += first
        if self._head_is_last(shape):
            besides[:, -1:] += last
        if pipeline == 1:
            besides -= column([state.tied for state in states])
        if limits.most and self._all_have_blocks(stages):
            besides += column([state.buffer for state in states])
        shares = 1.0 / each
        return ((needed + (besides * shares).cumsum(axis=1)) / shares.cumsum(axis=1)).max(axis=1)

    def _head_is_last(self, shape: Shape) -> bool:
        return not self._base.schedule.file and shape.schedule != "zb_v"

    def _all_have_blocks(self, stages: int) -> bool:
        """Whether no stage can be without a block, as the others have no room for all."""
        limits = self._limits.of(stages)
        if self._base.parallel.layers_per_stage is not None:
            return False
        blocks = self._base.model.num_layers
        return blocks > (stages - 2) * limits.most + limits.last and blocks > (stages - 1) * limits.most

    def _config(self, tensor: int, context: int, micro_size: int, sequence: bool, recompute: Recompute) -> PretrainConfig:
        base = self._base
        replicas = self._devices // (tensor * context)
        return replace(
            base,
            parallel=replace(
                base.parallel, data=replicas, tensor=tensor, context=context, pipeline=1, sequence=sequence
            ),
            batch=replace(base.batch, micro_size=micro_size),
            recompute=replace(base.recompute, method=recompute),
            zero=replace(base.zero, stage=0),
        )

    def _find_micro(
        self, tensor: int, context: int, micro_size: int, sequence: bool, recompute: Recompute
    ) -> Micro:
        config = self._config(tensor, context, micro_size, sequence, recompute)
        costs = LayoutCosts(config, self._layers, config.parallel.data or 1, self._path, VOCABULARY_ALIGNMENT)
        sizes = {"data": config.parallel.data or 1, "context": context, "tensor": tensor}
        placement = Placement(self._hardware, sizes)
        block = self._blocks[0]
        kept = float(costs.kept(block))
        if recompute == "full":
            kept = min(kept, costs.stream / config.recompute.every)
        return Micro(
            min(self._layer_seconds(config, costs, placement, each) for each in self._blocks),
            self._layer_seconds(config, costs, placement, self._embedding),
            self._layer_seconds(config, costs, placement, self._head),
            kept,
            float(costs.kept(self._embedding)),
            float(costs.kept(self._head)),
            float(costs.stream),
        )

    def _layer_seconds(
        self, config: PretrainConfig, costs: LayoutCosts, placement: Placement, layer: LayerSpec
    ) -> float:
        """Kernels, and waiting for tensor ranks where that hides behind nothing."""
        found = self._times.of(config, layer)
        again = found.recompute if config.recompute.num_blocks is None else 0.0
        total = found.forward + found.backward_input + found.backward_weight + again
        if config.parallel.tensor == 1 or config.parallel.sequence_chunks > 1:
            return total
        waiting = layer_exchange_seconds(costs, placement, layer, "tensor")
        runs_again = config.recompute.method == "full" and config.recompute.num_blocks is None
        twice = waiting.forward if runs_again and layer.kind == "block" else 0.0
        return total + waiting.forward + waiting.backward_input + twice

    def _find_state(self, tensor: int, zero: ZeroStage, replicas: int) -> State:
        base = self._base
        config = replace(
            base,
            parallel=replace(base.parallel, tensor=tensor, data=replicas, context=1),
            zero=replace(base.zero, stage=zero),
        )
        units = UnitCosts(config, replicas, VOCABULARY_ALIGNMENT)
        own = {
            layer.kind: Unit(tuple(spec for spec in layer.parameters.values() if spec.name not in self._tied))
            for layer in (self._embedding, self._blocks[0], self._head)
        }
        tied = float(sum(units.state(Unit((self._specs[name],), tied=True)).total for name in self._tied))
        narrow = ELEMENT_BYTES[self._precision]
        whole = units.elements(own["block"]) if units.shards > 1 else 0
        return State(
            block=float(units.state(own["block"]).total),
            embedding=units.state(own["embedding"]).total + tied,
            head=units.state(own["head"]).total + tied,
            tied=tied,
            buffer=float(whole * (narrow * (zero >= 3) + FULL_BYTES * (zero >= 2))),
        )
