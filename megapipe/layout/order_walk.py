"""Walks that many layouts share: an order of whole stages, one micro-batch through each stage, a few ranks in full.

All of them are `layout.walk.Walk`. A search evaluates thousands of layouts with few orders, so walks are cached by
order, and have few micro-batches if the schedule repeats: the memory of a rank does not grow after two periods, and
its traffic grows by the same amount in each.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from megapipe.config.run import PretrainConfig
from megapipe.layout.scheduling import schedule_options
from megapipe.layout.stages import unplanned
from megapipe.layout.walk import NEEDED, Bytes, GradientBuffers, Sizes, Tensor, Walk
from megapipe.schedules import Kind, Options, Schedule, ScheduleError, order
from megapipe.schedules.actions import KIND, STAGE, Floats, Ints, Rows, rows_of
from megapipe.schedules.building_blocks import linear
from megapipe.schedules.gathers import last_additions, residences
from megapipe.schedules.lowering import Spans, lower
from megapipe.schedules.lowering.insertion import add_gathers, add_recompute, add_reductions, insert
from megapipe.schedules.lowering.lower import refine, unrolled
from megapipe.schedules.registry import find_generator
from megapipe.schedules.schedule import SECTIONS, Header, Sections, StagePlace
from megapipe.schedules.states import StateTable, StateUnit
from megapipe.schedules.table import Table

PERIODS = 2
"""Number of periods of an order after which the memory of ranks repeats."""


@lru_cache(maxsize=512)
def _actions(name: str, options: tuple[tuple[str, object], ...], num_ranks: int, num_microbatches: int) -> Schedule:
    return order(name, num_ranks, num_microbatches, **dict(options))  # type: ignore[arg-type]


class Order(NamedTuple):
    """A named schedule for a number of pipeline ranks and micro-batches, with sorted options."""

    name: str
    options: tuple[tuple[str, object], ...]
    num_ranks: int
    num_microbatches: int
    receive_ahead: int = 1

    @property
    def given(self) -> Options:
        """The options as the schedule takes them."""
        options: Options = Options(**dict(self.options))  # type: ignore[typeddict-item]
        return options

    @classmethod
    def of(cls, config: PretrainConfig, num_microbatches: int) -> "Order":
        """Return the order that a configuration names, for the micro-batches of one replica."""
        schedule = config.schedule
        if problems := unplanned(config):
            raise ScheduleError(problems[0])
        options = tuple(sorted(schedule_options(config).items()))
        return cls(schedule.name, options, config.parallel.pipeline, num_microbatches, schedule.receive_ahead)

    @property
    def actions(self) -> Schedule:
        """The compute actions, not lowered."""
        return _actions(*self[:4])

    @property
    def splits(self) -> bool:
        """Whether backwards are split."""
        return find_generator(self.name).splits or self.given.get("two_bp", False)

    def short(self, periods: int = PERIODS) -> tuple["Order", int]:
        """Return the order with the fewest micro-batches that ends like this one, and its period.

        periods: its minimum number of periods, if this order has that many.
        """
        count = self.num_microbatches
        options, period = find_generator(self.name).settled(self.num_ranks, count, self.given)
        fewer = count - max(0, count // period - periods) * period
        return self._replace(options=tuple(sorted(options.items())), num_microbatches=fewer), period


@lru_cache(maxsize=512)
def stage_walk(asked: Order) -> Walk:
    """Return the walk of all ranks of an order through whole stages, each a unit.

    The header of the walk is lowered, with the slots of messages.
    """
    schedule = lower(asked.actions, receive_ahead=asked.receive_ahead, checked=True, updates=False)
    sections = schedule.sections
    rows = [np.concatenate(each) for each in zip(sections.prologue, sections.epilogue, strict=True)]
    return Walk(schedule.header, sections.body if schedule.flushes else rows)


class OrderMoments(NamedTuple):
    """The moments of a step at which the memory of ranks may peak: before backwards, each kind once.

    rank: shape [moments]. first: index of each rank's first moment. kept, pending: micro-batches between forward and
    backward, and between halves, by class of stages, shape [moments, classes]. tensor, of: tensor that the backward
    needs, and class of its stage, shape [moments]. most: maximum number of micro-batches that each stage keeps, shape
    [stages].
    """

    rank: Ints
    first: Ints
    kept: Ints
    pending: Ints
    tensor: Ints
    of: Ints
    most: Ints


def before_backwards(asked: Order, classes: Ints) -> OrderMoments:
    """Return the moments of an order, which its compute actions determine, before it is lowered.

    classes: a number from 0 for each stage, the same for stages with equal sizes.
    """
    schedule = asked.actions
    sections, ranks = schedule.sections, range(schedule.header.num_ranks)
    parts = (sections.body,) if schedule.flushes else (sections.prologue, sections.epilogue)
    rows = np.concatenate([part[rank] for rank in ranks for part in parts])
    kind, stage, count = rows[:, KIND], rows[:, STAGE], int(classes.max()) + 1
    halved, tensor = kind == Kind.BACKWARD_INPUT, np.zeros(len(rows), dtype=np.int64)
    for each, needed in NEEDED.items():
        tensor[kind == each] = needed
    own = 1 * (kind == Kind.FORWARD) - (halved | (kind == Kind.BACKWARD))
    changes = np.zeros((len(rows), 2 * count), dtype=np.int64)
    changes[np.arange(len(rows)), classes[stage]] = own
    changes[np.arange(len(rows)), count + classes[stage]] = 1 * halved - (kind == Kind.BACKWARD_WEIGHT)
    rank = schedule.header.stage_ranks[stage]
    moments = np.column_stack([rank, tensor, classes[stage], changes.cumsum(axis=0) - changes])[tensor > 0]
    moments = moments[np.lexsort(moments.T[::-1])]
    moments = moments[np.append(True, (moments[1:] != moments[:-1]).any(axis=1))]
    by_stage = np.argsort(stage, kind="stable")
    starts = np.searchsorted(stage[by_stage], np.arange(len(classes)))
    rank, tensor, of = moments[:, :3].T
    most = np.maximum.reduceat(own[by_stage].cumsum(), starts)
    kept, pending = np.split(moments[:, 3:], 2, axis=1)
    return OrderMoments(rank, np.searchsorted(rank, ranks), kept, pending, tensor, of, most)


class StageBytes(NamedTuple):
    """Bytes of one micro-batch in whole stages, from a walk through their layers.

    kept, pending: between forward and backward, and between the halves of a split backward, shape [stages]. after,
    within: by kind of backward, the stage's peak bytes in addition to those before it, after the actions of its layers
    and within them, shape [2, stages]: if the gradient of its output is already on the rank, and if it is sent.
    """

    kept: Bytes
    pending: Bytes
    after: dict[Tensor, Bytes]
    within: dict[Tensor, Bytes]


class MicrobatchWalk:
    """Micro-batches through the layers of each of some stages, one at a time. The gradient of the output is on the
    rank in the first half of the variants, and is sent by another rank in the second half.

    Args:
        units: layers of each stage.
        spans: by stage, units that are recomputed together; none by default.
        splits: whether backwards may be split; then each half of the variants is a micro-batch with a whole backward,
            and one with a split backward.
    """

    def __init__(self, units: tuple[int, ...], spans: Spans, splits: bool) -> None:
        ways = [(Kind.BACKWARD,), (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)][: 1 + splits]
        kinds = [(Kind.FORWARD, *backwards) for backwards in 2 * ways]
        rows = tuple(
            np.concatenate([rows_of(each, stage, number) for number, own in enumerate(kinds) for each in own])
            for stage in range(len(units))
        )
        header = _header(units, len(kinds))
        table = refine(Table.unroll(Schedule(header, Sections.flushing(rows)), 1), everywhere=True)
        if spans:
            table, _ = insert(table, [add_recompute(table, spans)])
        self.walk = Walk(table.header, np.split(table.rows, table.offsets[1:-1]), spans, range(len(kinds)))
        again = np.where(table.is_kind(Kind.FORWARD), 0, 1 + table.is_kind(Kind.BACKWARD_WEIGHT))
        part = 3 * (table.stage * len(kinds) + table.microbatch) + again
        self._starts = np.flatnonzero(np.append(True, np.diff(part) != 0))
        self._tensors = [NEEDED.get(each) for own in kinds for each in own]
        self._splits = splits

    def stage_bytes(self, sizes: Sizes) -> StageBytes:
        """Return the bytes of stages whose layers have these sizes. The stream of the first half of the variants must
        be 0, so that their gradients leave nothing to later micro-batches."""
        held, shape = self.walk.held(sizes), (-1, len(self._tensors))
        before = held.activations[self._starts - 1].reshape(shape).T
        # The walk of whole stages counts the bytes at the end of a part.
        last = np.append(self._starts[1:] - 1, -1)
        held.activations[last[held.temporaries[last] == 0.0]] = -np.inf
        inside = held.activations.copy()
        inside[last] = -np.inf
        after, within = (
            np.maximum(0.0, np.maximum.reduceat(each, self._starts).reshape(shape).T - before)
            for each in (inside, held.activations + held.temporaries)
        )
        half = len(self._tensors) // 2
        parts = [
            {tensor: each[number::half] for number, tensor in enumerate(self._tensors[:half]) if tensor is not None}
            for each in (after, within)
        ]
        return StageBytes(before[1], before[half - 1] if self._splits else np.zeros_like(before[1]), *parts)


def _header(units: tuple[int, ...], num_microbatches: int) -> Header:
    """Return the header for stages each of which is on a separate rank."""
    placed, versions = linear(len(units), 1), (1,) * len(units)
    return Header("", "train", len(units), num_microbatches, placed.stages, placed.routes, units, "A", versions)


class ShardedRanks(NamedTuple):
    """Properties of a few ranks, other than their order, on which their whole weights and gradients depend.

    ranks: those ranks. states: the state units of their stages, one for each layer, and the pools. filled: by stage,
    whether each layer has parameters that are not tied. spans: by stage, units that are recomputed together.
    over_copies: as in `GradientBuffers`.
    """

    ranks: tuple[int, ...]
    states: StateTable
    filled: tuple[tuple[bool, ...], ...]
    spans: tuple[tuple[range, ...], ...]
    over_copies: bool

    @property
    def gathers(self) -> bool:
        """Whether any weights are gathered."""
        return any(unit.weights != "whole" for own in self.states.units for unit in own)

    def of_weights(self) -> "ShardedRanks":
        """Return the properties on which gathers depend."""
        return self._part(lambda unit: unit._replace(sharded_gradients=False))._replace(over_copies=False)

    def of_gradients(self) -> "ShardedRanks":
        """Return the properties on which sums of gradients depend."""
        return self._part(lambda unit: unit._replace(weights="whole"))._replace(spans=((),) * len(self.spans))

    def _part(self, part: Callable[[StateUnit], StateUnit]) -> "ShardedRanks":
        units = tuple(tuple(map(part, own)) for own in self.states.units)
        return self._replace(states=replace(self.states, units=units))


class FewRanks:
    """The layers of a few ranks, with state sharded over replicas, lowered except for messages, which need all ranks.

    stages: numbers of their stages.
    """

    def __init__(self, asked: Order, sharding: ShardedRanks) -> None:
        units = tuple(map(len, sharding.filled))
        schedule, self.stages = _few_ranks(asked, sharding.ranks, units)
        header = replace(schedule.header, states=sharding.states)
        self._sharding, self._flushes = sharding, schedule.flushes
        sharded = bool(header.gathered_weights.any() or header.sharded_gradients.any())
        table = _cut_table(asked, sharding.ranks, units, sharded or any(sharding.spans))
        table = replace(table, header=header)
        if any(sharding.spans):
            table, _ = insert(table, [add_recompute(table, sharding.spans)])
        self._table = table

    @cached_property
    def gathers(self) -> Floats:
        """Layers of each stage whose weights are gathered in a step, once per gather."""
        table = self._table
        start = np.zeros((table.num_stages, table.num_updates + table.header.num_versions), dtype=np.int64)
        return self._by_stage(residences(table, start).first_use)

    @cached_property
    def sums(self) -> Floats:
        """Layers of each stage whose gradients are summed in a step, once per sum."""
        whole = [sum(not unit.sharded_gradients for unit in own) for own in self._table.header.stage_states]
        return np.array(whole) * self._table.header.updates_per_step + self._by_stage(last_additions(self._table).row)

    def _by_stage(self, rows: Ints) -> Floats:
        table = self._table
        steady = rows[table.section[rows] == (1 if self._flushes else 2)]
        return np.bincount(table.stage[steady], minlength=table.num_stages).astype(np.float64)

    @cached_property
    def walk(self) -> Walk:
        """The walk of a step before and after which the pipeline is empty."""
        table, sharding = self._table, self._sharding
        header = table.header
        added = add_reductions(table, lazy=header.gradient_buffers > 1, flushes=self._flushes)
        gathers = add_gathers(table, added) if header.gathered_weights.any() else []
        table, _ = insert(table, [*gathers, *added])
        step = self._flushes | (table.section == 0) | (table.section == table.num_sections - 1)
        rows = [table.rows[step & (table.rank == rank)] for rank in range(header.num_ranks)]
        filled = np.zeros((table.num_stages, max(header.units_per_stage)), dtype=np.bool_)
        for stage, own in enumerate(sharding.filled):
            filled[stage, : len(own)] = own
        sharded = header.sharded_gradients & filled
        buffers = GradientBuffers(sharded.ravel(), filled.ravel(), sharding.over_copies)
        return Walk(header, rows, gradients=buffers)


few_ranks = lru_cache(maxsize=1024)(FewRanks)


@lru_cache(maxsize=256)
def _cut_table(asked: Order, ranks: tuple[int, ...], units: tuple[int, ...], everywhere: bool) -> Table:
    """Return the compute actions of a few ranks, cut into units, without states. Versions count updates."""
    schedule, _ = _few_ranks(asked, ranks, units)
    return refine(unrolled(schedule), everywhere=everywhere)


@lru_cache(maxsize=256)
def _few_ranks(asked: Order, ranks: tuple[int, ...], units: tuple[int, ...]) -> tuple[Schedule, tuple[int, ...]]:
    """Return compute actions of a few ranks, with ranks and stages numbered from 0, and the numbers of the stages.
    units: number of layers of each of these stages."""
    schedule, header = asked.actions, asked.actions.header
    stages = tuple(stage for stage, place in enumerate(header.stages) if place.rank in ranks)
    number = np.zeros(len(header.stages), dtype=np.int32)
    number[list(stages)] = range(len(stages))

    def renumbered(rows: Rows) -> Rows:
        result = rows.copy()
        result[:, STAGE] = number[rows[:, STAGE]]
        return result

    sections = Sections(*(tuple(renumbered(schedule.sections[name][rank]) for rank in ranks) for name in SECTIONS))
    places = tuple(StagePlace(new, 0, ranks.index(header.stages[stage].rank)) for new, stage in enumerate(stages))
    header = replace(
        header,
        num_ranks=len(ranks),
        stages=places,
        routes=(tuple(range(len(stages))),),
        units_per_stage=units,
        versions_per_stage=tuple(header.versions_per_stage[stage] for stage in stages),
        data_parallel=True,
    )
    return Schedule(header, sections), stages
