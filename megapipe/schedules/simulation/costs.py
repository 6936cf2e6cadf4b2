"""Times that the simulator runs a schedule with, in any one unit of time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.schedules.actions import COMPUTE_STREAM, KIND, STAGE, UNIT, Floats, Ints, Kind
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Header
from megapipe.schedules.table import Table
from megapipe.schedules.vocabulary import PASS_SECONDS

OF_STATES: Final = (Kind.GATHER_WEIGHTS, Kind.REDUCE_GRADIENTS, Kind.UPDATE, Kind.SNAPSHOT)
"""Kinds whose rows name a state unit."""
TIMED: Final = (*COMPUTE_STREAM, Kind.OFFLOAD, Kind.RELOAD, *OF_STATES)
"""Kinds whose rows take the time of their stage and unit."""


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: a message keeps it busy for ``transfer`` and arrives ``latency`` later."""

    latency: float = 0.0
    transfer: float = 0.0


class CostPlace(NamedTuple):
    """The key of a time: a kind of action on one unit of a stage, or -1 for the whole stage.

    unit: a layer, or a state unit for gathers, reductions and updates. slice: of a sequence, -1 for each of them.
    """

    kind: Kind
    stage: int
    unit: int = -1
    slice: int = -1


@dataclass(frozen=True)
class Costs:
    """Durations of actions.

    ``times`` has an entry for every kind, stage and unit that a timed row names (`TIMED`), or one for each slice; a
    row without one is an error. Gathers and reductions of a rank share one stream in the background of its compute.
    Offloads and reloads of activations take one copy stream a direction, as do gathers of weights from host memory
    and copies for a checkpoint; ``moved_states`` gives the copy of each stage's state units, one way. ``group``: the
    time of a group of rows, which is one action, as a fraction of the sum of its rows' times; ``groups`` gives the
    time itself for groups of whole chunks, by the kind and stage of each row; groups of units take the same fraction.
    ``links`` replaces ``link`` for pairs of ranks (from, to). Sends run in the background, one after another on each
    link; with ``blocking_sends`` they block the sender until the message has arrived, and start only when the
    receive is posted.
    """

    times: Mapping[CostPlace, float]
    moved_states: Mapping[tuple[int, int], float] = field(default_factory=dict)
    reduce_tied: float = 0.0
    reduce_scalars: float = 0.0
    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    blocking_sends: bool = False
    group: float = 1.0
    groups: Mapping[tuple[tuple[Kind, int], ...], float] = field(default_factory=dict)

    def with_times(self, times: Mapping[CostPlace, float]) -> "Costs":
        """Return the costs with some times replaced or added."""
        return replace(self, times={**self.times, **times})

    def without(self, *kinds: Kind) -> "Costs":
        """Return the costs with a time of 0 for rows of some kinds; copies of optimizer state keep theirs."""
        times = {place: 0.0 if place.kind in kinds else time for place, time in self.times.items()}
        return replace(self, times=times)

    def of_stages(self, kind: Kind) -> tuple[float, ...]:
        """Return the time of a kind for each whole stage."""
        whole = {place.stage: time for place, time in self.times.items() if place == CostPlace(kind, place.stage)}
        return tuple(time for _, time in sorted(whole.items()))

    def durations(self, table: Table) -> Floats:
        """Return the time of every row, on its rank's compute stream or on the stream of its traffic; shape [rows].

        Raises:
            ScheduleError: a timed row has no time.
        """
        row_times, timed = np.zeros(len(table.rows)), table.is_kind(*TIMED)
        moved = np.flatnonzero(table.is_kind(Kind.OFFLOAD, Kind.RELOAD) & (table.version >= 0))
        timed[moved] = False
        places = table.rows[:, [KIND, STAGE, UNIT]]
        by_slice = any(place.slice >= 0 for place in self.times)
        of_slices = table.microbatch % table.header.slices if by_slice else np.full(len(places), -1)
        row_times[timed] = _looked_up(table, np.flatnonzero(timed), np.c_[places, of_slices], self.times)
        row_times[moved] = _looked_up(table, moved, places[:, 1:], self.moved_states)
        row_times[table.rows_with(Kind.REDUCE_TIED)] = self.reduce_tied
        row_times[table.rows_with(Kind.REDUCE_SCALARS)] = self.reduce_scalars
        return self._grouped(table, row_times)

    def _grouped(self, table: Table, row_times: Floats) -> Floats:
        """Return the rows' times, where those of a group are scaled so that they add up to the group's."""
        if not (table.group >= 0).any():
            return row_times
        scaled = row_times.copy()
        for first in sorted(set(table.action_first[table.group >= 0].tolist())):
            rows = slice(first, table.action_last[first] + 1)
            places = tuple(zip(map(Kind, table.kind[rows].tolist()), table.stage[rows].tolist(), strict=True))
            whole = sum(self.times[CostPlace(*place)] for place in places) if places in self.groups else 0.0
            scaled[rows] *= self.groups[places] / whole if whole > 0 else self.group
        return scaled


def _looked_up(
    table: Table,
    rows: Ints,
    places: npt.NDArray[np.integer],
    times: Mapping[CostPlace, float] | Mapping[tuple[int, int], float],
) -> Floats:
    """Return the time of some rows by their places, shape [all rows, columns]."""
    if len(rows) == 0:
        return np.zeros(0)
    keys = places[rows].astype(np.int64)
    numbers = np.ravel_multi_index(tuple((keys + 1).T), tuple(keys.max(axis=0) + 2))
    _, first, place = np.unique(numbers, return_index=True, return_inverse=True)
    by_key: Mapping[tuple[int, ...], float] = times  # type: ignore[assignment]
    unique = np.array([by_key.get(tuple(key), by_key.get((*key[:-1], -1), np.nan)) for key in keys[first].tolist()])
    missing = np.flatnonzero(np.isnan(unique))
    if len(missing):
        row = table.rows[rows[first[missing[0]]]]
        raise ScheduleError(
            f"the costs have no time of {Kind(row[KIND]).name} for unit {row[UNIT]} of stage {row[STAGE]} of "
            f"{table.header.name} (-1 is the whole stage); give one for every action"
        )
    return unique[place]


def stage_times(header: Header, totals: Mapping[Kind, Sequence[float]]) -> dict[CostPlace, float]:
    """Divide times of whole stages among their units; for times that the user gives, when nothing is known of units.

    totals: of each kind, one entry a stage. A layer takes an equal part of its stage's compute, a state unit a part of
    the gathers and reductions by its size and an equal part of the update and of the copy for a checkpoint; a slice
    takes an equal part of the compute and copies of a micro-batch. All other costs are times of units.
    """
    times = {}
    for kind, by_stage in totals.items():
        slices = 1 if kind in OF_STATES else header.slices
        for stage, total in enumerate(each / slices for each in by_stage):
            times[CostPlace(kind, stage)] = total
            portions = dict(_unit_portions(header, kind, stage))
            whole = sum(portions.values())
            times |= {CostPlace(kind, stage, unit): total * portion / whole for unit, portion in portions.items()}
    return times


def _unit_portions(header: Header, kind: Kind, stage: int) -> Iterator[tuple[int, int]]:
    """Yield each unit of a stage that a kind of action names, and its part of the stage's time."""
    if kind in (Kind.UPDATE, Kind.SNAPSHOT):
        yield from ((unit, 1) for unit in header.state_units(stage))
    elif kind in OF_STATES:
        yield from enumerate(max(1, unit.size) for unit in header.stage_states[stage])
    else:
        yield from ((layer, 1) for layer in range(header.units_per_stage[stage]))


def rank_costs(
    header: Header,
    *,
    forward: float = 1.0,
    recompute: float | None = None,
    backward: float | None = None,
    backward_input: float | None = None,
    backward_weight: float | None = None,
    update: float = 0.0,
    reduce_gradients: float = 0.0,
    gather_weights: float = 0.0,
    reduce_scalars: float = 0.0,
    link: Link = Link(),
    blocking_sends: bool = False,
    offload: float = 0.0,
    offload_state: float = 0.0,
    snapshot: float = 0.0,
    group: float = 1.0,
    vocabulary: float = PASS_SECONDS,
) -> Costs:
    """Return costs from the times of one rank's layers of one copy of the model. Its stages take equal parts of these
    times, and the slices of a micro-batch take equal parts of its compute, copies and messages.

    A whole backward takes ``backward`` or the sum of its halves; halves not given are equal parts of it. Without any
    of the three a backward takes twice the forward. A recomputed forward takes ``recompute``, or as long as the
    forward. ``group`` is a fraction, as in :class:`Costs`. A pass of a shard of the output layer takes ``vocabulary``
    forwards; an input half of its backward, and a pass of a shard of the input embedding, take no time. Units of a
    stage divide its times as in :func:`stage_times`.

    Example:
        >>> from megapipe import build, rank_costs, simulate
        >>> schedule = build("1f1b", 2, 4)
        >>> simulate(schedule, rank_costs(schedule.header, forward=2.0, backward=4.0)).finish
        30.0
    """
    recompute = forward if recompute is None else recompute
    if backward_input is None and backward_weight is None:
        backward = 2.0 * forward if backward is None else backward
        backward_input = backward_weight = backward / 2.0
    if backward_input is None or backward_weight is None:
        raise ScheduleError("set both halves of the backward (input and weight), or neither")
    backward = backward_input + backward_weight if backward is None else backward
    times = {
        Kind.FORWARD: forward, Kind.RECOMPUTE: recompute, Kind.BACKWARD: backward,
        Kind.BACKWARD_INPUT: backward_input, Kind.BACKWARD_WEIGHT: backward_weight, Kind.UPDATE: update,
        Kind.REDUCE_GRADIENTS: reduce_gradients, Kind.GATHER_WEIGHTS: gather_weights, Kind.OFFLOAD: offload,
        Kind.RELOAD: offload, Kind.SNAPSHOT: snapshot,
    }  # fmt: skip
    values = (*times.values(), offload_state)
    if min(*values, group, reduce_scalars, link.latency, link.transfer) < 0 or forward + backward <= 0:
        raise ScheduleError(f"times must be at least 0 and compute times above 0, got {values}")
    shares, passes = header.stages_sharing, (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    states = [(stage, header.state_units(stage)) for stage in range(len(shares))]
    return Costs(
        stage_times(
            header,
            {
                kind: [
                    vocabulary * forward * (kind in passes and stage in header.outputs) if shard else time / share
                    for stage, (share, shard) in enumerate(zip(shares, header.is_shard, strict=True))
                ]
                for kind, time in times.items()
            },
        ),
        {(stage, unit): offload_state / shares[stage] / len(units) for stage, units in states for unit in units},
        reduce_scalars=reduce_scalars,
        link=Link(link.latency, link.transfer / header.slices),
        blocking_sends=blocking_sends,
        group=group,
    )
