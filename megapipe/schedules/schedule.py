"""A schedule as data: header, three sections of int32 rows per rank, and the questions that readers ask of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.schedules.actions import (
    KIND,
    MICROBATCH,
    STAGE,
    UNIT,
    VERSION,
    Action,
    Ints,
    Kind,
    Mask,
    Rows,
    empty_rows,
)
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.states import WHOLE_STATES, StateTable, StateUnit, whole_units

Mode = Literal["train", "forward"]
Connection = tuple[int, int]
"""Sending and receiving rank of a link."""
NumericalClass = Literal["A", "B", "C"]
SectionName = Literal["prologue", "body", "epilogue"]
KINDS: Final = {int(kind): kind for kind in Kind}
SECTIONS: Final[tuple[SectionName, ...]] = ("prologue", "body", "epilogue")


class StagePlace(NamedTuple):
    """Place of a stage: the part of the model that it runs, the number of its copy of that part, and its pipeline
    rank."""

    part: int
    replica: int
    rank: int


@dataclass(frozen=True)
class Sections:
    """Actions per rank: ``prologue`` once, ``body`` once per optimizer step, ``epilogue`` once.

    A schedule that flushes every step has a body alone.
    """

    prologue: tuple[Rows, ...]
    body: tuple[Rows, ...]
    epilogue: tuple[Rows, ...]

    @classmethod
    def flushing(cls, body: Iterable[Rows]) -> "Sections":
        """Return the sections of a schedule that ends every step with an empty pipeline. body: the rows of each
        rank."""
        rows = tuple(body)
        empty = tuple(empty_rows() for _ in rows)
        return cls(empty, rows, empty)

    def __getitem__(self, name: SectionName) -> tuple[Rows, ...]:
        return {"prologue": self.prologue, "body": self.body, "epilogue": self.epilogue}[name]


@dataclass(frozen=True)
class Header:
    """The properties of a schedule, apart from its actions.

    ``routes`` are ordered stage ids; micro-batch k takes route ``k % len(routes)``. Stages of one part of the model
    (:attr:`holders`) keep equal weights: their gradients are summed before each update. ``tied_groups`` lists, per
    tied weight, the stages that use it; on each of them, group g is numbered after its state units
    (:meth:`tied_unit`). Micro-batches and versions count from the body's step: step t adds ``t * num_microbatches``
    and ``t * updates_per_step``. A micro-batch of update k reads version k; update k writes version
    ``k + versions_per_stage[s]`` over it, so a stage keeps that many copies and its gradients are
    ``versions_per_stage[s] - 1`` updates old. Slots are receive buffers per stage. ``gradient_buffers``: number of
    updates whose gradients may be alive at once. ``slices``: number of parts of each sequence: that many micro-batches
    in turn are the slices of one batch of samples, and ``num_microbatches`` counts slices. ``vocabulary``: stages off
    the route, two on each rank (`schedules.vocabulary`): shards of the output layer, which all follow the route's last
    stage, then shards of the input embedding, which all precede its first (:attr:`outputs`, :attr:`inputs`). Compute
    actions name a layer of their stage (``units_per_stage``); gathers, reductions and updates name a state unit:
    ``states`` lists those of every stage, in the order of their layers, with what is sharded of each and where it is
    between its uses.
    """

    name: str
    mode: Mode
    num_ranks: int
    num_microbatches: int
    stages: tuple[StagePlace, ...]
    routes: tuple[tuple[int, ...], ...]
    units_per_stage: tuple[int, ...]
    numerical_class: NumericalClass
    versions_per_stage: tuple[int, ...]
    tied_groups: tuple[tuple[int, ...], ...] = ()
    data_parallel: bool = False
    updates_per_step: int = 1
    gradient_buffers: int = 1
    slices: int = 1
    vocabulary: tuple[int, ...] = ()
    states: StateTable = WHOLE_STATES
    activation_slots: tuple[int, ...] = ()
    gradient_slots: tuple[int, ...] = ()
    lowered: bool = False

    @property
    def num_versions(self) -> int:
        """Largest number of weight versions that a stage keeps."""
        return max(self.versions_per_stage)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Copies of weights that each rank keeps: its number of versions, times the copies of the model that it works
        on."""
        stages_by_rank = [self.stages_on(rank) for rank in range(self.num_ranks)]
        return tuple(
            max(self.versions_per_stage[stage] for stage in stages)
            * len({self.stages[stage].replica for stage in stages})
            for stages in stages_by_rank
        )

    @property
    def whole_microbatches(self) -> int:
        """Micro-batches of whole samples in a step."""
        return self.num_microbatches // self.slices

    @property
    def microbatches_per_update(self) -> int:
        """Micro-batches of a replica that one optimizer update covers."""
        return self.num_microbatches // self.updates_per_step

    @property
    def num_routed(self) -> int:
        """Number of stages that are on routes: all but shards of the vocabulary, which come last."""
        return len(self.stages) - len(self.vocabulary)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Shards of the output layer, by rank; none if it is on the last stage."""
        return self.vocabulary[: len(self.vocabulary) // 2]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Shards of the input embedding, by rank; none if it is on the first stage."""
        return self.vocabulary[len(self.vocabulary) // 2 :]

    @cached_property
    def is_shard(self) -> Mask:
        """Whether each stage is a shard of the output layer or the input embedding, shape [stages]."""
        return np.arange(len(self.stages)) >= self.num_routed

    @cached_property
    def stage_ranks(self) -> Ints:
        """Pipeline rank of every stage, shape [stages]."""
        return np.array([place.rank for place in self.stages], dtype=np.int64)

    @cached_property
    def following_stages(self) -> Ints:
        """The stage after each stage on each route, -1 at the end and off the route; shape [routes, stages]."""
        return self._neighbours(self.routes)

    @cached_property
    def preceding_stages(self) -> Ints:
        """The stage before each stage on each route, -1 at the start and off the route; shape [routes, stages]."""
        return self._neighbours([route[::-1] for route in self.routes])

    def _neighbours(self, routes: Sequence[tuple[int, ...]]) -> Ints:
        """Return the stage after each stage on each of some routes, -1 for none; shape [routes, stages]."""
        neighbours = np.full((len(routes), len(self.stages)), -1, dtype=np.int64)
        for index, route in enumerate(routes):
            neighbours[index, list(route[:-1])] = route[1:]
        return neighbours

    @cached_property
    def stage_states(self) -> tuple[tuple[StateUnit, ...], ...]:
        """The state units of every stage, without tied weights; one for each layer unless ``states`` lists others."""
        return self.states.units or whole_units(self.units_per_stage)

    @cached_property
    def most_states(self) -> int:
        """Largest number of state units of a stage, without tied weights; at least its largest number of layers."""
        return max(map(len, self.stage_states))

    @cached_property
    def gathered_weights(self) -> Mask:
        """Whether the weights of each state unit are gathered for their uses, shape [stages, most_states]."""
        return self._of_states(lambda unit: unit.weights != "whole", np.bool_)

    @cached_property
    def host_weights(self) -> Mask:
        """Whether the weights of each state unit are gathered from host memory, shape [stages, most_states]."""
        return self._of_states(lambda unit: unit.weights == "host", np.bool_)

    @cached_property
    def sharded_gradients(self) -> Mask:
        """Whether the gradients of each state unit are reduced into shards, shape [stages, most_states]."""
        return self._of_states(lambda unit: unit.sharded_gradients, np.bool_)

    @cached_property
    def state_sizes(self) -> Ints:
        """Part of a pool that each state unit needs, shape [stages, most_states]."""
        return self._of_states(lambda unit: unit.size, np.int64)

    @cached_property
    def first_states(self) -> Ints:
        """First state unit of each layer, then the number of state units, shape [stages, most_states + 1]."""
        layers = np.arange(self.most_states + 1)
        return np.array([np.searchsorted([unit.layer for unit in units], layers) for units in self.stage_states])

    def _of_states(self, value_of: Callable[[StateUnit], Any], dtype: type) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = np.zeros((len(self.stages), self.most_states), dtype=dtype)
        for stage, units in enumerate(self.stage_states):
            values[stage, : len(units)] = [value_of(unit) for unit in units]
        return values

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages that hold its part of the model, ascending."""
        stages_by_part: dict[int, list[int]] = {}
        for stage, place in enumerate(self.stages):
            stages_by_part.setdefault(place.part, []).append(stage)
        return tuple(tuple(stages_by_part[place.part]) for place in self.stages)

    @cached_property
    def shared(self) -> Mask:
        """Whether the part of the model of each stage is held by other stages too, shape [stages]."""
        return np.array([len(holders) > 1 for holders in self.holders], dtype=np.bool_)

    @cached_property
    def reduced(self) -> Mask:
        """Whether the gradients of each stage are summed over replicas or holders of its part, shape [stages]."""
        return self.shared | self.data_parallel

    @property
    def model_copies(self) -> int:
        """Largest number of stages that hold one part of the model."""
        return max(map(len, self.holders))

    @cached_property
    def stages_sharing(self) -> tuple[int, ...]:
        """Per stage, the number of stages of the same copy of the model on its rank, including itself. A stage has
        an equal part of that copy's layers on the rank. Shards of the vocabulary count by themselves."""
        homes = [
            (place.rank, place.replica, bool(shard)) for place, shard in zip(self.stages, self.is_shard, strict=True)
        ]
        return tuple(homes.count(home) for home in homes)

    @cached_property
    def connections(self) -> tuple[Connection, ...]:
        """Every link between ranks, in the order in which all ranks connect them: along each route from stage to
        stage, activations forward, then gradients back."""
        connections: dict[Connection, None] = {}
        for route in self.routes:
            for source, destination in pairwise(self.stages[stage].rank for stage in route):
                if source != destination:
                    connections[source, destination] = None
                    if self.mode == "train":
                        connections[destination, source] = None
        return tuple(connections)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages on a pipeline rank, ascending."""
        return tuple(stage for stage, place in enumerate(self.stages) if place.rank == rank)

    def tied_owners(self, group: int) -> tuple[int, ...]:
        """Return, for each rank that uses the weight of the group, the earliest of its stages in it: the stage that
        carries the group's reduction and update there."""
        latest_first = sorted(self.tied_groups[group], reverse=True)
        earliest = {self.stages[stage].rank: stage for stage in latest_first}
        return tuple(sorted(earliest.values()))

    def state_units(self, stage: int) -> tuple[int, ...]:
        """Return the ids of the state units that the stage updates: its own, then the tied groups that it owns on its
        rank."""
        groups = (group for group in range(len(self.tied_groups)) if stage in self.tied_owners(group))
        return (*range(len(self.stage_states[stage])), *(self.tied_unit(stage, group) for group in groups))

    def states_on(self, rank: int) -> tuple[Ints, Ints]:
        """Return stage and id of each state unit that a rank updates."""
        places = [(stage, unit) for stage in self.stages_on(rank) for unit in self.state_units(stage)]
        stage, unit = np.array(places, dtype=np.int64).T
        return stage, unit

    def states_of(self, stage: int, layer: int) -> range:
        """Return the ids of the state units of a layer of a stage."""
        first, end = self.first_states[stage, layer : layer + 2].tolist()
        return range(first, end)

    def tied_unit(self, stage: int, group: int) -> int:
        """Return the id of a tied group among the state units of a stage."""
        return len(self.stage_states[stage]) + group

    def tied_group(self, stage: int, unit: int) -> int:
        """Return the tied group of a state unit of a stage, negative for a unit of the stage's own."""
        return unit - len(self.stage_states[stage])

    def summing_ranks(self, stage: int, unit: int) -> frozenset[int]:
        """Return the pipeline ranks over which the gradients of a state unit of a stage are summed."""
        group = self.tied_group(stage, unit)
        stages = self.tied_groups[group] if group >= 0 else self.holders[stage]
        return frozenset(self.stages[each].rank for each in stages)


class RankLine(NamedTuple):
    """A rank's line in a text: its number, its actions, and line and column of each, shape [actions, 2]."""

    number: int
    rows: Rows
    places: Rows


class Origin(NamedTuple):
    """The text that a schedule was read from. header: number of the first line of each key. ranks: the line of each
    rank in each section."""

    source: str
    text: tuple[str, ...]
    header: dict[str, int]
    ranks: dict[tuple[SectionName, int], RankLine]

    def place_of(self, section: SectionName, rank: int, row: Rows, earlier: int, period: int) -> tuple[int, int]:
        """Return line and column of a row of a rank's section, unrolled or lowered; for a row that lowering added, the
        line of the rank and column 0. earlier: rows of the same action before it; period: micro-batches of a step."""
        number, rows, places = self.ranks[section, rank]
        same = (rows[:, [KIND, STAGE]] == row[[KIND, STAGE]]).all(axis=1)
        same &= (rows[:, UNIT] == -1) | (rows[:, UNIT] == row[UNIT])
        same &= (row[MICROBATCH] - rows[:, MICROBATCH]) % period == 0
        matches = places[same]
        if not len(matches):
            return number, 0
        line, column = matches[min(earlier, len(matches) - 1)].tolist()
        return line, column


@dataclass(frozen=True, eq=False)
class Schedule:
    """A pipeline schedule: the one description of a step that validator, simulator, drawing and engine read.

    ``origin``: for error messages; None for a schedule that was not read from a text, and ignored by ``==``.

    Example:
        >>> from megapipe import build
        >>> schedule = build("1f1b", 2, 4)
        >>> schedule.flushes, schedule.header.num_ranks
        (True, 2)
    """

    header: Header
    sections: Sections
    origin: Origin | None = field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        pairs = [(a, b) for name in SECTIONS for a, b in zip(self.sections[name], other.sections[name], strict=False)]
        return self.header == other.header and all(np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    @property
    def flushes(self) -> bool:
        """Whether every step ends with an empty pipeline: there is a body alone."""
        return not any(map(len, (*self.sections.prologue, *self.sections.epilogue)))

    @property
    def prologue_steps(self) -> int:
        """Steps that the prologue starts: n bodies between prologue and epilogue make ``prologue_steps + n`` steps."""
        return 0 if self.flushes else 1

    def actions(self, section: SectionName, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank in a section, in order."""
        for kind, *fields in self.sections[section][rank].tolist():
            yield Action(KINDS[kind], *fields)

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds the stage."""
        return self.header.stages[stage].rank

    def next_stage(self, stage: int, microbatch: int) -> int | None:
        """Return the stage that takes the output of ``stage`` on the micro-batch's route, None after the last."""
        return self._neighbour(self.header.following_stages, stage, microbatch)

    def previous_stage(self, stage: int, microbatch: int) -> int | None:
        """Return the stage whose output ``stage`` takes on the micro-batch's route, None before the first."""
        return self._neighbour(self.header.preceding_stages, stage, microbatch)

    def _neighbour(self, neighbours: Ints, stage: int, microbatch: int) -> int | None:
        neighbour = int(neighbours[microbatch % len(neighbours), stage])
        return None if neighbour < 0 else neighbour

    def expand(self, steps: int) -> tuple[Rows, ...]:
        """Return one flat table per rank that runs ``steps`` optimizer steps, micro-batches and versions absolute.

        Raises ScheduleError if the schedule cannot run that few steps.
        """
        return tuple(np.concatenate(sections) for sections in self.expand_sections(steps))

    def expand_sections(self, steps: int) -> list[list[Rows]]:
        """Return the rows of :meth:`expand` for each rank, cut into prologue, every body and epilogue."""
        bodies = steps - self.prologue_steps
        if bodies < 0:
            raise ScheduleError(
                f"{self.header.name} cannot run {steps} steps, because its prologue already starts one"
            )
        return [
            [prologue, *(self._at_step(body, step) for step in range(bodies)), self._at_step(epilogue, bodies)]
            for prologue, body, epilogue in zip(*(self.sections[name] for name in SECTIONS), strict=True)
        ]

    def _at_step(self, rows: Rows, step: int) -> Rows:
        return shift_rows(rows, step * self.header.num_microbatches, step * self.header.updates_per_step)


def shift_rows(rows: Rows, microbatches: int, versions: int) -> Rows:
    """Return the same actions some micro-batches and weight versions later; unused columns stay -1."""
    if len(rows) == 0 or (microbatches == 0 and versions == 0):
        return rows
    shifted = rows.copy()
    for column, amount in ((MICROBATCH, microbatches), (VERSION, versions)):
        shifted[:, column] += np.where(shifted[:, column] >= 0, amount, 0).astype(np.int32)
    return shifted
