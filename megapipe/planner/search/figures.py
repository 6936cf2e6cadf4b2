"""Seconds and bytes of single layers on one rank, by the few fields of a layout that they depend on, found once."""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.device_type import hardware_device_type
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, layers_of
from megapipe.layout.units import Unit, UnitCosts
from megapipe.planner.cost.exchanges import group_seconds, layer_exchange_seconds, shard_groups
from megapipe.planner.cost.layer_times import LayerTimes, PhaseSeconds
from megapipe.planner.search.layouts import Shape
from megapipe.planner.search.space import Recompute, ZeroStage
from megapipe.spec.attention_path import attention_path
from megapipe.spec.dtypes import Precision
from megapipe.spec.parameters import LayerSpec, tied_names


@dataclass(frozen=True)
class LayerWork:
    """Seconds of a micro-batch in one layer, waiting for tensor ranks included where that hides behind nothing.

    again: of what runs again as a whole.
    """

    forward: float
    backward: float
    again: float

    @property
    def whole(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.again


@dataclass(frozen=True)
class MicrobatchSeconds:
    """Seconds of one micro-batch on one rank. embedding, block, head: of a layer, of blocks the fastest; whole: of all
    layers."""

    embedding: LayerWork
    block: LayerWork
    head: LayerWork
    whole: float

    def parts(self) -> list[float]:
        """Return all seconds of the embedding, a block and the head, then their forwards, then their backwards without
        recomputation."""
        layers = (self.embedding, self.block, self.head)
        return [getattr(layer, part) for part in ("whole", "forward", "backward") for layer in layers]


@dataclass(frozen=True)
class MicrobatchBytes:
    """Bytes of one micro-batch on one rank. A layer's are held until its backward; working: of a block that runs again
    besides; stream: of a message between stages."""

    block: float
    embedding: float
    head: float
    working: float
    stream: float


@dataclass(frozen=True)
class State:
    """Bytes between steps of a block, of the embedding and of the head, each with its use of tied weights.

    tied: of these, what one rank with both uses would hold once. elements: of a block's flat buffer, whole; shards:
    ranks that share it.
    """

    block: float
    embedding: float
    head: float
    tied: float
    elements: int
    shards: int


class Traffic(NamedTuple):
    """Seconds of gathering a block's weights, and of reducing its gradient, over its replicas."""

    gather: float
    reduction: float


NO_TRAFFIC = Traffic(0.0, 0.0)


class LayerFigures:
    """Figures of the layers of one run on one machine.

    times: of layers; of a micro-batch they may depend on what one rank does with it, not on the pipeline or on the
    replicas.
    """

    def __init__(self, base: PretrainConfig, hardware: Hardware, devices: int, times: LayerTimes) -> None:
        self._base, self._hardware, self._devices, self._times = base, hardware, devices, times
        self._layers = layers_of(base)
        self._tied = set(tied_names(self._layers))
        self._specs = {spec.name: spec for layer in self._layers for spec in layer.parameters.values()}
        # Blocks differ in their times alone, where only some compute in fp8: the first, a middle and the last.
        training = base.training
        apart = {0} | ({training.fp8_first_kept, base.model.num_layers - 1} if training.fp8 != "none" else set())
        self._blocks = [layer for layer in self._layers if layer.kind == "block" and layer.index in apart]
        self._embedding = next(layer for layer in self._layers if layer.kind == "embedding")
        self._head = next(layer for layer in self._layers if layer.kind == "head")
        precision: Precision = training.precision  # type: ignore[assignment]
        device = hardware_device_type(hardware)
        self._device = device
        self._path = attention_path(base.model, precision, device, base.data.sequence_length)
        self.held = cache(self._held)
        self.work = cache(self._work)
        self.state = cache(self._state)
        self._traffic_of = cache(self._traffic)
        self._waiting_of = cache(self._waiting)

    def traffic(self, shape: Shape, zero: ZeroStage) -> Traffic:
        """Over the replicas of a shape."""
        return self._traffic_of(shape.data, shape.pipeline, shape.context, shape.tensor, zero)

    def _config(
        self, tensor: int, context: int, micro_size: int, sequence: int, recompute: Recompute
    ) -> PretrainConfig:
        """Of one pipeline rank with all layers."""
        base = self._base
        data = self._devices // (tensor * context)
        return replace(
            base,
            parallel=replace(
                base.parallel,
                data=data,
                tensor=tensor,
                context=context,
                pipeline=1,
                sequence=sequence > 0,
                sequence_chunks=max(1, sequence),
            ),
            batch=replace(base.batch, micro_size=micro_size),
            recompute=replace(base.recompute, method=recompute),
            zero=replace(base.zero, stage=0),
        )

    def _costs(self, config: PretrainConfig) -> LayoutCosts:
        data = config.parallel.data or 1
        return LayoutCosts(config, self._layers, data, self._path, VOCABULARY_ALIGNMENT, device=self._device)

    def _held(
        self, tensor: int, context: int, micro_size: int, sequence: int, recompute: Recompute
    ) -> MicrobatchBytes:
        config = self._config(tensor, context, micro_size, sequence, recompute)
        costs = self._costs(config)
        whole, stream = float(costs.kept(self._blocks[0])), float(costs.stream)
        full = recompute == "full"
        return MicrobatchBytes(
            min(whole, stream / config.recompute.every) if full else whole,
            float(costs.kept(self._embedding)),
            float(costs.kept(self._head)),
            max(0.0, whole - stream) if full else 0.0,
            stream,
        )

    def _work(
        self, tensor: int, context: int, micro_size: int, sequence: int, recompute: Recompute
    ) -> MicrobatchSeconds:
        config = self._config(tensor, context, micro_size, sequence, recompute)
        works = [self._of_layer(config, each) for each in self._blocks]
        block = min(works, key=lambda work: work.whole)
        embedding, head = (self._of_layer(config, layer) for layer in (self._embedding, self._head))
        edges = embedding.whole + head.whole
        blocks = self._base.model.num_layers
        return MicrobatchSeconds(embedding, block, head, blocks * block.whole + edges)

    def _of_layer(self, config: PretrainConfig, layer: LayerSpec) -> LayerWork:
        found = self._times.of(config, layer)
        backward = found.backward_input + found.backward_weight
        # With recompute.num_blocks, only some of the blocks run again.
        whole = config.recompute.method == "full" and layer.kind == "block"
        again = found.recompute if whole and config.recompute.num_blocks is None else 0.0
        if not whole:
            backward += found.recompute
        products = PhaseSeconds(found.forward, found.backward_input, found.backward_weight)
        waiting = PhaseSeconds()
        parallel, kind = config.parallel, (layer.kind, layer.index)
        key = parallel.tensor, parallel.context, config.batch.micro_size
        if parallel.tensor > 1:
            chunks = parallel.sequence_chunks
            traffic = self._waiting_of(*key, chunks if parallel.sequence else 0, "tensor")[kind]
            # Chunks of sequence parallelism overlap as in `cost.layer_costs`, but without a slow-down.
            exposed = _outlasting(traffic.scaled(1.0 - 1.0 / chunks), products)
            waiting = exposed.plus(traffic.scaled(1.0 / chunks)) if chunks > 1 else traffic
        if parallel.context > 1 and found.waits is None:
            traffic = self._waiting_of(*key, 0, "context")[kind]
            # Rings overlap with attention, which is at most all of the products.
            waiting = waiting.plus(_outlasting(traffic, products) if parallel.context_attention == "ring" else traffic)
        return LayerWork(
            found.forward + waiting.forward,
            backward + waiting.backward_input,
            again + (waiting.forward if again else 0.0),
        )

    def _waiting(
        self, tensor: int, context: int, micro_size: int, sequence: int, group: str
    ) -> dict[tuple[str, int], PhaseSeconds]:
        """Return the exchange times of a group, tensor or context, for each layer by its kind and index."""
        config = self._config(tensor, context, micro_size, sequence, "none")
        costs = self._costs(config)
        sizes = {"data": config.parallel.data or 1, "context": context, "tensor": tensor}
        placement = Placement(self._hardware, sizes)
        return {
            (layer.kind, layer.index): layer_exchange_seconds(costs, placement, layer, group)
            for layer in (self._embedding, *self._blocks, self._head)
        }

    def _units(self, tensor: int, zero: ZeroStage, replicas: int) -> UnitCosts:
        base = self._base
        config = replace(
            base,
            parallel=replace(base.parallel, tensor=tensor, data=replicas, context=1),
            zero=replace(base.zero, stage=zero),
        )
        return UnitCosts(config, replicas, VOCABULARY_ALIGNMENT)

    def _unit(self, layer: LayerSpec) -> Unit:
        """A layer without what is tied."""
        return Unit(tuple(spec for spec in layer.parameters.values() if spec.name not in self._tied))

    def _state(self, tensor: int, zero: ZeroStage, replicas: int) -> State:
        units = self._units(tensor, zero, replicas)
        block = self._unit(self._blocks[0])
        tied = float(sum(units.state(Unit((self._specs[name],), tied=True)).total for name in self._tied))
        return State(
            float(units.state(block).total),
            units.state(self._unit(self._embedding)).total + tied,
            units.state(self._unit(self._head)).total + tied,
            tied,
            units.elements(block),
            units.shards,
        )

    def _traffic(self, data: int, pipeline: int, context: int, tensor: int, zero: ZeroStage) -> Traffic:
        """Nothing where the mesh does not cut nodes evenly: there its groups take long to find."""
        replicas = data * context
        sizes = {"data": data, "pipeline": pipeline, "context": context, "tensor": tensor}
        placement = Placement(self._hardware, sizes)
        if replicas == 1 or placement.inside is None or self._hardware.link_matrix is not None:
            return Traffic(0.0, 0.0)
        units, unit = self._units(tensor, zero, replicas), self._unit(self._blocks[0])
        every = placement.groups("data", "context")
        slowest = min(every, key=lambda group: (group.crossing or group.inside.bandwidth, -group.size))
        group, _ = shard_groups(slowest, replicas if units.shards == 1 else units.shards)
        gathers = [each for exchanges in units.gather(unit).values() for each in exchanges]
        reductions = [each for exchanges in units.reduction(unit).values() for each in exchanges]
        return Traffic(group_seconds(gathers, group), group_seconds(reductions, group))


def _outlasting(traffic: PhaseSeconds, work: PhaseSeconds) -> PhaseSeconds:
    """Return, for each phase, the time by which traffic exceeds the work that it overlaps with."""
    return PhaseSeconds(*(max(0.0, sent - hidden) for sent, hidden in zip(traffic, work, strict=True)))
