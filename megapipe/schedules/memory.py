"""Tensors that a schedule keeps on the device, and those that it copies to host memory and back in the background.

Peaks of activations and weight halves follow from the order of the rows, not from times.

`OFFLOAD` and `RELOAD` without a version move the activations of a unit and micro-batch; with one, they move the state
of the update that makes this version: moments, and the fp32 master of bf16 weights. `SNAPSHOT` copies the state of a
version to host memory for a checkpoint; the update that replaces this state waits for the copy (CheckFreq, Mohan et
al., FAST 2021, section 4.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from megapipe.schedules.actions import BACKWARDS, GRADIENT_KINDS, Ints, Kind, Mask, Rows, rows_of
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Header, Schedule, SectionName
from megapipe.schedules.table import Table


def receive_lives(table: Table, receive: Kind) -> tuple[Ints, Ints]:
    """Return the rows of a kind of receive, by stage, then by row, and for each the last row at which the buffer that
    it fills is in use: the last backward of its stage and micro-batch, as the weight half may need that very tensor.
    Without backwards, the last forward."""
    release = (Kind.FORWARD,) if table.header.mode == "forward" else GRADIENT_KINDS
    start = table.rows_with(receive)
    start = start[np.argsort(table.stage[start], kind="stable")]
    return start, table.last_by_key(*release)[table.key[start]]


def slots_read(table: Table, receives: Ints, slots: Ints | Rows, readers: Sequence[Kind]) -> tuple[Ints, Ints]:
    """Return the compute rows of some kinds, and the slot that each reads: whole chunks, a forward's first unit, and a
    backward's last one; -1 for others.

    receives: the receives of their direction, into ``slots``.
    """
    slot_of = np.full(table.num_stages * table.num_microbatches, -1, dtype=np.int64)
    slot_of[table.key[receives]] = slots
    rows = table.rows_with(*readers)
    first = np.where(table.is_kind(Kind.FORWARD)[rows], 0, table.units[rows] - 1)
    takes_input = (table.unit[rows] < 0) | (table.unit[rows] == first)
    return rows, np.where(takes_input, slot_of[table.key[rows]], -1)


READERS: Final = ((Kind.RECV_ACTIVATION, (Kind.FORWARD,)), (Kind.RECV_GRADIENT, BACKWARDS))
"""Receives, and the kinds that read what they receive."""


def peak_activations(table: Table) -> tuple[float, ...]:
    """Return the peak number of activations alive on each rank, in micro-batches of the rank's layers of one copy of
    the model.

    An activation lives from its forward to its backward, or to the input half of a split one. A recomputed activation
    lives from its recomputation on; the inputs kept until then are not counted. Activations in host memory, and those
    of shards of the vocabulary, are not counted either.
    """
    return _peaks(table, activations_made(table), activations_gone(table))


def microbatches_held(schedule: Schedule) -> tuple[float, ...]:
    """Return for each stage the peak number of micro-batches whose activations it holds."""
    table = Table.unroll(schedule, schedule.prologue_steps + 1)
    pieces = np.where(table.unit < 0, 1, table.units) * table.header.slices
    change = (1.0 * activations_made(table) - activations_gone(table)) / pieces
    held = ((change * (table.stage == at)).cumsum() for at in range(table.num_stages))
    return tuple(float(each.max(initial=0.0).round(9)) for each in held)


def activations_made(table: Table) -> Mask:
    """Mark rows after which the activations of a backward are kept: forwards or their recomputation, and reloads."""
    recomputed = table.rows_with(Kind.RECOMPUTE)
    forwards = table.rows_with(Kind.FORWARD)
    place = unit_places(table)
    made = table.is_kind(Kind.RECOMPUTE)
    made[forwards] = ~np.isin(place[forwards], place[recomputed])
    made[activations_moved(table, Kind.RELOAD)] = True
    return made


def activations_gone(table: Table) -> Mask:
    """Mark rows after which activations are no longer kept: backwards or their input halves, and offloads."""
    gone = table.is_kind(*BACKWARDS)
    gone[activations_moved(table, Kind.OFFLOAD)] = True
    return gone


def pending_weight_halves(table: Table) -> tuple[float, ...]:
    """Return the peak number of waiting weight halves on each rank, in micro-batches of the whole rank's layers."""
    return _peaks(table, table.is_kind(Kind.BACKWARD_INPUT), table.is_kind(Kind.BACKWARD_WEIGHT))


def rank_shares(table: Table) -> npt.NDArray[np.float64]:
    """Return for each row the part that it computes of a micro-batch of whole samples through its rank's layers of one
    copy of the model, shape [rows]; 0 for passes of a shard of the vocabulary."""
    stages = np.array(table.header.stages_sharing, dtype=np.int64)[table.stage]
    shares: npt.NDArray[np.float64] = 1.0 / (np.where(table.unit < 0, 1, table.units) * stages * table.header.slices)
    return np.where(table.header.is_shard[table.stage], 0.0, shares)


def _peaks(table: Table, opening: Mask, closing: Mask) -> tuple[float, ...]:
    change = rank_shares(table) * (1.0 * opening - closing)
    held = (each.cumsum() for each in np.split(change, table.offsets[1:-1]))
    return tuple(float(each.max(initial=0.0).round(9)) for each in held)


STATES_ON_DEVICE: Final = 2
"""Maximum number of units of a rank whose optimizer state is on the device: one in its update, one on its way."""


@dataclass(frozen=True)
class Offload:
    """The tensors that a lowered schedule moves to host memory.

    ``units``: per stage, the units whose activations leave after their forward; empty for none. ``prefetch``: compute
    actions between a reload and its backward, which limits how many reloaded units wait for theirs. ``optimizer``:
    whether each unit's optimizer state is on the device only around its update.
    """

    units: tuple[tuple[int, ...], ...] = ()
    prefetch: int = 1
    optimizer: bool = False

    @property
    def activations(self) -> bool:
        """Whether any unit's activations leave."""
        return any(self.units)

    def check(self, header: Header, recompute: Sequence[Sequence[range]] = ()) -> None:
        """Raise ScheduleError unless the units are those of the header's stages, none of them is recomputed, and
        reloads come before their use. recompute: per stage, the recomputed spans."""
        if self.prefetch < 1:
            raise ScheduleError(f"prefetch is {self.prefetch}; it must be at least 1, as reloads precede backwards")
        if self.units and len(self.units) != len(header.stages):
            raise ScheduleError(f"offload has units for {len(self.units)} stages, but there are {len(header.stages)}")
        if header.host_weights.any() and header.mode == "train" and not self.optimizer:
            raise ScheduleError(
                "weights in host memory are updated together with the "
                "optimizer state, which must be offloaded too; offload both"
            )
        for stage, (count, offloaded) in enumerate(zip(header.units_per_stage, self.units, strict=False)):
            if len(set(offloaded)) < len(offloaded) or not set(offloaded) <= set(range(count)):
                raise ScheduleError(
                    f"offload of stage {stage}: units {list(offloaded)} must be distinct and from 0 to {count - 1}"
                )
        for stage, (offloaded, spans) in enumerate(zip(self.units, recompute, strict=False)):
            twice = sorted(unit for span in spans for unit in span if unit in offloaded)
            if twice:
                raise ScheduleError(f"stage {stage}: units {twice} are both recomputed and offloaded; choose one")


NOTHING: Final = Offload()


def activations_moved(table: Table, kind: Kind) -> Ints:
    """Return the rows that move activations; kind: `OFFLOAD` or `RELOAD`."""
    rows = table.rows_with(kind)
    return rows[table.version[rows] < 0]


def states_moved(table: Table, kind: Kind) -> Ints:
    """Return the rows that move optimizer state; kind: `OFFLOAD` or `RELOAD`."""
    rows = table.rows_with(kind)
    return rows[table.version[rows] >= 0]


def unit_places(table: Table) -> Ints:
    """Return stage, micro-batch and unit (or whole chunk) of each row as one number."""
    return table.key * (max(table.header.units_per_stage) + 1) + table.unit + 1


def state_places(table: Table) -> Ints:
    """Return stage, update and state unit of each row as one number."""
    header = table.header
    most = header.most_states + len(header.tied_groups)
    return table.stage_update * most + table.unit


def with_snapshots(schedule: Schedule) -> Schedule:
    """Return a lowered schedule whose first step starts to copy the state of every unit before it computes anything.

    If the schedule flushes, every step does this, because each runs the same rows. Raises ScheduleError for one that
    trains nothing, or is not lowered.
    """
    header, sections = schedule.header, schedule.sections
    if header.mode != "train" or not header.lowered:
        raise ScheduleError(
            f"{header.name} of mode {header.mode!r} updates nothing that can "
            "be copied for a checkpoint; take a lowered schedule of mode 'train'"
        )
    name: SectionName = "body" if schedule.flushes else "prologue"
    first = tuple(np.concatenate([_snapshots(header, rank), rows]) for rank, rows in enumerate(sections[name]))
    return replace(schedule, sections=replace(sections, **{name: first}))


def _snapshots(header: Header, rank: int) -> Rows:
    """Return the rows that copy the state of a rank's units before the first update of a step."""
    stage, unit = header.states_on(rank)
    kept = np.array(header.versions_per_stage, dtype=np.int32)[stage]
    return rows_of(Kind.SNAPSHOT, stage, header.microbatches_per_update - 1, unit=unit, version=kept - 1)
