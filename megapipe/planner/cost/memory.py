"""Bytes that each pipeline coordinate holds, computed for searches by a walk that many layouts share.

`predict_rank` uses the same walk (`layout.walk`). Here each stage is one unit; a walk through its layers gives the
unit's sizes. Whole weights and gradients of sharded units come from a walk through the layers of a few ranks; every
other rank has the same layers as one of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Literal, NamedTuple, cast

import numpy as np

from megapipe.config.parallel import zero_stage_of
from megapipe.layout.costs import MESSAGES_IN_FLIGHT
from megapipe.layout.hardware.description import hardware_device_type
from megapipe.layout.order_walk import (
    MicrobatchWalk,
    Order,
    OrderMoments,
    ShardedRanks,
    StageBytes,
    before_backwards,
    few_ranks,
    stage_walk,
)
from megapipe.layout.prediction import PHASES
from megapipe.layout.stages import Keyed, StageLayout, cached_method
from megapipe.layout.units import StateBytes, StateUnits, Unit, UnitCosts, layer_units, tied_unit
from megapipe.layout.walk import Bytes, Sizes, Tensor
from megapipe.planner.cost.estimate import RankMemory
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.schedules.actions import Floats, Ints, Mask
from megapipe.schedules.building_blocks import Policy
from megapipe.spec.ops import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.parameters import LayerSpec, TiedNames

RANKS = 4
"""Number of pipeline ranks to walk layer by layer, unless more are needed to cover all layers."""
_microbatch_walk = lru_cache(maxsize=1024)(MicrobatchWalk)


class _Shown(NamedTuple):
    """Everything that determines the bytes of a stage: the kinds of its layers, the spans of layers that are
    recomputed together, and whether another rank sends its input."""

    kinds: tuple[int, ...]
    spans: tuple[range, ...]
    arrives: bool


@dataclass(frozen=True)
class LayerSizes:
    """Bytes of a micro-batch in one layer of each kind of a run (`RunLayout.kinds`), for any division into stages.

    tensors: bytes by tensor (up to `Tensor.WEIGHT_HALF`) and kind. copied: further bytes that a forward saves if the
    backward is split. returned: bytes that a weight half reads from the message slot of the output gradient, if
    another rank sends it. stream: bytes of a message between stages. over_nccl: messages are kept until they are sent.
    """

    tensors: Floats
    copied: Floats
    returned: Floats
    stream: int
    over_nccl: bool

    @classmethod
    def of(cls, run: RunLayout) -> "LayerSizes":
        """Return the sizes of a run. They also hold for runs that differ from it only in the pipeline, the number of
        replicas, or the sharding over replicas."""
        costs, layers = run.costs, run.layers
        sizes = [[costs.kept(each) for each in layers]]
        sizes.append([costs.pending(each) for each in layers])
        sizes.append([costs.stream] * len(layers))
        sizes += [[costs.temporaries(each, phase) for each in layers] for phase in PHASES.values()]
        tensors = np.array(sizes, dtype=np.float64)
        copied = np.array([costs.kept(each, split=True) for each in layers]) - tensors[Tensor.KEPT]
        returned = np.array([costs.stream * costs.reads_output_gradient(each) for each in layers])
        return cls(tensors, copied, returned, costs.stream, costs.device != "cpu")

    @cached_method
    def of_stages(self, shown: tuple[_Shown, ...], splits: bool) -> StageBytes:
        """Return the bytes of stages. splits: whether backwards are split; then some may still be whole."""
        spans = tuple(each.spans for each in shown)
        micro = _microbatch_walk(tuple(len(each.kinds) for each in shown), spans if any(spans) else (), splits)
        sent = micro.walk.num_variants // 2
        sizes = Sizes(micro.walk.num_places, 2 * sent, [0] * sent + [self.stream] * sent, 0)
        for stage, (kinds, _, arrives) in enumerate(shown):
            first = micro.walk.place(stage, 0)
            values = self.tensors[:, list(kinds)]
            if splits:
                values[Tensor.KEPT] += self.copied[list(kinds)]
            if arrives:  # a message stays in its slot, which does not count as an activation
                values[: Tensor.BACKWARD, 0] -= np.minimum(self.stream, values[: Tensor.BACKWARD, 0])
            sizes.of[: Tensor.WEIGHTS, first : first + len(kinds)] = values[..., None]
            sizes.of[Tensor.PENDING, first + len(kinds) - 1, sent:] -= self.returned[kinds[-1]]
        return micro.stage_bytes(sizes)

    @cached_method
    def _sizes(self, cut: "Cut", splits: bool, part: Literal["after", "within"], stages: Sequence[int]) -> Sizes:
        """Return the sizes of whole stages, each one unit. part: peaks of backwards, a field of `StageBytes`."""
        of_stages = self.of_stages(cut.shown, splits)
        sizes = Sizes(len(stages), 1, self.stream, self.stream if self.over_nccl else 0)
        like, local = np.array(cut.like)[list(stages)], cut.local[list(stages)]
        returned = np.where(local, 0.0, self.returned[[cut.kinds[stage][-1] for stage in stages]])
        sizes.of[Tensor.KEPT, :, 0] = of_stages.kept[like]
        sizes.of[Tensor.PENDING, :, 0] = of_stages.pending[like] - (returned if splits else 0.0)
        for tensor, values in getattr(of_stages, part).items():
            sizes.of[tensor, :, 0] = values[1 - local, like]
        return sizes

    @cached_method
    def least_held(self, order: Order, cut: "Cut") -> Floats:
        """Return for each rank a lower bound of the sum of what `held` returns, without lowering the order."""
        moments, stages, slots, sent = _moments(order, cut)
        of = self._sizes(cut, order.splits, "within", stages).of[:, :, 0]
        held = moments.kept @ of[Tensor.KEPT] + moments.pending @ of[Tensor.PENDING]
        held += np.maximum(of[moments.tensor, moments.of], sent * (self.stream * self.over_nccl))
        return np.maximum.reduceat(held, moments.first) + slots * self.stream

    @cached_method
    def held(self, order: Order, cut: "Cut", by_layer: bool) -> tuple[list[int], list[int], list[int]]:
        """Return for each rank the peak bytes of activations after any action, by how much the peak within an action
        exceeds this, and the bytes of messages. by_layer: whether micro-batches pass stages layer by layer."""
        walk = stage_walk(order)
        within = walk.held(self._sizes(cut, order.splits, "within", range(len(cut.ranks))))
        lasting = within.activations
        if by_layer:
            lasting = lasting + walk.temporaries(self._sizes(cut, order.splits, "after", range(len(cut.ranks))))
        peak = within.activations + within.temporaries + within.sent
        temporaries = np.maximum(0.0, walk.by_rank(peak) - walk.by_rank(lasting + within.sent))
        slots = np.where(cut.arrives, walk.header.activation_slots, 0)
        slots[:-1] += np.where(cut.local, 0, walk.header.gradient_slots)[:-1]
        messages = np.bincount(cut.ranks, slots) * self.stream + walk.by_rank(within.sent)
        parts = walk.by_rank(lasting), temporaries, messages
        rounded: list[list[int]] = [each.round().astype(int).tolist() for each in parts]
        return rounded[0], rounded[1], rounded[2]


@lru_cache(maxsize=1024)
def _moments(order: Order, cut: "Cut") -> tuple[OrderMoments, tuple[int, ...], Ints, Ints]:
    """Return the moments of an order, a stage of each class, and the least number of message slots of each rank and of
    messages that may not have left at each moment."""
    _, first, classes = np.unique(2 * np.array(cut.like) + cut.local, return_index=True, return_inverse=True)
    moments, departs = before_backwards(order, classes), np.append(~cut.local[:-1], False)
    slots = np.bincount(cut.ranks, moments.most * cut.arrives + departs)
    sent = min(order.num_microbatches, MESSAGES_IN_FLIGHT) * np.bincount(cut.ranks, 1 * cut.arrives + departs)
    return moments, tuple(first.tolist()), slots, sent[moments.rank]


@dataclass(frozen=True)
class StateSizes:
    """Sizes of the parameters in one layer of each kind of a run (`RunLayout.kinds`), for any division into stages.

    of_units: costs of the run's state units. layers: one layer of each kind. tied: names of weights that several
    layers use. units: state units of each kind, without tied weights. elements: elements in the flat buffers of the
    sharded units of each kind. summands: bytes that a sum of their gradients needs.
    """

    of_units: UnitCosts
    layers: tuple[LayerSpec, ...]
    tied: tuple[TiedNames, ...]
    units: tuple[tuple[Unit, ...], ...]
    elements: tuple[int, ...]
    summands: tuple[int, ...]

    @classmethod
    def of(cls, run: RunLayout) -> "StateSizes":
        """Return the sizes of a run. They hold for all runs with the same tensor ranks, replicas and sharding."""
        of_units, gloo = run.costs.of_units, hardware_device_type(run.hardware) == "cpu"
        units = tuple(layer_units(layer, run.tied, run.config.zero) for layer in run.layers)
        shards = of_units.shards_of
        sharded = [[unit for unit in members if shards(unit) > 1] for members in units]
        elements = tuple(sum(map(of_units.elements, members)) for members in sharded)
        summands = tuple(sum(of_units.summand_bytes(unit, gloo) for unit in members) for members in sharded)
        return cls(of_units, run.layers, run.tied, units, elements, summands)

    @cached_method
    def buffers(self, order: Order, gathers: ShardedRanks | None, sums: ShardedRanks, cut: "Cut") -> list[int]:
        """Return for each rank the bytes of whole weights and gradients of sharded units, and of their sums."""
        peaks = self._peaks(order, sums, cut)
        if gathers is not None:
            peaks = peaks + self._peaks(order, gathers, cut)
        rounded: list[int] = peaks[cut.like_few].round().astype(int).tolist()
        return rounded

    @cached_method
    def least_buffers(self, cut: "Cut") -> Floats:
        """Return for each rank a lower bound of the sum of what `buffers` returns: neighbouring layers of a stage are
        whole at once, as many as a rank may hold."""
        config, least = self.of_units.config, np.zeros(len(cut.own))
        if config.zero.stage < 2 or self.of_units.shards == 1:
            return least
        stages = np.array([zero_stage_of(config, layer.name) for layer in self.layers])
        widths = ELEMENT_BYTES[cast(Precision, config.training.precision)], FULL_BYTES
        for first, width, (count, _) in zip((3, 2), widths, config.zero.whole_layers(), strict=True):
            sizes, peaks = width * np.array(self.elements) * (stages >= first), np.zeros(len(cut.own))
            by_shown = np.array([_largest_sum(sizes[list(each.kinds)], count) for each in cut.shown])
            np.maximum.at(peaks, list(cut.ranks), by_shown[cut.like])
            least += peaks
        return least

    @cached_method
    def _peaks(self, order: Order, sharding: ShardedRanks, cut: "Cut") -> Bytes:
        """Return the bytes that `buffers` adds up, for a few ranks."""
        few = few_ranks(order, sharding)
        walk, precision = few.walk, cast(Precision, self.of_units.config.training.precision)
        sizes, elements = Sizes(walk.num_places, 1, 0, 0), np.array(self.elements)
        of_kinds = np.array([elements * ELEMENT_BYTES[precision], elements * FULL_BYTES, self.summands])
        of_kinds[0] *= sharding.gathers
        of_kinds[1:] *= not sharding.gathers
        for number, stage in enumerate(few.stages):
            first, members = walk.place(number, 0), list(cut.kinds[stage])
            sizes.of[Tensor.WEIGHTS : Tensor.STATE, first : first + len(members), 0] = of_kinds[:, members]
        weights, gradients, summands = map(walk.by_rank, walk.held_of_units(sizes))
        return weights + gradients + summands

    @cached_method
    def of_rank(self, present: tuple[int, ...], versions: int, buffers: int) -> StateBytes:
        """Return the bytes that a rank keeps between steps. present: number of its layers of each kind. versions,
        buffers: numbers of weight versions and of gradient buffers."""
        units = [(unit, count) for group, count in zip(self.units, present, strict=True) for unit in group if count]
        layers = [layer for layer, count in zip(self.layers, present, strict=True) for _ in range(count)]
        here = {spec.name for layer in layers for spec in layer.parameters.values()}
        units += [(tied_unit(names, layers), 1) for names in self.tied if names[0] in here]
        state = partial(self.of_units.state, num_versions=versions, gradient_buffers=buffers)
        states = [[count * part for part in state(unit)] for unit, count in units]
        return StateBytes(*map(sum, zip(*states, strict=True)))

    @cached_method
    def by_rank(self, cut: "Cut", policy: Policy) -> list[StateBytes]:
        """Return what `of_rank` returns, for every pipeline rank."""
        ranks = zip(cut.present, policy.versions_by_rank, strict=True)
        return [self.of_rank(present, versions, policy.gradient_buffers) for present, versions in ranks]

    @cached_method
    def totals(self, cut: "Cut", policy: Policy) -> Ints:
        """Return the total bytes of `by_rank`."""
        return np.array([each.total for each in self.by_rank(cut, policy)])


def _largest_sum(sizes: Floats, count: int) -> float:
    """Return the largest sum of up to `count` neighbours."""
    totals, neighbours = np.append(0.0, sizes.cumsum()), min(count, len(sizes))
    return float((totals[neighbours:] - totals[:-neighbours]).max())


@dataclass(frozen=True, eq=False)
class Cut:
    """A model divided into stages.

    ranks, kinds, spans: for each stage its rank, the kinds of its layers, and the spans that are recomputed together.
    own: stages of each rank. present: number of layers of each kind, by rank. shown: the distinct kinds of stages.
    like: index in `shown` for each stage. arrives: for each stage, whether another rank sends its input. local:
    whether the next stage is on the same rank. few: ranks that together have all kinds of layers. like_few: index in
    `few` for each rank. like_few_stages: for each stage, index among the stages of the ranks in `few`.
    """

    ranks: tuple[int, ...]
    kinds: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[range, ...], ...]
    own: tuple[tuple[int, ...], ...]
    present: tuple[tuple[int, ...], ...]
    shown: tuple[_Shown, ...]
    like: list[int]
    arrives: Mask
    local: Mask
    few: tuple[int, ...]
    like_few: list[int]
    like_few_stages: list[int]


def cut_of(run: RunLayout) -> Cut:
    """Return how a run divides its model into stages.

    Runs with the same stages on the same ranks and the same recomputation share one cached result.
    """
    spans = tuple(map(tuple, run.recomputed)) or ((),) * len(run.ranks)
    # The cached value keeps the stages alive, so that no other object gets the same id.
    return _cut(Keyed((id(run.stages), run.ranks, spans), (run, spans)))


@lru_cache(maxsize=1024)
def _cut(keyed: Keyed) -> Cut:
    run, spans = keyed.value
    ranks, kinds = run.ranks, tuple(run.classes[each.start : each.stop] for each in run.stages.ranges)
    away = np.array([one != other for one, other in pairwise(ranks)], dtype=np.bool_)
    arrives = np.append(False, away)
    shown: dict[_Shown, int] = {}
    like = [
        shown.setdefault(_Shown(own, again, bool(comes)), len(shown))
        for own, again, comes in zip(kinds, spans, arrives, strict=True)
    ]
    size = max(ranks) + 1
    own = tuple(tuple(stage for stage, each in enumerate(ranks) if each == rank) for rank in range(size))
    layers = [tuple((kinds[stage], spans[stage]) for stage in stages) for stages in own]
    mine = [[kind for stage in stages for kind in kinds[stage]] for stages in own]
    few = {layers.index(each) for each in layers} | {0, size - 1}
    fullest = sorted(set(range(size)) - few, key=lambda rank: (-len(mine[rank]), rank))
    few |= set(fullest[: max(0, RANKS - len(few))])
    chosen = sorted(few)
    like_few = [chosen.index(rank if rank in few else layers.index(layers[rank])) for rank in range(size)]
    known = sorted(stage for rank in chosen for stage in own[rank])
    chunk = [own[rank].index(stage) for stage, rank in enumerate(ranks)]
    return Cut(
        ranks,
        kinds,
        spans,
        own,
        tuple(tuple(each.count(kind) for kind in range(len(run.kinds))) for each in mine),
        tuple(shown),
        like,
        arrives,
        np.append(~away, False),
        tuple(chosen),
        like_few,
        [known.index(own[chosen[like_few[rank]]][at]) for rank, at in zip(ranks, chunk, strict=True)],
    )


class RankOrders(NamedTuple):
    """What determines when ranks hold tensors.

    cut: the run's stages. walked, short: the orders that determine what ranks hold, and which weights and gradients of
    sharded units are whole. policy: when the schedule writes weights.
    """

    cut: Cut
    walked: Order
    short: Order
    policy: Policy

    @classmethod
    def of(cls, run: RunLayout) -> "RankOrders":
        """Return the orders of a run, which depend neither on sizes of layers nor on the sharding over replicas."""
        full = Order.of(run.config, run.num_microbatches)
        short = full.short()[0]
        # The message slots of a schedule without a flush depend on the total number of micro-batches.
        return cls(cut_of(run), short if run.policy.flushes else full, short, run.policy)


def rank_memories(
    run: RunLayout, sizes: tuple[RankOrders, LayerSizes, StateSizes] | None = None
) -> tuple[RankMemory, ...]:
    """Return the memory of pipeline coordinates, in ascending order. sizes: those of the run, if known."""
    orders, layers, states = sizes or (RankOrders.of(run), LayerSizes.of(run), StateSizes.of(run))
    (cut, walked, short, policy), zero = orders, run.config.zero
    by_layer = any(run.recomputed) or (zero.stage >= 2 and states.of_units.shards > 1)
    activations, temporaries, messages = layers.held(walked, cut, by_layer)
    buffers = [0] * run.pipeline
    if states.of_units.shards > 1 and (zero.stage >= 2 or any(states.summands)):
        buffers = states.buffers(short, *sharding_of(run, cut), cut)
    ranks = zip(states.by_rank(cut, policy), activations, buffers, messages, temporaries, strict=True)
    return tuple(RankMemory(*state, *others) for state, *others in ranks)


def least_bytes(orders: RankOrders, layers: LayerSizes, states: StateSizes) -> float:
    """Return a lower bound of the bytes of the fullest rank."""
    held = layers.least_held(orders.walked, orders.cut) + states.totals(orders.cut, orders.policy)
    return float((held + states.least_buffers(orders.cut)).max())


def sharding_of(run: RunLayout, cut: Cut) -> tuple[ShardedRanks | None, ShardedRanks]:
    """Return the sharding that determines the gathers and the gradient sums of a few ranks; None without gathers.

    cut: stages of the run. Runs that shard the same cut in the same way share one cached result.
    """
    config, replicas = run.config, run.costs.of_units.replicas
    fields = repr((config.zero, config.offload, config.parallel.layers)), config.training.precision
    return _sharding(cut, Keyed((*fields, config.parallel.tensor, config.optimizer.name, replicas), run))


@lru_cache(maxsize=1024)
def _sharding(cut: Cut, keyed: Keyed) -> tuple[ShardedRanks | None, ShardedRanks]:
    run: RunLayout = keyed.value
    units, layers = run.costs.of_units, run.layers
    one_each = StageLayout(layers, tuple(range(at, at + 1) for at in range(len(layers))), ())
    # Experts with a state unit of their own are counted here together with the rest of their layer.
    config = replace(run.config, zero=replace(run.config.zero, expert_shard_size=None))
    table = StateUnits(config, one_each, units.replicas).table()
    filled = [any(unit.specs for unit in layer_units(layer, run.tied, run.config.zero)) for layer in layers]
    stages = sorted(stage for rank in cut.few for stage in cut.own[rank])
    states = tuple(
        tuple(table.units[kind][0]._replace(layer=layer) for layer, kind in enumerate(cut.kinds[stage]))
        for stage in stages
    )
    sharding = ShardedRanks(
        cut.few,
        replace(table, units=states),
        tuple(tuple(filled[kind] for kind in cut.kinds[stage]) for stage in stages),
        tuple(cut.spans[stage] for stage in stages),
        units.shards != units.replicas,
    )
    return sharding.of_weights() if sharding.gathers else None, sharding.of_gradients()
