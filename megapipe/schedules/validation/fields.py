"""Is every row a well-formed action of its rank? Columns in range or unused, stages at home, versions by rule."""

from typing import Final, NamedTuple

import numpy as np

from megapipe.schedules.actions import COMPUTE_STREAM, MICROBATCH, SLICE, SLOT, STAGE, UNIT, VERSION, Ints, Kind, Mask
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.gathers import of_sharded_gradients
from megapipe.schedules.table import Table
from megapipe.schedules.validation.failure import failure


class ColumnUse(NamedTuple):
    """Which columns a kind uses: always (True), never (False), or as the row says (None)."""

    stage: bool
    unit: bool | None
    version: bool | None
    slot: bool | None


_COMPUTE = ColumnUse(stage=True, unit=None, version=True, slot=None)
SHAPES: Final[dict[Kind, ColumnUse]] = {
    Kind.FORWARD: _COMPUTE,
    Kind.RECOMPUTE: _COMPUTE._replace(slot=False),
    Kind.BACKWARD: _COMPUTE,
    Kind.BACKWARD_INPUT: _COMPUTE,
    Kind.BACKWARD_WEIGHT: _COMPUTE._replace(slot=False),
    Kind.SEND_ACTIVATION: ColumnUse(stage=True, unit=False, version=False, slot=False),
    Kind.RECV_ACTIVATION: ColumnUse(stage=True, unit=False, version=False, slot=True),
    Kind.SEND_GRADIENT: ColumnUse(stage=True, unit=False, version=False, slot=False),
    Kind.RECV_GRADIENT: ColumnUse(stage=True, unit=False, version=False, slot=True),
    Kind.GATHER_WEIGHTS: ColumnUse(stage=True, unit=True, version=True, slot=False),
    Kind.RELEASE_WEIGHTS: ColumnUse(stage=True, unit=True, version=True, slot=False),
    Kind.REDUCE_GRADIENTS: ColumnUse(stage=True, unit=True, version=False, slot=False),
    Kind.REDUCE_TIED: ColumnUse(stage=True, unit=True, version=False, slot=False),
    Kind.REDUCE_COUNTS: ColumnUse(stage=False, unit=False, version=False, slot=False),
    Kind.REDUCE_SCALARS: ColumnUse(stage=False, unit=False, version=False, slot=False),
    Kind.OFFLOAD: ColumnUse(stage=True, unit=None, version=None, slot=False),
    Kind.RELOAD: ColumnUse(stage=True, unit=None, version=None, slot=False),
    Kind.UPDATE: ColumnUse(stage=True, unit=True, version=True, slot=False),
}
FORWARD_MODE_KINDS: Final = (
    Kind.FORWARD,
    Kind.SEND_ACTIVATION,
    Kind.RECV_ACTIVATION,
    Kind.GATHER_WEIGHTS,
    Kind.RELEASE_WEIGHTS,
)


def check_fields(table: Table) -> None:
    """Raise ScheduleError at the first row that is no well-formed action of its rank."""
    kinds = FORWARD_MODE_KINDS if table.header.mode == "forward" else tuple(SHAPES)
    unknown = np.flatnonzero((table.kind < 0) | (table.kind >= len(Kind)))
    if len(unknown):
        row = int(unknown[0])
        place = f"rank {table.rank[row]}, action {row - table.offsets[table.rank[row]]}"
        raise ScheduleError(f"{table.header.name}, {place}: {table.kind[row]} is not a kind of action")
    _require(table, table.is_kind(*kinds), f"a schedule of mode {table.header.mode!r} cannot have such actions")
    for name, column in (("stage", STAGE), ("unit", UNIT), ("version", VERSION), ("slot", SLOT)):
        _check_use(table, name, column)
    _require(table, table.rows[:, SLICE] == -1, "micro-batches of this schedule are not sliced, slice must be unused")
    microbatch = table.rows[:, MICROBATCH]
    in_steps = (microbatch >= 0) & (microbatch < table.num_microbatches)
    _require(table, in_steps, f"micro-batches are numbered from 0 to {table.num_microbatches - 1}")
    _check_stages(table)
    _check_units(table)
    _check_last_included(table)
    _check_versions(table)


def _require(table: Table, good: Mask, problem: str) -> None:
    if not good.all():
        raise failure(table, int(np.argmin(good)), problem)


def _check_use(table: Table, name: str, column: int) -> None:
    """Columns are used by the kinds that use them, and by no other."""
    always, never = np.zeros(len(Kind), dtype=np.bool_), np.zeros(len(Kind), dtype=np.bool_)
    for kind, shape in SHAPES.items():
        used = getattr(shape, name)
        always[kind], never[kind] = used is True, used is False
    values = table.rows[:, column]
    _require(table, ~(always[table.kind] & (values < 0)), f"{name} must be given")
    _require(table, ~(never[table.kind] & (values != -1)), f"{name} must be unused")
    _require(table, values >= -1, f"{name} below 0 is not a {name}")


def _check_stages(table: Table) -> None:
    stage, header = table.stage, table.header
    _require(table, stage < table.num_stages, f"there are {table.num_stages} stages")
    at_home = (stage < 0) | (header.stage_ranks[stage] == table.rank)
    if not at_home.all():
        row = int(np.argmin(at_home))
        raise failure(table, row, f"stage {stage[row]} is on rank {header.stage_ranks[stage[row]]}")


def _check_units(table: Table) -> None:
    """Compute, gathers and reductions name a unit of the stage; tied reductions and updates one that it owns."""
    plain = table.is_kind(
        *COMPUTE_STREAM, Kind.REDUCE_GRADIENTS, Kind.GATHER_WEIGHTS, Kind.RELEASE_WEIGHTS
    )  # fmt: skip
    moved = table.is_kind(Kind.OFFLOAD, Kind.RELOAD)
    plain |= moved & (table.version < 0)
    _require(table, ~plain | (table.unit < table.units), "the stage has fewer units")
    owned = table.is_kind(Kind.REDUCE_TIED, Kind.UPDATE) | (moved & (table.version >= 0))
    for row in np.flatnonzero(owned).tolist():
        stage, unit = int(table.stage[row]), int(table.unit[row])
        tied = unit >= table.header.units_per_stage[stage]
        if unit not in table.header.state_units(stage) or (table.kind[row] == Kind.REDUCE_TIED and not tied):
            raise failure(table, row, f"stage {stage} keeps no such state; it keeps {table.header.state_units(stage)}")


def _check_last_included(table: Table) -> None:
    """Reductions and updates name the last micro-batch of their update; counts that of their step."""
    reducing = table.is_kind(Kind.REDUCE_TIED, Kind.REDUCE_SCALARS, Kind.UPDATE)
    # Of sharded gradients several reductions may be in an update, each after what it includes.
    reductions = table.rows_with(Kind.REDUCE_GRADIENTS)
    reducing[reductions[~of_sharded_gradients(table, reductions)]] = True
    reducing |= table.is_kind(Kind.OFFLOAD, Kind.RELOAD) & (table.version >= 0)
    for rows, count in (
        (np.flatnonzero(reducing), table.header.microbatches_per_update),
        (table.rows_with(Kind.REDUCE_COUNTS), table.header.num_microbatches),
    ):
        wrong = rows[(table.microbatch[rows] + 1) % count != 0]
        if len(wrong):
            raise failure(
                table, int(wrong[0]), f"it must name the last micro-batch that it includes, one of every {count}"
            )


def _check_versions(table: Table) -> None:
    """A micro-batch of update k reads version k, on every stage; update k writes the version after the oldest kept."""
    kept = np.array(table.header.versions_per_stage, dtype=np.int64)[table.stage]
    writes = table.is_kind(Kind.UPDATE, Kind.OFFLOAD, Kind.RELOAD)
    expected: Ints = table.update + np.where(writes, kept, 0)
    good = (table.version < 0) | (table.version == expected)
    if not good.all():
        row = int(np.argmin(good))
        verb = "writes" if writes[row] else "reads"
        raise failure(table, row, f"update {table.update[row]} {verb} version {expected[row]}")
