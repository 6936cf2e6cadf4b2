"""Does everything happen, and exactly once? Every chunk of every micro-batch, every message, reduction and update."""

import numpy as np

from megapipe.schedules.actions import COMPUTE_KINDS, Action, Ints, Kind, Mask
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.gathers import of_states
from megapipe.schedules.schedule import SECTIONS, Schedule
from megapipe.schedules.table import Table, failure, missing
from megapipe.schedules.validation.fields import check_places, check_units
from megapipe.schedules.validation.waits import check_compute_order

REMOVE_ONE = "remove one of the two, or change its micro-batch"
NOT_ASKED = "nothing asks for it; remove it"
_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def check_coverage(table: Table) -> None:
    """Raise ScheduleError at the first action that is missing or appears twice."""
    on_route = _on_route(table)
    _check_compute(table, on_route)
    _check_messages(table, on_route)
    if table.header.mode == "train":
        _check_reductions(table)


def check_compute(schedule: Schedule) -> None:
    """Raise ScheduleError unless each micro-batch passes every stage of its route once, forward and backward.

    schedule: compute actions alone. Lowering relies on this, so schedules of users are checked before it.
    """
    header = schedule.header
    for section in SECTIONS:
        if (count := len(schedule.sections[section])) != header.num_ranks:
            raise ScheduleError(
                f"{header.name} has actions for {count} ranks, but its stages are on {header.num_ranks}"
            )
    table = Table.unroll(schedule, 1 if schedule.flushes else schedule.prologue_steps + 1)
    check_places(table)
    others = np.flatnonzero(~table.is_kind(*COMPUTE_KINDS))
    if len(others):
        raise failure(table, int(others[0]), "give only forwards and backwards, because megapipe adds everything else")
    check_units(table)
    _check_compute(table, _on_route(table))
    check_compute_order(table)


def _on_route(table: Table) -> Mask:
    """Whether the micro-batch passes the stage, for each key."""
    header = table.header
    member = np.zeros((table.num_stages, len(header.routes)), dtype=np.bool_)
    for index, route in enumerate(header.routes):
        member[[*route, *header.vocabulary], index] = True
    return member[:, np.arange(table.num_microbatches) % len(header.routes)].ravel()


def _check_compute(table: Table, on_route: Mask) -> None:
    units = np.repeat(np.array(table.header.units_per_stage, dtype=np.int64), table.num_microbatches)
    done, whole = {}, {}
    for kind in (Kind.FORWARD, *_GRADIENT):
        done[kind], whole[kind] = _count_chunks(table, kind, units)
    _require_pairs(table, Kind.FORWARD, done[Kind.FORWARD], on_route)
    if table.header.mode == "forward":
        return
    split = done[Kind.BACKWARD_INPUT] | done[Kind.BACKWARD_WEIGHT]
    _refuse(
        table,
        Kind.BACKWARD,
        split & done[Kind.BACKWARD],
        "the backward is present both whole and in halves; remove one",
    )
    _require_pairs(table, Kind.BACKWARD, done[Kind.BACKWARD] | split, on_route)
    for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        _require_pairs(table, kind, done[kind], split)
    _check_recompute(table)
    for kind in _GRADIENT:
        differs = done[kind] & (whole[kind] != whole[Kind.FORWARD])
        _refuse(
            table,
            kind,
            differs,
            "forward and backward of a micro-batch must both be whole or both be in units; write both whole",
        )


def _check_recompute(table: Table) -> None:
    """Raise unless each recomputed forward ran before, in the same pieces, and is recomputed once."""
    most = max(table.header.units_per_stage) + 1
    place = table.key * most + table.unit
    again = table.rows_with(Kind.RECOMPUTE)
    if len(again) == 0:
        return
    if len(set(place[again].tolist())) < len(again):
        raise _repeated(table, again, place[again])
    known = np.isin(place[again], place[table.rows_with(Kind.FORWARD)])
    if not known.all():
        raise failure(table, int(again[np.argmin(known)]), "there is no forward of this chunk or unit to recompute")


def _count_chunks(table: Table, kind: Kind, units: Ints) -> tuple[Mask, Mask]:
    """Return which pairs of stage and micro-batch have the kind, and which of them have it in one whole action. Raise
    if a pair has it only in part, or twice."""
    rows = table.rows_with(kind)
    cut = table.unit[rows] >= 0
    wholes = np.bincount(table.key[rows[~cut]], minlength=len(units))
    if wholes.max(initial=0) > 1:
        raise _repeated(table, rows[~cut], table.key[rows[~cut]])
    parts = rows[cut]
    order = np.lexsort((table.unit[parts], table.key[parts]))
    part_key = table.key[parts[order]] * (int(units.max()) + 1) + table.unit[parts[order]]
    if np.any(part_key[1:] == part_key[:-1]):
        raise _repeated(table, parts[order], part_key)
    counts = np.bincount(table.key[parts], minlength=len(units))
    partial = (counts > 0) & ((counts != units) | (wholes > 0))
    _refuse(
        table, kind, partial, "some of its units are missing, or it is present both whole and in units; write it whole"
    )
    return (wholes + counts) > 0, wholes > 0


def _repeated(table: Table, rows: Ints, keys: Ints) -> Exception:
    order = np.argsort(keys, kind="stable")
    second = rows[order][1:][keys[order][1:] == keys[order][:-1]][0]
    return failure(table, int(second), f"it appears a second time; {REMOVE_ONE}")


def _refuse(table: Table, kind: Kind, wrong: Mask, problem: str) -> None:
    """Raise at the first row of the kind whose stage and micro-batch are marked."""
    if wrong.any():
        rows = table.rows_with(kind)
        rows = rows[wrong[table.key[rows]]]
        raise failure(table, int(rows[0]), problem)


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
    needs = {}
    for name, neighbours in (("following", header.following_stages), ("preceding", header.preceding_stages)):
        neighbour = neighbours[routes].T.ravel()
        home = np.repeat(header.stage_ranks, table.num_microbatches)
        needs[name] = on_route & (neighbour >= 0) & (header.stage_ranks[neighbour] != home)
    kinds = {Kind.SEND_ACTIVATION: needs["following"], Kind.RECV_ACTIVATION: needs["preceding"]}
    if header.mode == "train":
        kinds |= {Kind.RECV_GRADIENT: needs["following"], Kind.SEND_GRADIENT: needs["preceding"]}
    for kind, wanted in kinds.items():
        rows = table.rows_with(kind)
        if np.bincount(table.key[rows], minlength=1).max() > 1:
            raise _repeated(table, rows, table.key[rows])
        done = np.zeros(len(wanted), dtype=np.bool_)
        done[table.key[rows]] = True
        _require_pairs(table, kind, done, wanted)


def _check_reductions(table: Table) -> None:
    header = table.header
    per_update = range(header.microbatches_per_update - 1, table.num_microbatches, header.microbatches_per_update)
    per_step = range(header.num_microbatches - 1, table.num_microbatches, header.num_microbatches)
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
            raise failure(table, row, f"it appears a second time; {REMOVE_ONE}" if place in wanted else NOT_ASKED)
        due.discard(place)
    if due:
        rank, stage, unit, microbatch = min(due)
        raise missing(table, rank, Action(kind, stage, unit, microbatch))
