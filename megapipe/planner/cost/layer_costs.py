"""Costs of a layer on a rank, and of a stage: compute, traffic with ranks that share it, traffic with replicas of its
weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config.parallel import recompute_method
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.collectives import GroupLinks, exchange_time, ring_time
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.layout.traffic import scalar_exchanges
from megapipe.layout.units import Unit, layer_units
from megapipe.planner.cost.estimate import Assumptions
from megapipe.planner.cost.layer_times import LayerSeconds, LayerTimes, PhaseSeconds
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.ops import Exchange, Flops
from megapipe.spec.parameters import LayerSpec


def exchanges_seconds(placement: Placement, exchanges: Iterable[Exchange], *names: str) -> float:
    """Return the seconds of calls one after another, in all groups over these dimensions at once.

    names: dimensions of the mesh, such as "data" and "context"; the slowest of their groups counts for each call.
    """
    return sum(
        placement.slowest(each.operation, each.elements * each.element_bytes, *names).seconds * each.calls
        for each in exchanges
        if each.calls
    )


def layer_exchange_seconds(costs: LayoutCosts, placement: Placement, layer: LayerSpec, group: str) -> PhaseSeconds:
    """Return the seconds that `group`, "tensor" or "context", exchanges for one micro-batch in a layer.

    `LayoutCosts.within_layer` has forwards and backwards together: another forward adds the forward's part. Embedding
    and head never run twice: the exchanges of the embedding are in its forward, those of the head in its backward, and
    half in each if tensor ranks share the tokens.
    """

    def seconds(forwards: int, halves: bool) -> float:
        found = costs.within_layer(layer, forwards=forwards, halves=halves).get(group, [])
        return exchanges_seconds(placement, found, group)

    whole = seconds(1, False)
    if not whole:
        return PhaseSeconds()
    if layer.kind != "block":
        shared = costs.config.parallel.sequence
        forward = whole / 2 if shared else (whole if layer.kind == "embedding" else 0.0)
        return PhaseSeconds(forward, whole - forward)
    forward = seconds(2, False) - whole
    return PhaseSeconds(forward, whole - forward, seconds(1, True) - whole)


def shard_groups(group: GroupLinks, shards: int) -> tuple[GroupLinks, GroupLinks]:
    """Return the replicas of a weight that share one copy, which are neighbours, and those with the same shard."""
    local = max(group.members)
    inside = min(local, shards)
    copies, apart = group.size // shards, max(1, local // shards)
    return _part(group, shards, inside), _part(group, copies, min(copies, apart))


def group_seconds(exchanges: Iterable[Exchange], group: GroupLinks) -> float:
    """Return the seconds of calls one after another in one group.

    group: its links; each call takes as long as its fastest algorithm over them.
    """
    return sum(exchange_time(each, group).seconds for each in exchanges)


def _part(group: GroupLinks, size: int, local: int) -> GroupLinks:
    nodes = size // local
    if nodes <= 1:
        return GroupLinks((size,), group.inside)
    crossing = group.crossing * local / max(group.members)
    return GroupLinks((local,) * nodes, group.inside, crossing, group.crossing_latency)


Floats = npt.NDArray[np.float64]

PERSISTENT_ELEMENTS = 100_000
"""Maximum size of a weight that DeepSpeed's ZeRO-3 keeps whole: its default `stage3_param_persistence_threshold`."""


class Beside(NamedTuple):
    """Seconds of a rank's compute, and of traffic that runs in its background, unit by unit.

    before: of the compute, before the traffic of the first unit can start. last: of the traffic, of the last unit.
    """

    compute: float
    traffic: float
    before: float
    last: float

    def exposed(self, slow_down: float) -> float:
        """Return what the traffic adds: each unit's starts after its own part of the compute, so that the last one, or
        what the compute was too short for, ends later; while both run, each slows the other down."""
        if not self.traffic:
            return 0.0
        overlap = self.compute - self.before
        hidden = min(self.traffic - self.last, overlap)
        return (slow_down - 1) * max(0.0, hidden) + max(self.last, self.traffic - overlap)


def overlapped(compute: float, communication: float, slow_down: float) -> float:
    """Return the seconds of both at the same time: each takes `slow_down` times as long until the shorter one ends,
    and the rest of the longer one runs at full speed (Miao et al., 2022, arXiv 2211.13878, cost estimator)."""
    slowed = min(compute, communication) * slow_down
    return slowed + max(compute, communication) - min(compute, communication)


def side_by_side(compute: Floats, traffic: Floats, slow_down: float) -> Floats:
    """Return `overlapped` of each stage's compute and traffic."""
    shorter = np.minimum(compute, traffic)
    return shorter * slow_down + np.maximum(compute, traffic) - shorter


def tensor_by_tensor_seconds(run: RunLayout, unit: Unit, group: GroupLinks) -> tuple[float, float]:
    """Return the seconds of a sum of a unit's gradients and of a gather of its weights in DeepSpeed's first ZeRO-3.

    Each tensor has a call of its own, in the compute precision, and its ring runs through all replicas, a step's
    latency for each: `_allgather_param` and `_reduce_scatter_gradient` of its runtime/zero/partition_parameters.py in
    version 0.3. Small weights are not gathered (`PERSISTENT_ELEMENTS`), but summed like all.
    """
    precision: Precision = run.config.training.precision  # type: ignore[assignment]
    reduction = gather = 0.0
    for spec in unit.specs:
        elements = prod(spec.local_shape(run.config.parallel.tensor, VOCABULARY_ALIGNMENT))
        num_bytes = elements * ELEMENT_BYTES[precision]
        reduction += ring_time("reduce_scatter", num_bytes, group).seconds
        if elements > PERSISTENT_ELEMENTS:
            gather += ring_time("all_gather", num_bytes, group).seconds
    return reduction, gather


def tied_seconds(run: RunLayout) -> float:
    """Return the seconds of summing tied weights' gradients over all replicas of the ranks that use them."""
    total = 0.0
    for name, users in zip(run.tied, run.stages.tied, strict=True):
        ranks = sorted({run.ranks[stage] for stage in users})
        group = _tied_group(run, ranks)
        if group.size > 1:
            spec = next(spec for layer in run.stages.layers for spec in layer.parameters.values() if spec.name == name)
            elements = run.costs.of_units.elements(Unit((spec,), tied=True))
            total += group_seconds([Exchange("all_reduce", elements, FULL_BYTES)], group)
    return total


def _tied_group(run: RunLayout, ranks: list[int]) -> GroupLinks:
    """Return the replicas of several pipeline ranks as one group, with the links of replicas."""
    replicas = run.placement.groups("data", "context")[0]
    if len(ranks) == 1:
        return replicas
    pair = run.placement.groups("pipeline")[0]
    if not pair.crosses:
        return GroupLinks(
            tuple(each * len(ranks) for each in replicas.members),
            replicas.inside,
            replicas.crossing,
            replicas.crossing_latency,
        )
    members = replicas.members * len(ranks)
    crossing = replicas.crossing or pair.crossing / max(pair.members) * max(members)
    return GroupLinks(members, replicas.inside, crossing, pair.crossing_latency)


def scalar_seconds(run: RunLayout) -> float:
    """Return the seconds of the counts and norms that all ranks sum once a step."""
    if run.world_size == 1:
        return 0.0
    names = len({spec.name for index in run.kinds for spec in run.stages.layers[index].parameters.values()})
    blocks = len(run.stages.layers)
    exchanges = scalar_exchanges(names * blocks, run.costs.loss_terms)
    group = run.placement.groups("data", "pipeline", "context", "tensor")[0]
    return group_seconds(exchanges, group)


class StateSeconds(NamedTuple):
    """One state unit on one rank: one reduction of its gradient, one gather of its weights, one update with what it
    exchanges. zero: ZeRO stage up to which its state is sharded, 0 if it is not."""

    reduction: float
    gather: float
    update: float
    zero: int = 0


@dataclass(frozen=True)
class LayerCost:
    """One layer on one rank.

    compute: kernels. tensor, context: waits of a micro-batch for other ranks that kernels do not hide; waits_measured:
    they were measured, not modelled. states: of its state units. tied_updates: seconds of an update of each tied
    weight that it uses, by name.
    """

    compute: LayerSeconds
    tensor: PhaseSeconds
    context: PhaseSeconds
    states: tuple[StateSeconds, ...]
    tied_updates: Mapping[str, float]
    waits_measured: bool = False

    @property
    def whole_backward(self) -> float:
        """Seconds of a backward that is not split, without recomputation."""
        waits = self.tensor.backward_input + self.context.backward_input
        return self.compute.backward_input + self.compute.backward_weight + waits

    @property
    def weight_half(self) -> float:
        """Seconds of the weight half of a backward that is split."""
        return self.compute.backward_weight + self.tensor.backward_weight + self.context.backward_weight


def layer_cost(
    run: RunLayout, layer: LayerSpec, flops: Flops, times: LayerTimes, assumptions: Assumptions
) -> LayerCost:
    """Return the costs of a layer in a run.

    flops: of a micro-batch in it, which say how much of its time attention takes. times: of its kernels and updates.
    assumptions: with the machine's slow-down filled in.
    """
    compute = times.of(run.config, layer)
    tensor = layer_exchange_seconds(run.costs, run.placement, layer, "tensor")
    context = layer_exchange_seconds(run.costs, run.placement, layer, "context")
    tensor = _beside_products(tensor, compute, run.config.parallel.sequence_chunks, assumptions.slow_down)
    if run.config.parallel.context_attention == "ring":
        context = _beside_attention(context, compute, flops, assumptions.slow_down)
    crosses = any(group.crosses for group in run.placement.groups("tensor", "context"))
    waits = None if crosses else compute.waits
    if waits is not None:
        tensor, context = _as_measured(tensor, context, waits, run.config.parallel.tensor > 1)
    units = layer_units(layer, run.tied, run.config.zero)
    states = tuple(_state_seconds(run, layer, unit, times, assumptions) for unit in units)
    tied = {spec.name: Unit((spec,), tied=True) for spec in layer.parameters.values() if spec.name in run.tied}
    updates = {name: times.update(run.config, layer, unit) for name, unit in tied.items()}
    return LayerCost(compute, tensor, context, states, updates, waits is not None)


def _state_seconds(
    run: RunLayout, layer: LayerSpec, unit: Unit, times: LayerTimes, assumptions: Assumptions
) -> StateSeconds:
    """Return the seconds of a state unit of a layer."""
    units, group = run.costs.of_units, _replica_groups(run, unit)[0]
    reduction, gather = replica_seconds(run, unit)
    if assumptions.tensor_by_tensor and units.shards_of(unit) > 1:
        reduction, gather = tensor_by_tensor_seconds(run, unit, group)
        # A recomputed forward also gathers: three gathers instead of two.
        gather *= 1.5 if recompute_method(run.config, layer.name) == "full" else 1.0
    if unit.state_unit == "layer":  # tensor ranks share experts, so that each has whole gradients
        partial = run.costs.partial_reduction(layer).get("tensor", [])
        reduction += exchanges_seconds(run.placement, partial, "tensor")
    traffic = units.update(unit)
    update = times.update(run.config, layer, unit)
    update += exchanges_seconds(run.placement, traffic.get("tensor", []), "tensor")
    update += group_seconds(traffic.get(units.shard_group(unit), []), group)
    zero = max((stage for stage in (1, 2, 3) if units.sharded(unit, stage)), default=0)
    return StateSeconds(reduction, gather, update, zero)


def replica_seconds(run: RunLayout, unit: Unit) -> tuple[float, float]:
    """Return the seconds of a reduction of a unit's gradient over its replicas, and of a gather of its weights.

    A reduction of sharded gradients is over the ranks that share a copy, then over the copies.
    """
    units = run.costs.of_units
    if not unit.specs or run.costs.replicas == 1:
        return 0.0, 0.0
    shards, copies = _replica_groups(run, unit)
    reductions = [each for exchanges in units.reduction(unit).values() for each in exchanges]
    gathers = [each for exchanges in units.gather(unit).values() for each in exchanges]
    over_copies = [each for exchanges in units.copies_reduction(unit).values() for each in exchanges]
    return group_seconds(reductions, shards) + group_seconds(over_copies, copies), group_seconds(gathers, shards)


def _replica_groups(run: RunLayout, unit: Unit) -> tuple[GroupLinks, GroupLinks]:
    """Return the slowest groups of replicas: those that share a copy of a unit's state, those with the same shard."""
    every = run.placement.groups("data", "context")
    slowest = min(every, key=lambda group: (group.crossing or group.inside.bandwidth, -group.size))
    shards = run.costs.of_units.shards_of(unit)
    return shard_groups(slowest, run.costs.replicas if shards == 1 else shards)


def _as_measured(
    tensor: PhaseSeconds, context: PhaseSeconds, waits: PhaseSeconds, has_tensor: bool
) -> tuple[PhaseSeconds, PhaseSeconds]:
    """Divide measured waits between tensor and context in the proportion of the model.

    Layers without messages wait as well: their ranks come from one that has some.
    """
    both, of_tensor = sum(tensor) + sum(context), sum(tensor)
    share = of_tensor / both if both else float(has_tensor)
    return waits.scaled(share), waits.scaled(1.0 - share)


def _beside_products(tensor: PhaseSeconds, compute: LayerSeconds, chunks: int, slow_down: float) -> PhaseSeconds:
    """Return exchanges in pieces, whose traffic overlaps with the products of other pieces, except the first one's."""
    if chunks == 1:
        return tensor
    hidden = 1.0 - 1.0 / chunks
    products = compute.forward, compute.backward_input, compute.backward_weight
    return PhaseSeconds(
        *(
            overlapped(work, talk * hidden, slow_down) - work + talk / chunks
            for talk, work in zip(tensor, products, strict=True)
        )
    )


def _beside_attention(context: PhaseSeconds, compute: LayerSeconds, flops: Flops, slow_down: float) -> PhaseSeconds:
    """Return the exposed part of a ring that overlaps with attention, whose share of the time is that of its FLOPs."""
    share = 1.0 - flops.backward_weight / flops.forward if flops.forward else 0.0
    of_input = 2 * share / (1 + share)
    works = compute.forward * share, compute.backward_input * of_input, 0.0
    return PhaseSeconds(*(overlapped(work, talk, slow_down) - work for talk, work in zip(context, works, strict=True)))


MEASURED_WAITS = "measured: time that ranks of a layer wait for one another"
TINY = 1e-30
"""Replaces a time of 0 in a quotient."""


@dataclass(frozen=True)
class StageCost:
    """One stage, seconds of a micro-batch, as `explain` prints it.

    forward to recompute: kernels. tensor, context: waiting for others in a whole micro-batch, recomputation
    included. update, reduction, gather: once, of all its layers.
    """

    stage: int
    rank: int
    layers: tuple[str, ...]
    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    tensor: float
    context: float
    update: float
    reduction: float
    gather: float


class Waits(NamedTuple):
    """Seconds of a micro-batch that ranks wait for others with which they share layers, shape [stages].

    recompute: in layers that are recomputed as a whole. source: where the times come from.
    """

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    recompute: Floats
    source: str

    def microbatch(self, *, apart: bool) -> Floats:
        """Return the seconds of a whole micro-batch; apart: its backward is split."""
        return self.forward + self.backward_input + self.recompute + (self.backward_weight if apart else 0.0)


@dataclass(frozen=True)
class StageCosts:
    """All stages: arrays of one entry a stage, shape [stages]; seconds.

    Phases are kernels only; tensor and context are waits for other ranks. recompute: of layers that are recomputed as
    a whole. made_again: of parts that are recomputed within a backward. first_backward: of the layer whose backward is
    first, as a part of the stage's. last_reduction: of the layer whose gradient is last. still_reducing: what is left
    of the sum before it when that gradient is there. sharded_reduction, sharded_gather: with every micro-batch, of
    state units whose gradients, or weights, are sharded. units: of each layer by itself, where there are such units.
    """

    ranks: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]
    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    recompute: Floats
    made_again: Floats
    tensor: Waits
    context: Waits
    update: Floats
    reduction: Floats
    gather: Floats
    sharded_reduction: Floats
    sharded_gather: Floats
    first_backward: Floats
    last_reduction: Floats
    still_reducing: Floats
    units: "StageCosts | None" = None

    @property
    def gather_after(self) -> Floats:
        """Return the gathers of weights that an update leaves in shards (ZeRO 1 and 2)."""
        return self.gather - self.sharded_gather

    @property
    def whole_forward(self) -> Floats:
        """Return the forward of a micro-batch, waits included."""
        return self.forward + self.tensor.forward + self.context.forward

    @property
    def whole_again(self) -> Floats:
        """Return the recomputation of whole layers, waits included."""
        return self.recompute + self.tensor.recompute + self.context.recompute

    @property
    def input_half(self) -> Floats:
        """Return the backward's input half, waits included, without the recomputation of whole layers."""
        return self.backward_input + self.made_again + self.tensor.backward_input + self.context.backward_input

    def weight_half(self, *, apart: bool) -> Floats:
        """Return the backward's weight half; apart: its backward is split, so it also waits for other ranks."""
        return self.backward_weight + (self.tensor.backward_weight + self.context.backward_weight if apart else 0.0)

    def by_rank(self, values: Floats) -> Floats:
        """Return sums over each rank's stages, shape [pipeline ranks]."""
        return np.bincount(self.ranks, values).astype(np.float64)


def stage_costs(run: RunLayout, kinds: Sequence[LayerCost]) -> StageCosts:
    """Add up the layers of each stage. kinds: costs of one layer of each of `run.kinds`."""
    found = _parts_costs(run, kinds, run.stages.ranges)
    update = found.update.copy()
    for (stage, _), seconds in tied_updates(run, kinds).items():
        update[stage] += seconds
    sharded = found.sharded_reduction.any() or found.sharded_gather.any()
    units = each_layer(run, kinds) if sharded else None
    return replace(found, ranks=np.array(run.ranks), update=update, units=units)


def each_layer(run: RunLayout, kinds: Sequence[LayerCost]) -> StageCosts:
    """Return the costs of every layer by itself, in the order of the model; updates without tied weights."""
    return _parts_costs(run, kinds, [range(layer, layer + 1) for layer in range(len(run.classes))])


def tied_updates(run: RunLayout, kinds: Sequence[LayerCost]) -> dict[tuple[int, int], float]:
    """Return the seconds of an update of each tied weight, by stage and number of the weight: of the stages of a rank
    that use it, the first one updates it. kinds: as of `stage_costs`."""
    seconds = {name: time for kind in kinds for name, time in kind.tied_updates.items()}
    found = dict[tuple[int, int], float]()
    for number, (name, users) in enumerate(zip(run.tied, run.stages.tied, strict=True)):
        first = {run.ranks[stage]: stage for stage in sorted(users, reverse=True)}
        found |= {(stage, number): seconds[name] for stage in first.values()}
    return found


def _parts_costs(run: RunLayout, kinds: Sequence[LayerCost], parts: Sequence[range]) -> StageCosts:
    """Add up the layers of each part of the model."""
    classes = np.array(run.classes)
    rerun = np.zeros(len(classes), dtype=np.bool_)
    for members, spans in zip(run.stages.ranges, run.recomputed, strict=False):
        rerun[[members.start + unit for span in spans for unit in span]] = True
    each = np.eye(len(kinds))[classes]
    starts = [members.start for members in parts]
    counts, again = np.add.reduceat(each, starts), np.add.reduceat(each * rerun[:, None], starts)
    layers = [run.stages.layers[index] for index in run.kinds]
    whole = [recompute_method(run.config, each.name) == "full" for each in layers]
    made = counts * ~np.array(whole)

    measured = any(kind.waits_measured for kind in kinds)

    def total(name: str, of: Floats = counts) -> Floats:
        return of @ np.array([attrgetter(name)(kind) for kind in kinds])

    def of_states(name: str, stage: int = 0) -> Floats:
        """Return for each kind of layer the sum over its state units of at least a ZeRO stage."""
        states = ([each for each in kind.states if each.zero >= stage] for kind in kinds)
        return np.array([sum(getattr(each, name) for each in own) for own in states])

    def waits(name: str, source: str) -> Waits:
        forward, *halves = (total(f"{name}.{phase}") for phase in PhaseSeconds._fields)
        source = MEASURED_WAITS if measured else source
        return Waits(forward, halves[0], halves[1], total(f"{name}.forward", again), source)

    backward, weight_half = np.array([(kind.whole_backward, kind.weight_half) for kind in kinds]).T
    reduction = of_states("reduction")
    first = classes[starts]
    second = np.where(counts.sum(axis=1) > 1, reduction[classes[[members[:2][-1] for members in parts]]], 0.0)
    return StageCosts(
        ranks=np.zeros(len(parts), dtype=np.int64),
        layers=counts.sum(axis=1).astype(np.int64),
        forward=total("compute.forward"),
        backward_input=total("compute.backward_input"),
        backward_weight=total("compute.backward_weight"),
        recompute=total("compute.recompute", again),
        made_again=total("compute.recompute", made),
        tensor=waits("tensor", "rings, doi 10.1177/1094342005051521, section 4.1"),
        context=waits("context", "rings that overlap with attention, arXiv 2310.01889, section 3"),
        update=counts @ of_states("update"),
        reduction=counts @ reduction,
        gather=counts @ of_states("gather"),
        sharded_reduction=counts @ of_states("reduction", 2),
        sharded_gather=counts @ of_states("gather", 3),
        first_backward=backward[classes[[members[-1] for members in parts]]] / np.maximum(counts @ backward, TINY),
        last_reduction=reduction[first],
        still_reducing=np.maximum(0.0, second - (weight_half if run.splits else backward)[first]),
    )


def stage_details(run: RunLayout, costs: StageCosts) -> tuple[StageCost, ...]:
    """Return the same, one entry a stage, with the names of its layers."""
    seconds = np.array(
        [
            costs.forward,
            costs.backward_input + costs.made_again,
            costs.backward_weight,
            costs.recompute,
            costs.tensor.microbatch(apart=False),
            costs.context.microbatch(apart=False),
            costs.update,
            costs.reduction,
            costs.gather,
        ]
    )
    names = [tuple(run.stages.layers[index].name for index in members) for members in run.stages.ranges]
    each = enumerate(zip(run.ranks, names, seconds.T.tolist(), strict=True))
    return tuple(StageCost(stage, rank, layers, *own) for stage, (rank, layers, own) in each)
