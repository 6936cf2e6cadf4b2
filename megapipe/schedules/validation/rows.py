"""Checks of the header and of rows: is each a well-formed action of its rank, and does everything happen exactly once?

Everything means every chunk of every micro-batch, every message, reduction and update.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from megapipe.schedules.actions import (
    BACKWARDS,
    COMPUTE_KINDS,
    COMPUTE_STREAM,
    GRADIENT_KINDS,
    MICROBATCH,
    RECEIVES,
    SLOT,
    STAGE,
    UNIT,
    VERSION,
    Action,
    Ints,
    Kind,
    Mask,
)
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.gathers import GATHERS, STATE_KINDS, of_states
from megapipe.schedules.memory import unit_places
from megapipe.schedules.schedule import SECTIONS, Header, Origin, Schedule
from megapipe.schedules.table import Table, failure, missing, refuse, refuse_repeated
from megapipe.schedules.validation.waits import check_compute_order


def check_header(header: Header, origin: Origin | None = None) -> None:
    """Raise ScheduleError if stages, routes, counts and groups contradict one another. origin: of the schedule."""
    routes, tied = (_placed(header.name, origin, key) for key in ("route", "tied"))
    stages = range(len(header.stages))
    for rank in range(header.num_ranks):
        if not header.stages_on(rank):
            raise ScheduleError(f"{header.name}: rank {rank} of {header.num_ranks} has no stage")
    check_stages(header, origin)
    visited = {stage for route in header.routes for stage in route} | set(header.vocabulary)
    _check_shards(header, origin)
    for route in header.routes:
        if not set(route) <= set(stages) or len(set(route)) < len(route):
            raise ScheduleError(f"{routes}: route {list(route)} must visit stages 0 to {len(stages) - 1} once each")
    for stage in stages:
        if stage not in visited:
            raise ScheduleError(f"{routes}: stage {stage} is on no route; add it to one")
    for holders in header.holders:
        _check_holders(header, holders)
    for group in header.tied_groups:
        apart = {other for stage in group for other in header.holders[stage]} - set(group)
        if apart:
            raise ScheduleError(
                f"{tied}: tied group {list(group)} leaves out stage {min(apart)}, "
                "which holds the same part of the model as one of them; add it"
            )
        if header.updates_per_step > 1 and len({header.stages[stage].rank for stage in group}) > 1:
            raise ScheduleError(
                f"{tied} updates {header.updates_per_step} times per step, "
                f"but stages {list(group)} on different ranks tie a weight, "
                "so every update would wait for all of them; untie it"
            )
        if len({header.versions_per_stage[stage] for stage in group}) > 1:
            raise ScheduleError(
                f"{tied}: stages {list(group)} tie a weight and keep different numbers of versions; give them the same"
            )
    if header.slices < 1 or header.num_microbatches % header.slices:
        raise ScheduleError(
            f"{header.name}: {header.num_microbatches} slices cannot be divided into micro-batches of {header.slices}"
        )
    if header.slices > 1 and len(header.routes) > 1:
        raise ScheduleError(f"{header.name}: slices of a micro-batch cannot take several routes; leave out the routes")
    if header.whole_microbatches % header.updates_per_step:
        raise ScheduleError(
            f"{header.name}: {header.whole_microbatches} micro-batches "
            f"cannot be divided evenly into {header.updates_per_step} updates"
        )


def check_stages(header: Header, origin: Origin | None = None) -> None:
    """Raise ScheduleError unless there are counts for each stage, and tied groups consist of stages."""
    count = len(header.stages)
    slots = ("activation_slots", "gradient_slots") if header.lowered else ()
    for name, least in (("units_per_stage", 1), ("versions_per_stage", 1), *((each, 0) for each in slots)):
        values = getattr(header, name)
        if len(values) != count or min(values) < least:
            wrong = f"{header.name}: {name} {list(values)}"
            raise ScheduleError(f"{wrong} must have a value of at least {least} for each of {count} stages")
    for group in header.tied_groups:
        if not group or not set(group) <= set(range(count)):
            tied = _placed(header.name, origin, "tied")
            raise ScheduleError(f"{tied}: tied group {list(group)} must name stages 0 to {count - 1}")


def _check_shards(header: Header, origin: Origin | None) -> None:
    """Raise ScheduleError unless shards of the vocabulary are the last stages, two on each rank, after one route."""
    shards = header.vocabulary
    if not shards:
        return
    what, last = _placed(header.name, origin, "vocabulary"), len(header.stages)
    number = 2 * header.num_ranks
    ranks = [header.stages[each].rank for each in shards if each < last]
    if shards != tuple(range(last - number, last)) or ranks != 2 * list(range(header.num_ranks)):
        raise ScheduleError(
            f"{what}: vocabulary {list(shards)} must name the last {number} "
            "stages, one on each rank in turn for the output layer, then "
            "one on each for the input embedding, which older files lack; "
            "write the file again with megapipe schedule write --vocabulary"
        )
    if len(header.routes) > 1 or header.slices > 1 or not {*header.routes[0]}.isdisjoint(shards):
        raise ScheduleError(f"{what}: vocabulary needs one route of whole micro-batches without stages {list(shards)}")


def _check_holders(header: Header, holders: tuple[int, ...]) -> None:
    """Raise ScheduleError unless the stages that hold one part of the model can keep equal weights."""
    what = f"{header.name}: stages {', '.join(map(str, holders))} all hold part {header.stages[holders[0]].part}"
    if len({header.stages[stage].rank for stage in holders}) < len(holders):
        raise ScheduleError(f"{what}, two of them on one rank; a rank needs one stage for both routes")
    for name, values in (
        ("units", header.units_per_stage),
        ("versions", header.versions_per_stage),
        ("state units", header.stage_states),
    ):
        if any(values[stage] != values[holders[0]] for stage in holders):
            raise ScheduleError(f"{what} and have different {name}; give them the same")
    if len(holders) > 1 and header.updates_per_step > 1:
        raise ScheduleError(
            f"{what}, but it updates {header.updates_per_step} times per step, so "
            "that every update would wait for all of them; give each part one stage"
        )


def _placed(name: str, origin: Origin | None, key: str) -> str:
    """Return the name of a schedule, with the first header line of a key if it was read from a text that has one."""
    number = None if origin is None else origin.header.get(key)
    return name if origin is None or number is None else f"{name} ({origin.source}, line {number})"


_OF_VERSION: Final = (*GATHERS, Kind.UPDATE, Kind.SNAPSHOT)
_MOVED: Final = (Kind.OFFLOAD, Kind.RELOAD)
_NONE: Final = tuple[Kind, ...]()
COLUMN_USES: Final = {
    "stage": (STAGE, tuple(set(Kind) - {Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS}), _NONE),
    "unit": (UNIT, (*_OF_VERSION, Kind.REDUCE_GRADIENTS, Kind.REDUCE_TIED), (*COMPUTE_STREAM, *_MOVED)),
    "version": (VERSION, (*COMPUTE_STREAM, *_OF_VERSION), _MOVED),
    "slot": (SLOT, RECEIVES, (Kind.FORWARD, *BACKWARDS)),
}
"""Columns by name: number, the kinds that always use it, and those that may use it; others never do."""
FORWARD_MODE_KINDS: Final = (Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, *GATHERS)


def check_fields(table: Table) -> None:
    """Raise ScheduleError at the first row that is not a well-formed action of its rank."""
    check_places(table)
    for name in ("unit", "version", "slot"):
        _check_use(table, name)
    check_units(table)
    _check_last_included(table)
    _check_versions(table)
    _check_groups(table)


def check_places(table: Table) -> None:
    """Raise ScheduleError at the first row that is not an action for a micro-batch and a stage of its rank."""
    kinds = FORWARD_MODE_KINDS if table.header.mode == "forward" else tuple(Kind)
    unknown = np.flatnonzero((table.kind < 0) | (table.kind >= len(Kind)))
    if len(unknown):
        row = int(unknown[0])
        place = f"rank {table.rank[row]}, action {row - table.offsets[table.rank[row]]}"
        raise ScheduleError(f"{table.header.name}, {place}: {table.kind[row]} is not a kind of action")
    other = f"a schedule of mode {table.header.mode!r} cannot have such actions; remove it"
    _require(table, table.is_kind(*kinds), other)
    _check_use(table, "stage")
    microbatch = table.rows[:, MICROBATCH]
    in_steps = (microbatch >= 0) & (microbatch < table.num_microbatches)
    numbers = f"micro-batches are numbered from 0 to {table.num_microbatches - 1}"
    _require(table, in_steps, f"{numbers}; change it, or the number of them")
    _check_stages(table)


def _check_groups(table: Table) -> None:
    """Raise unless groups consist of neighbouring compute rows."""
    grouped = table.group >= 0
    _require(table, table.group >= -1, "group below 0 is not a group")
    _require(table, ~grouped | table.is_kind(*COMPUTE_KINDS), "only compute actions can be part of a group")
    opens = np.flatnonzero(grouped & (table.action_first == np.arange(len(table.rows))))
    place = table.part[opens] * (np.int64(1) << 32) + table.group[opens]
    _, first = np.unique(place, return_index=True)
    apart = ~np.isin(opens, opens[first])
    refuse(table, opens, apart, "the rows of a group must be neighbours, and its number used once")


def _require(table: Table, good: Mask, problem: str | Callable[[int], str]) -> None:
    """Raise at the first row that is not good. problem: may depend on the row."""
    refuse(table, np.arange(len(good)), ~good, problem)


def _check_use(table: Table, name: str) -> None:
    """Raise unless rows use a column as `COLUMN_USES` says for their kind."""
    column, always, sometimes = COLUMN_USES[name]
    values = table.rows[:, column]
    _require(table, ~table.is_kind(*always) | (values >= 0), f"{name} must be given; add it")
    _require(table, table.is_kind(*always, *sometimes) | (values == -1), f"{name} must be unused; leave it out")
    _require(table, values >= -1, f"{name} below 0 is not a {name}")


def _check_stages(table: Table) -> None:
    stage, header = table.stage, table.header
    _require(table, stage < table.num_stages, f"there are {table.num_stages} stages; change its stage, or add one")
    home = header.stage_ranks[stage]
    at_home = (stage < 0) | (home == table.rank)
    _require(table, at_home, lambda row: f"stage {stage[row]} is on rank {home[row]}; move it there")


def check_units(table: Table) -> None:
    """Raise ScheduleError unless compute names a layer of the stage, gathers and reductions a state unit, and tied
    reductions and updates one that it owns."""
    moved = table.is_kind(*_MOVED)
    computes = table.is_kind(*COMPUTE_STREAM) | (moved & (table.version < 0))
    there = ~computes | (table.unit < table.units)
    _require(table, there, "the stage has fewer units; change its unit, or leave it out")
    _require(table, ~table.is_kind(*STATE_KINDS) | (table.unit < table.num_states), "the stage has fewer state units")
    owned = table.is_kind(Kind.REDUCE_TIED, Kind.UPDATE, Kind.SNAPSHOT) | (moved & (table.version >= 0))
    kept = [frozenset(table.header.state_units(stage)) for stage in range(table.num_stages)]
    for row in np.flatnonzero(owned).tolist():
        stage, unit = int(table.stage[row]), int(table.unit[row])
        tied = table.header.tied_group(stage, unit) >= 0
        if unit not in kept[stage] or (table.kind[row] == Kind.REDUCE_TIED and not tied):
            raise failure(table, row, f"stage {stage} keeps no such state; it keeps {table.header.state_units(stage)}")


def _check_last_included(table: Table) -> None:
    """Raise unless reductions and updates name the last micro-batch of their update, and counts that of their step."""
    reducing = table.is_kind(Kind.REDUCE_TIED, Kind.REDUCE_SCALARS, Kind.UPDATE, Kind.SNAPSHOT)
    # An update may have several reductions of sharded gradients, each after the gradients that it includes.
    reductions = table.rows_with(Kind.REDUCE_GRADIENTS)
    reducing[of_states(table, reductions, ~table.header.sharded_gradients).row] = True
    reducing |= table.is_kind(*_MOVED) & (table.version >= 0)
    for rows, count in (
        (np.flatnonzero(reducing), table.header.microbatches_per_update),
        (table.rows_with(Kind.REDUCE_COUNTS), table.header.num_microbatches),
    ):
        wrong = (table.microbatch[rows] + 1) % count != 0
        refuse(table, rows, wrong, f"it must name the last micro-batch that it includes, one of every {count}")


def _check_versions(table: Table) -> None:
    """A micro-batch of update k reads version k, on every stage; update k writes the version after the oldest kept."""
    kept = np.array(table.header.versions_per_stage, dtype=np.int64)[table.stage]
    writes = table.is_kind(Kind.UPDATE, *_MOVED)
    # A copy for a checkpoint has the newest version before the update.
    expected: Ints = table.update + np.where(writes, kept, np.where(table.is_kind(Kind.SNAPSHOT), kept - 1, 0))

    def problem(row: int) -> str:
        return f"update {table.update[row]} {'writes' if writes[row] else 'reads'} version {expected[row]}"

    _require(table, (table.version < 0) | (table.version == expected), problem)


REMOVE_ONE = "; remove one of the two, or change its micro-batch"
NOT_ASKED = "nothing asks for it; remove it"


def check_coverage(table: Table) -> None:
    """Raise ScheduleError at the first action that is missing or appears twice."""
    on_route = _on_route(table)
    _check_compute(table, on_route)
    _check_messages(table, on_route)
    if table.header.mode == "train":
        _check_reductions(table)


def check_compute(schedule: Schedule) -> None:
    """Raise ScheduleError unless each micro-batch passes every stage of its route once, forward and backward.

    schedule: compute actions alone. Lowering relies on this.
    """
    header = schedule.header
    for section in SECTIONS:
        if (count := len(schedule.sections[section])) != header.num_ranks:
            raise ScheduleError(f"{header.name} has actions for {count} ranks, but stages on {header.num_ranks}")
    table = Table.unroll(schedule, schedule.prologue_steps + 1)
    check_places(table)
    compute = table.is_kind(*COMPUTE_KINDS)
    _require(table, compute, "give only forwards and backwards, because megapipe adds everything else")
    check_units(table)
    _check_compute(table, _on_route(table))
    check_compute_order(table)


def _on_route(table: Table) -> Mask:
    """Return for each key whether the micro-batch passes the stage."""
    header = table.header
    member = np.zeros((table.num_stages, len(header.routes)), dtype=np.bool_)
    for index, route in enumerate(header.routes):
        member[[*route, *header.vocabulary], index] = True
    return member[:, np.arange(table.num_microbatches) % len(header.routes)].ravel()


def _check_compute(table: Table, on_route: Mask) -> None:
    units = np.repeat(table.header.units_per_stage, table.num_microbatches)
    done, whole = {}, {}
    for kind in COMPUTE_KINDS:
        done[kind], whole[kind] = _count_chunks(table, kind, units)
    _require_pairs(table, Kind.FORWARD, done[Kind.FORWARD], on_route)
    if table.header.mode == "forward":
        return
    split = done[Kind.BACKWARD_INPUT] | done[Kind.BACKWARD_WEIGHT]
    both = "the backward is present both whole and in halves; remove one"
    _refuse(table, Kind.BACKWARD, split & done[Kind.BACKWARD], both)
    _require_pairs(table, Kind.BACKWARD, done[Kind.BACKWARD] | split, on_route)
    for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        _require_pairs(table, kind, done[kind], split)
    _check_recompute(table)
    differ = "forward and backward of a micro-batch must both be whole or both be in units; write both whole"
    for kind in GRADIENT_KINDS:
        _refuse(table, kind, done[kind] & (whole[kind] != whole[Kind.FORWARD]), differ)


def _check_recompute(table: Table) -> None:
    """Raise unless each recomputed forward ran before, in the same pieces, and is recomputed once."""
    recomputed, place = table.rows_with(Kind.RECOMPUTE), unit_places(table)
    refuse_repeated(table, recomputed, place[recomputed], REMOVE_ONE)
    has_forward = np.isin(place[recomputed], place[table.rows_with(Kind.FORWARD)])
    refuse(table, recomputed, ~has_forward, "there is no forward of this chunk or unit to recompute")


def _count_chunks(table: Table, kind: Kind, units: Ints) -> tuple[Mask, Mask]:
    """Return which pairs of stage and micro-batch have the kind, and which of them have it in one whole action. Raise
    if a pair has it only in part, or twice."""
    rows = table.rows_with(kind)
    cut = table.unit[rows] >= 0
    wholes = np.bincount(table.key[rows[~cut]], minlength=len(units))
    refuse_repeated(table, rows[~cut], table.key[rows[~cut]], REMOVE_ONE)
    unit_rows = rows[cut]
    refuse_repeated(table, unit_rows, unit_places(table)[unit_rows], REMOVE_ONE)
    counts = np.bincount(table.key[unit_rows], minlength=len(units))
    partial = (counts > 0) & ((counts != units) | (wholes > 0))
    problem = "some of its units are missing, or it is present both whole and in units; write it whole"
    _refuse(table, kind, partial, problem)
    return (wholes + counts) > 0, wholes > 0


def _refuse(table: Table, kind: Kind, wrong: Mask, problem: str) -> None:
    """Raise at the first row of the kind whose stage and micro-batch are marked."""
    rows = table.rows_with(kind)
    refuse(table, rows, wrong[table.key[rows]], problem)


def _require_pairs(table: Table, kind: Kind, done: Mask, wanted: Mask) -> None:
    """Raise unless exactly the wanted pairs of stage and micro-batch have the kind."""
    if (wanted & ~done).any():
        key = int(np.argmax(wanted & ~done))
        stage, microbatch = divmod(key, table.num_microbatches)
        action = Action(kind, stage, microbatch=microbatch)
        raise missing(table, table.header.stages[stage].rank, action)
    _refuse(table, kind, done & ~wanted, NOT_ASKED)


def _check_messages(table: Table, on_route: Mask) -> None:
    """Raise unless each hand-over between ranks has one send and one receive."""
    header = table.header
    routes = np.arange(table.num_microbatches) % len(header.routes)
    home = np.repeat(header.stage_ranks, table.num_microbatches)
    neighbours = (each[routes].T.ravel() for each in (header.following_stages, header.preceding_stages))
    following, preceding = (on_route & (each >= 0) & (header.stage_ranks[each] != home) for each in neighbours)
    kinds = {Kind.SEND_ACTIVATION: following, Kind.RECV_ACTIVATION: preceding}
    if header.mode == "train":
        kinds |= {Kind.RECV_GRADIENT: following, Kind.SEND_GRADIENT: preceding}
    for kind, wanted in kinds.items():
        rows = table.rows_with(kind)
        refuse_repeated(table, rows, table.key[rows], REMOVE_ONE)
        done = np.zeros(len(wanted), dtype=np.bool_)
        done[table.key[rows]] = True
        _require_pairs(table, kind, done, wanted)


def _check_reductions(table: Table) -> None:
    header = table.header
    counts = header.microbatches_per_update, header.num_microbatches
    per_update, per_step = (range(each - 1, table.num_microbatches, each) for each in counts)
    stages, ranks = range(table.num_stages), range(header.num_ranks)
    plain = [(stage, unit) for stage in stages for unit in range(len(header.stage_states[stage]))]
    state = [(stage, unit) for stage in stages for unit in header.state_units(stage)]
    tied = sorted(set(state) - set(plain))
    _require_each(table, Kind.REDUCE_COUNTS, [(rank, -1, -1, last) for rank in ranks for last in per_step])
    _require_each(table, Kind.REDUCE_SCALARS, [(rank, -1, -1, last) for rank in ranks for last in per_step])
    reductions = table.rows_with(Kind.REDUCE_GRADIENTS)
    whole = [place for place in plain if header.reduced[place[0]] and not header.sharded_gradients[place]]
    for kind, rows, places in (
        (Kind.REDUCE_GRADIENTS, of_states(table, reductions, ~header.sharded_gradients).row, whole),
        (Kind.REDUCE_TIED, table.rows_with(Kind.REDUCE_TIED), tied),
        (Kind.UPDATE, table.rows_with(Kind.UPDATE), state),
    ):
        wanted = [(header.stages[stage].rank, stage, unit, last) for stage, unit in places for last in per_update]
        _require_each(table, kind, wanted, rows)


def _require_each(
    table: Table, kind: Kind, wanted: list[tuple[int, int, int, int]], among: Ints | None = None
) -> None:
    """Raise unless rows of a kind have exactly the wanted (rank, stage, unit, micro-batch), each once. among: the rows
    to check, by default all of this kind."""
    due = set(wanted)
    for row in (table.rows_with(kind) if among is None else among).tolist():
        place = tuple(int(column[row]) for column in (table.rank, table.stage, table.unit, table.microbatch))
        if place not in due:
            raise failure(table, row, f"it appears a second time{REMOVE_ONE}" if place in wanted else NOT_ASKED)
        due.discard(place)
    if due:
        rank, stage, unit, microbatch = min(due)
        raise missing(table, rank, Action(kind, stage, unit, microbatch))
