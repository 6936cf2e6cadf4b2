"""Costs of a layer on one rank, and of a stage: compute, traffic between the ranks that share it, and traffic between
replicas of its weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from megapipe.config.parallel import recompute_method
from megapipe.layout.costs import LayoutCosts, scalar_exchanges
from megapipe.layout.hardware.placement import GroupLinks, Placement, exchange_time, ring_time
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.layout.units import Unit, layer_units, tied_unit
from megapipe.planner.cost.estimate import Assumptions
from megapipe.planner.cost.layer_times import LayerSeconds, LayerTimes, PhaseSeconds
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.schedules.actions import Floats, Ints
from megapipe.spec.ops import ELEMENT_BYTES, FULL_BYTES, Exchange, Flops, Precision
from megapipe.spec.parameters import LayerSpec, TiedNames


def exchanges_seconds(placement: Placement, exchanges: Iterable[Exchange], *names: str) -> float:
    """Return the seconds of calls that run one after another, in all groups over these dimensions at once.

    names: dimensions of the mesh, such as "data" and "context". Each call takes as long as in the slowest group.
    """
    return sum(
        placement.slowest(each.operation, each.elements * each.element_bytes, *names).seconds * each.calls
        for each in exchanges
        if each.calls
    )


def layer_exchange_seconds(costs: LayoutCosts, placement: Placement, layer: LayerSpec, group: str) -> PhaseSeconds:
    """Return the seconds that `group`, "tensor", "context" or "pipeline+tensor", exchanges for one micro-batch in a
    layer. backward_weight: seconds by which both halves of a split backward exceed a whole one."""
    names = group.split("+")
    if prod(placement.sizes[name] for name in names) == 1:
        return PhaseSeconds()
    forward = backward = split = 0.0
    for each in (each for op in costs.ops(layer) for each in op.collectives if each.group == group):
        seconds = placement.slowest(each.operation, each.elements * each.element_bytes, *names).seconds
        forward += seconds * each.forward
        backward += seconds * each.backward
        split += seconds * each.split_backward
    return PhaseSeconds(forward, backward, split - backward)


def shard_groups(group: GroupLinks, shards: int) -> tuple[GroupLinks, GroupLinks]:
    """Return two groups of a weight's replicas: neighbours that shard one copy, and replicas of one shard."""
    local = max(group.members)
    inside = min(local, shards)
    copies, apart = group.size // shards, max(1, local // shards)
    return _part(group, shards, inside), _part(group, copies, min(copies, apart))


def group_seconds(exchanges: Iterable[Exchange], group: GroupLinks) -> float:
    """Return the seconds of calls that run one after another in one group.

    group: links of the group. Each call uses the algorithm that is fastest on them.
    """
    return sum(exchange_time(each, group).seconds for each in exchanges)


def _part(group: GroupLinks, size: int, local: int) -> GroupLinks:
    nodes = size // local
    if nodes <= 1:
        return GroupLinks((size,), group.inside)
    crossing = group.crossing * local / max(group.members)
    return GroupLinks((local,) * nodes, group.inside, crossing, group.crossing_latency)


Number = TypeVar("Number", float, Floats)

PERSISTENT_ELEMENTS = 100_000
"""DeepSpeed's ZeRO-3 does not shard weights up to this size: its default `stage3_param_persistence_threshold`."""


def exposed_seconds(compute: float, traffic: float, before: float, last: float, *, slow_down: float) -> float:
    """Return the seconds that traffic adds to a rank's compute, in whose background it runs, unit by unit.

    A unit's traffic starts after its compute, so the last unit's traffic, or more if the compute is too short, is
    exposed. While both run, each slows the other down. before: seconds of compute before the first unit's traffic can
    start. last: seconds of the last unit's traffic.
    """
    if not traffic:
        return 0.0
    overlap = compute - before
    hidden = min(traffic - last, overlap)
    return (slow_down - 1) * max(0.0, hidden) + max(last, traffic - overlap)


def overlapped(compute: Number, communication: Number, slow_down: float) -> Number:
    """Return the seconds of compute and communication that run at the same time. Each takes `slow_down` times as long
    until the shorter one ends; the rest of the longer one runs at full speed (Miao et al., 2022, arXiv 2211.13878,
    cost estimator)."""
    shorter: Number = np.minimum(compute, communication)
    return shorter * slow_down + np.maximum(compute, communication) - shorter


def tensor_by_tensor_seconds(run: RunLayout, unit: Unit, group: GroupLinks) -> tuple[float, float]:
    """Return the seconds of a sum of a unit's gradients and of a gather of its weights in DeepSpeed's first ZeRO-3.

    Each tensor has a call of its own, in the compute precision. Its ring passes all replicas, and each step costs one
    latency: `_allgather_param` and `_reduce_scatter_gradient` in runtime/zero/partition_parameters.py of version 0.3.
    Small weights (`PERSISTENT_ELEMENTS`) are not gathered, but their gradients are summed.
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
    """Return the seconds to sum the gradients of tied weights over all replicas of the ranks that use them."""
    total = 0.0
    for names, users in zip(run.tied, run.stages.tied, strict=True):
        ranks = sorted({run.ranks[stage] for stage in users})
        group = _tied_group(run, ranks)
        if group.size > 1:
            elements = run.costs.of_units.elements(tied_unit(names, run.layers))
            total += group_seconds([Exchange("all_reduce", elements, FULL_BYTES)], group)
    return total


def _tied_group(run: RunLayout, ranks: list[int]) -> GroupLinks:
    """Return the replicas of several pipeline ranks as one group, which uses the links between replicas."""
    replicas = run.placement.groups("data", "context")[0]
    if len(ranks) == 1:
        return replicas
    pair = run.placement.groups("pipeline")[0]
    if not pair.crosses:
        return replace(replicas, members=tuple(each * len(ranks) for each in replicas.members))
    members = replicas.members * len(ranks)
    crossing = replicas.crossing or pair.crossing / max(pair.members) * max(members)
    return GroupLinks(members, replicas.inside, crossing, pair.crossing_latency)


def scalar_seconds(run: RunLayout) -> float:
    """Return the seconds to sum counts and norms over all ranks once a step."""
    if run.world_size == 1:
        return 0.0
    names = {spec.name for layer in run.layers for spec in layer.parameters.values()}
    exchanges = scalar_exchanges(len(names) * len(run.stages.layers), len(run.config.loss_terms))
    group = run.placement.groups("data", "pipeline", "context", "tensor")[0]
    return group_seconds(exchanges, group)


class StateSeconds(NamedTuple):
    """Seconds of one state unit on one rank: a reduction of its gradient, a gather of its weights, and an update with
    its exchanges. zero: highest ZeRO stage at which its state is sharded; 0 if it is not sharded."""

    reduction: float
    gather: float
    update: float
    zero: int = 0


class MicrobatchCost(NamedTuple):
    """Costs of a micro-batch in one layer on one rank.

    compute: seconds of kernels. tensor, context: seconds of waits for other ranks that kernels do not hide.
    waits_measured: whether these were measured.
    """

    compute: LayerSeconds
    tensor: PhaseSeconds
    context: PhaseSeconds
    waits_measured: bool

    @property
    def whole_forward(self) -> float:
        """Return the seconds of a forward."""
        return self.compute.forward + self.tensor.forward + self.context.forward

    @property
    def whole_again(self) -> float:
        """Return the seconds to recompute the whole layer."""
        return self.compute.recompute + self.tensor.forward + self.context.forward

    @property
    def whole_backward(self) -> float:
        """Return the seconds of a backward that is not split, without recomputation."""
        waits = self.tensor.backward_input + self.context.backward_input
        return self.compute.backward_input + self.compute.backward_weight + waits

    @property
    def weight_half(self) -> float:
        """Return the seconds of the weight half of a split backward."""
        return self.compute.backward_weight + self.tensor.backward_weight + self.context.backward_weight


class LayerCost(NamedTuple):
    """Costs of one layer on one rank. states: those of its state units. tied_updates: seconds to update each tied
    weight that the layer uses, by its names."""

    microbatch: MicrobatchCost
    states: tuple[StateSeconds, ...]
    tied_updates: Mapping[TiedNames, float]


def microbatch_cost(
    run: RunLayout, layer: LayerSpec, flops: Flops, times: LayerTimes, assumptions: Assumptions
) -> MicrobatchCost:
    """Return the costs of a micro-batch in a layer.

    flops: FLOPs of a micro-batch in the layer, which give attention's part of its time. times: times of kernels and
    updates. assumptions: with the machine's slow-down filled in.
    """
    compute = times.of(run.config, layer)
    over = "pipeline+tensor" if layer.kind in ("output", "words") else "tensor"
    tensor = layer_exchange_seconds(run.costs, run.placement, layer, over)
    context = layer_exchange_seconds(run.costs, run.placement, layer, "context")
    tensor = _beside_products(tensor, compute, run.config.parallel.sequence_chunks, assumptions.slow_down)
    if run.config.parallel.context_attention == "ring":
        context = _beside_attention(context, compute, flops, assumptions.slow_down)
    waits = None if run.placement.crosses("tensor", "context") else compute.waits
    if waits is not None:
        tensor, context = _as_measured(tensor, context, waits, run.config.parallel.tensor > 1)
    return MicrobatchCost(compute, tensor, context, waits is not None)


def state_cost(
    run: RunLayout, layer: LayerSpec, times: LayerTimes, assumptions: Assumptions
) -> tuple[tuple[StateSeconds, ...], Mapping[TiedNames, float]]:
    """Return the fields `states` and `tied_updates` of `LayerCost`. See `microbatch_cost` for the arguments."""
    units = layer_units(layer, run.tied, run.config.zero)
    states = tuple(_state_seconds(run, layer, unit, times, assumptions) for unit in units)
    used = {spec.name for spec in layer.parameters.values()}
    tied = {names: tied_unit(names, [layer]) for names in run.tied if names[0] in used}
    return states, {names: times.update(run.config, layer, unit) for names, unit in tied.items()}


def _state_seconds(
    run: RunLayout, layer: LayerSpec, unit: Unit, times: LayerTimes, assumptions: Assumptions
) -> StateSeconds:
    """Return the seconds of one state unit of a layer."""
    units, group = run.costs.of_units, _replica_groups(run, unit)[0]
    reduction, gather = replica_seconds(run, unit)
    if assumptions.tensor_by_tensor and units.shards_of(unit) > 1:
        reduction, gather = tensor_by_tensor_seconds(run, unit, group)
        # A recomputed forward gathers too: three gathers instead of two.
        gather *= 1.5 if recompute_method(run.config, layer.name) == "full" else 1.0
    if unit.state_unit == "layer":  # tensor ranks shard experts: each has whole gradients
        partial = run.costs.partial_reduction(layer, unit).get("tensor", [])
        reduction += exchanges_seconds(run.placement, partial, "tensor")
    traffic = units.update(unit)
    update = times.update(run.config, layer, unit)
    update += exchanges_seconds(run.placement, traffic.get("tensor", []), "tensor")
    update += group_seconds(traffic.get(units.shard_group(unit), []), group)
    zero = max((stage for stage in (1, 2, 3) if units.sharded(unit, stage)), default=0)
    return StateSeconds(reduction, gather, update, zero)


def replica_seconds(run: RunLayout, unit: Unit) -> tuple[float, float]:
    """Return the seconds of a reduction of a unit's gradient over its replicas, and of a gather of its weights.

    Sharded gradients are reduced over the ranks that shard a copy, then over the copies.
    """
    units = run.costs.of_units
    if not unit.specs or run.costs.replicas == 1:
        return 0.0, 0.0
    shards, copies = _replica_groups(run, unit)
    reduction = group_seconds(chain(*units.reduction(unit).values()), shards)
    reduction += group_seconds(chain(*units.copies_reduction(unit).values()), copies)
    return reduction, group_seconds(chain(*units.gather(unit).values()), shards)


def _replica_groups(run: RunLayout, unit: Unit) -> tuple[GroupLinks, GroupLinks]:
    """Return the slowest groups of replicas: the ranks that shard a copy of a unit, and those with the same shard."""
    every = run.placement.groups("data", "context")
    slowest = min(every, key=lambda each: (each.crossing or each.inside.bandwidth, -each.size))
    shards = run.costs.of_units.shards_of(unit)
    return shard_groups(slowest, run.costs.replicas if shards == 1 else shards)


def _as_measured(
    tensor: PhaseSeconds, context: PhaseSeconds, waits: PhaseSeconds, has_tensor: bool
) -> tuple[PhaseSeconds, PhaseSeconds]:
    """Divide measured waits between tensor and context in the proportion that the cost model predicts.

    Layers without messages wait as well, because their ranks arrive from a layer that has messages at different times.
    """
    both, of_tensor = sum(tensor) + sum(context), sum(tensor)
    share = of_tensor / both if both else float(has_tensor)
    return waits.scaled(share), waits.scaled(1.0 - share)


def _beside_products(tensor: PhaseSeconds, compute: LayerSeconds, chunks: int, slow_down: float) -> PhaseSeconds:
    """Return the exposed exchanges if they are cut into chunks: the traffic of each chunk except the first overlaps
    with the products of other chunks."""
    if chunks == 1:
        return tensor
    talk, products = np.array(tensor), np.array(compute[:3])
    exposed = overlapped(products, talk * (1.0 - 1.0 / chunks), slow_down) - products + talk / chunks
    return PhaseSeconds(*exposed.tolist())


def _beside_attention(context: PhaseSeconds, compute: LayerSeconds, flops: Flops, slow_down: float) -> PhaseSeconds:
    """Return the exposed part of a ring that overlaps with attention. Attention's time is in proportion to FLOPs."""
    share = 1.0 - flops.backward_weight / flops.forward if flops.forward else 0.0
    of_input = 2 * share / (1 + share)
    works = np.array([compute.forward * share, compute.backward_input * of_input, 0.0])
    return PhaseSeconds(*(overlapped(works, np.array(context), slow_down) - works).tolist())


MEASURED_WAITS = "measured: time that ranks of a layer wait for one another"
TINY = 1e-30
"""Replaces a time of 0 in a quotient."""
STATE_FIGURES = {
    "update": ("update", 0),
    "reduction": ("reduction", 0),
    "gather": ("gather", 0),
    "sharded_reduction": ("reduction", 2),
    "sharded_gather": ("gather", 3),
}
"""Sums over state units, each with the ZeRO stage at which the units are sharded."""


class Waits(NamedTuple):
    """Seconds of a micro-batch that ranks wait for other ranks of the same layers, shape [stages].

    recompute: waits in layers that are recomputed as a whole. source: where the times come from.
    """

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    recompute: Floats
    source: str

    def microbatch(self, *, apart: Floats | float) -> Floats:
        """Return the seconds of a whole micro-batch. apart: fraction of the backwards that are split, of all stages
        or shape [stages]."""
        return self.forward + self.backward_input + self.recompute + self.backward_weight * apart


@dataclass(frozen=True)
class StageCosts:
    """Costs of all stages in seconds: arrays with one entry per stage, shape [stages].

    Phases are kernels only; tensor and context are waits for other ranks. recompute: layers that are recomputed as a
    whole. made_again: parts that are recomputed within a backward. first_backward: the layer whose backward is first,
    as a fraction of the stage's backward. last_reduction: the layer whose gradient is last. still_reducing: the rest
    of the previous layer's reduction when that gradient is complete. sharded_reduction, sharded_gather: traffic of
    every micro-batch, for state units with sharded gradients or weights. source: where the times of kernels come from.
    units: costs of each layer by itself; None if no unit is sharded in this way.
    """

    ranks: Ints
    layers: Ints
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
    source: str
    units: "StageCosts | None" = None

    @property
    def gather_after(self) -> Floats:
        """Return the seconds to gather weights that an update leaves in shards (ZeRO 1 and 2)."""
        return self.gather - self.sharded_gather

    @cached_property
    def whole_forward(self) -> Floats:
        """Return the seconds of a micro-batch's forward, including waits."""
        return self.forward + self.tensor.forward + self.context.forward

    @cached_property
    def whole_again(self) -> Floats:
        """Return the seconds to recompute whole layers, including waits."""
        return self.recompute + self.tensor.recompute + self.context.recompute

    @cached_property
    def input_half(self) -> Floats:
        """Return the seconds of the backward's input half, including waits, without recomputation of whole layers."""
        return self.backward_input + self.made_again + self.tensor.backward_input + self.context.backward_input

    def weight_half(self, *, apart: Floats | float) -> Floats:
        """Return the mean seconds of the backward's weight half, which waits only in a split backward. apart: fraction
        of the backwards that are split, of all stages or shape [stages]."""
        return self.backward_weight + (self.tensor.backward_weight + self.context.backward_weight) * apart

    def by_rank(self, values: Floats) -> Floats:
        """Return the sum over each rank's stages, shape [pipeline ranks]."""
        return np.bincount(self.ranks, values).astype(np.float64)


def stage_costs(run: RunLayout, kinds: Sequence[LayerCost]) -> StageCosts:
    """Add up the layers of each stage. kinds: costs of one layer of each of `run.kinds`."""
    costs = _parts_costs(run, kinds, by_layer=False)
    update = costs.update.copy()
    for (stage, _), seconds in tied_updates(run, kinds).items():
        update[stage] += seconds
    sharded = costs.sharded_reduction.any() or costs.sharded_gather.any()
    units = each_layer(run, kinds) if sharded else None
    return replace(costs, ranks=np.array(run.ranks), update=update, units=units)


def each_layer(run: RunLayout, kinds: Sequence[LayerCost]) -> StageCosts:
    """Return the costs of every layer by itself, stage by stage. Updates exclude tied weights."""
    return _parts_costs(run, kinds, by_layer=True)


def tied_updates(run: RunLayout, kinds: Sequence[LayerCost]) -> dict[tuple[int, int], float]:
    """Return the seconds to update each tied weight, by stage and number of the weight. On each rank, the first stage
    that uses the weight updates it. See `stage_costs` for `kinds`."""
    seconds = {names: time for kind in kinds for names, time in kind.tied_updates.items()}
    updates = dict[tuple[int, int], float]()
    for number, (names, users) in enumerate(zip(run.tied, run.stages.tied, strict=True)):
        first = {run.ranks[stage]: stage for stage in sorted(users, reverse=True)}
        updates |= {(stage, number): seconds[names] for stage in first.values()}
    return updates


def _parts_costs(run: RunLayout, kinds: Sequence[LayerCost], *, by_layer: bool) -> StageCosts:
    """Add up the layers of each part of the model: of each stage, or each layer by itself."""
    parts = _parts(run.classes, run.stages.ranges, tuple(map(tuple, run.recomputed)), by_layer)
    whole = [recompute_method(run.config, layer.name) == "full" for layer in run.layers]
    of = _figures(kinds)
    # A product of matrices would round equal rows differently.
    figures = np.einsum("fk,kp->fp", of, parts.counts)
    *waits, backward = figures[4:11]
    again = np.einsum("fk,kp->fp", of[[3, 4, 7]], parts.again)
    second = np.where(parts.sizes > 1, of[13, parts.second], 0.0)
    measured = MEASURED_WAITS if any(kind.microbatch.waits_measured for kind in kinds) else ""
    rings = "rings, doi 10.1177/1094342005051521, section 4.1"
    attention = "rings that overlap with attention, arXiv 2310.01889, section 3"
    return StageCosts(
        ranks=np.zeros(len(parts.sizes), dtype=np.int64),
        layers=parts.sizes,
        forward=figures[0],
        backward_input=figures[1],
        backward_weight=figures[2],
        recompute=again[0],
        made_again=np.where(whole, 0.0, of[3]) @ parts.counts,
        tensor=Waits(waits[0], waits[1], waits[2], again[1], measured or rings),
        context=Waits(waits[3], waits[4], waits[5], again[2], measured or attention),
        **dict(zip(STATE_FIGURES, figures[12:], strict=True)),
        first_backward=of[10, parts.last] / np.maximum(backward, TINY),
        last_reduction=of[13, parts.first],
        still_reducing=np.maximum(0.0, second - of[11 if run.splits else 10, parts.first]),
        source="; ".join(dict.fromkeys(kind.microbatch.compute.source for kind in kinds)),
    )


def _figures(kinds: Sequence[LayerCost]) -> Floats:
    """Return the seconds of one layer of each kind, shape [17, kinds]: 4 of compute, 3 of tensor and 3 of context
    ranks, a whole backward, a weight half, and update, reduction and gather of all state units, then reduction and
    gather of those whose gradients or weights are sharded."""
    rows = []
    for micro, states, _ in kinds:
        sums = [
            sum(getattr(state, name) for state in states if state.zero >= zero)
            for name, zero in STATE_FIGURES.values()
        ]
        halves = micro.whole_backward, micro.weight_half
        rows.append((*micro.compute[:4], *micro.tensor, *micro.context, *halves, *sums))
    return np.array(rows).T


class _Parts(NamedTuple):
    """Parts of a model. counts, again: number of layers of each kind, and of those that are recomputed as a whole,
    shape [kinds, parts]. sizes: number of layers. first, second, last: kinds of these layers; `second` is the first
    if there is no other."""

    counts: Floats
    again: Floats
    sizes: Ints
    first: Ints
    second: Ints
    last: Ints


@lru_cache(maxsize=1024)
def _parts(
    classes: tuple[int, ...], stages: tuple[range, ...], spans: tuple[tuple[range, ...], ...], by_layer: bool
) -> _Parts:
    parts = [range(layer, layer + 1) for members in stages for layer in members] if by_layer else stages
    kinds, rerun = np.array(classes), np.zeros(len(classes), dtype=np.bool_)
    for members, own in zip(stages, spans, strict=False):
        rerun[[members.start + unit for span in own for unit in span]] = True
    one_hot, starts = np.eye(max(classes) + 1)[:, kinds], [members.start for members in parts]
    counts, again = (np.add.reduceat(each, starts, axis=1) for each in (one_hot, one_hot * rerun))
    chosen = [[members[at] for members in parts] for at in (0, -1)]
    second = [members[:2][-1] for members in parts]
    sizes = counts.sum(axis=0).astype(np.int64)
    return _Parts(counts, again, sizes, kinds[chosen[0]], kinds[second], kinds[chosen[1]])
