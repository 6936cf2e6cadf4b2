"""Checks of what ranks hold: filled receive slots, gathered weights, unreduced gradients, data in host memory."""

from collections.abc import Sequence

import numpy as np

from megapipe.schedules.actions import ADDING, Ints, Kind, Mask, describe
from megapipe.schedules.gathers import GATHERS, USES, StateRows, by_place, of_states
from megapipe.schedules.memory import (
    READERS,
    STATES_ON_DEVICE,
    activations_moved,
    receive_lives,
    slots_read,
    state_places,
    states_moved,
    unit_places,
)
from megapipe.schedules.table import Table, action_at, refuse, refuse_repeated


def check_buffers(table: Table) -> None:
    """Raise ScheduleError at the first receive into a slot that is in use or unknown, or row that reads a wrong
    slot."""
    header = table.header
    for (receive, readers), slots in zip(READERS, (header.activation_slots, header.gradient_slots), strict=True):
        _check_slots(table, *receive_lives(table, receive), slots)
        _check_readers(table, receive, readers)


def _check_slots(table: Table, start: Ints, end: Ints, slots: tuple[int, ...]) -> None:
    """Raise at the first receive into a slot that the stage does not have, or that is in use. slots: by stage."""
    count = np.array(slots, dtype=np.int64)[table.stage[start]]
    refuse(table, start, table.slot[start] >= count, lambda at: f"the stage has {count[at]} slots of this direction")
    order = np.lexsort((start, table.slot[start], table.stage[start]))
    start, end = start[order], end[order]
    stage, slot = table.stage[start], table.slot[start]
    early = (stage[1:] == stage[:-1]) & (slot[1:] == slot[:-1]) & (start[1:] < end[:-1])

    def problem(index: int) -> str:
        user = describe(action_at(table, int(end[index])))
        return f"the slot is used by micro-batch {table.microbatch[start[index]]} until {user} ends"

    refuse(table, start[1:], early, problem)


def _check_readers(table: Table, receive: Kind, readers: Sequence[Kind]) -> None:
    received = table.rows_with(receive)
    rows, expected = slots_read(table, received, table.slot[received], readers)

    def problem(index: int) -> str:
        return f"slot {expected[index]} was filled for it" if expected[index] >= 0 else "it reads no receive buffer"

    refuse(table, rows, table.slot[rows] != expected, problem)


def check_gathers(table: Table) -> None:
    """Raise ScheduleError at the first use without gathered weights, or gather or release out of place."""
    header = table.header
    rows = table.rows_with(*USES, *GATHERS)
    if not header.gathered_weights.any():
        wrong = table.is_kind(*GATHERS)[rows]
        refuse(table, rows, wrong, "the schedule keeps all weights whole: no state unit of its header says otherwise")
        return
    refuse(table, rows, table.unit[rows] < 0, "weights are gathered unit by unit, and this is a whole chunk")
    whole = of_states(table, table.rows_with(*GATHERS), ~header.gathered_weights).row
    refuse(table, whole, np.full(len(whole), True), "the weights of its unit are whole: its header says so")
    every, place = by_place(table, rows, header.gathered_weights)
    _check_gather_turns(table, every.row, place)
    gather, release = (table.is_kind(kind)[every.row] for kind in GATHERS)
    _check_pool(table, "weight_pool", every, gather, release, "it")


def _check_gather_turns(table: Table, rows: Ints, place: Ints) -> None:
    """Raise unless each unit's rows, in order, are a gather, its uses, its release, and so on."""
    gather, release = (table.is_kind(kind)[rows] for kind in GATHERS)
    same = place[1:] == place[:-1]
    # Whether the row before (after) is of the same unit and releases (gathers) it; the ends of a unit's rows count as
    # if they did.
    after_release, after_gather = (np.append(end, np.where(same, mark[:-1], end)) for mark, end in (
        (release, True), (gather, False)))  # fmt: skip
    before_gather = np.append(np.where(same, gather[1:], True), True)
    refuse(table, rows, ~gather & after_release, "the weights of its unit are not gathered here")
    refuse(table, rows, gather & ~after_release, "its unit's weights are already gathered")
    refuse(table, rows, release & after_gather, "nothing uses the weights between their gather and this")
    refuse(table, rows, ~release & before_gather, "the weights of its unit are never released after it")
    microbatch = table.microbatch[rows]
    before, after = np.append(microbatch[:1], microbatch[:-1]), np.append(microbatch[1:], microbatch[-1:])
    refuse(table, rows, gather & (microbatch != after), "it must name the micro-batch that first uses the weights")
    refuse(table, rows, release & (microbatch != before), "it must name the micro-batch that last used the weights")


def _check_pool(table: Table, name: str, every: StateRows, opens: Mask, closes: Mask, what: str) -> None:
    """Raise if the units that are open on a rank at some time do not fit into a pool of the rank."""
    sizes = table.header.state_sizes[table.stage[every.row], every.unit]
    change = np.zeros(len(table.rows), dtype=np.int64)
    np.add.at(change, every.row, sizes * (1 * opens - closes))
    held = np.cumsum(change)  # each rank closes all that it opens, so it starts from 0
    pool = getattr(table.header.states, name)
    refuse(table, np.arange(len(held)), held > pool, f"the rank's {name} of {pool} has no room for {what}")


def check_gradients(table: Table) -> None:
    """Raise ScheduleError at the first misplaced reduction of sharded gradients, or gradient without reduction."""
    header = table.header
    if header.mode == "forward" or not header.sharded_gradients.any():
        return
    rows = table.rows_with(*ADDING, Kind.REDUCE_GRADIENTS)
    refuse(table, rows, table.unit[rows] < 0, "gradients are reduced unit by unit, and this is a whole chunk")
    every, place = by_place(table, rows, header.sharded_gradients)
    _check_reduction_turns(table, every.row, place)
    reduces = table.is_kind(Kind.REDUCE_GRADIENTS)[every.row]
    opens = ~reduces & np.append(True, (place[1:] != place[:-1]) | reduces[:-1])
    _check_pool(table, "gradient_pool", every, opens, reduces, "another")


def _check_reduction_turns(table: Table, rows: Ints, place: Ints) -> None:
    """Raise unless each unit's rows, in order, are backwards, a reduction, and so on, with a reduction last."""
    reduces = table.is_kind(Kind.REDUCE_GRADIENTS)[rows]
    same = place[1:] == place[:-1]
    after_addition = np.append(False, same & ~reduces[:-1])
    last = np.append(~same, True)
    refuse(table, rows, reduces & ~after_addition, "nothing was added to the gradient since its last reduction")
    refuse(table, rows, last & ~reduces, "the gradient of its unit is not reduced after it")
    microbatch = table.microbatch[rows]
    before = np.append(microbatch[:1], microbatch[:-1])
    refuse(table, rows, reduces & (microbatch != before), "it must name the last micro-batch that it includes")


def check_offload(table: Table) -> None:
    """Raise ScheduleError at the first row that moves a tensor that is not there, or moves it twice, or never brings
    it back."""
    updates = table.rows_with(Kind.UPDATE)
    if table.header.host_weights.any() and len(states_moved(table, Kind.RELOAD)) == 0:
        everything = np.ones(len(updates), dtype=np.bool_)
        refuse(table, updates, everything, "weights are in host memory, but this updates them on the device")
    if len(table.rows_with(Kind.OFFLOAD, Kind.RELOAD)) == 0:
        return
    out, back = activations_moved(table, Kind.OFFLOAD), activations_moved(table, Kind.RELOAD)
    places = unit_places(table)
    for rows in (out, back):
        refuse_repeated(table, rows, places[rows])
    forward, recomputed = (places[table.rows_with(kind)] for kind in (Kind.FORWARD, Kind.RECOMPUTE))
    refuse(table, out, ~np.isin(places[out], forward), "no forward of this chunk or unit leaves activations")
    refuse(table, out, np.isin(places[out], recomputed), "these activations are recomputed and must not be offloaded")
    _check_pairs(table, out, back, places)
    _check_states(table)


def _check_states(table: Table) -> None:
    out, back = states_moved(table, Kind.OFFLOAD), states_moved(table, Kind.RELOAD)
    if len(out) + len(back) == 0:
        return
    places = state_places(table)
    updates = table.rows_with(Kind.UPDATE)
    for rows in (out, back):
        refuse_repeated(table, rows, places[rows])
    _check_pairs(table, out, back, places)
    refuse(table, out, ~np.isin(places[out], places[updates]), "no update changes this state")
    stays = ~np.isin(places[updates], places[out])
    refuse(table, updates, stays, "the state of other updates moves, but not that of this one")
    moves = np.sort(np.concatenate([out, back]))
    # All of them leave: each starts from 0.
    present = np.cumsum(np.where(table.is_kind(Kind.RELOAD)[moves], 1, -1))
    refuse(table, moves, present > STATES_ON_DEVICE, f"the state of {STATES_ON_DEVICE} units is already on the device")


def check_snapshots(table: Table) -> None:
    """Raise ScheduleError unless checkpoints get the state of all units of an update, each unit once."""
    copies, updates, places = table.rows_with(Kind.SNAPSHOT), table.rows_with(Kind.UPDATE), state_places(table)
    if len(copies) == 0:
        return
    refuse_repeated(table, copies, places[copies])
    refuse(table, copies, ~np.isin(places[copies], places[updates]), "no update replaces this state")
    copied_updates = np.isin(table.update[updates], table.update[copies])
    missing = copied_updates & ~np.isin(places[updates], places[copies])
    refuse(
        table, updates, missing,
        "a checkpoint copies the state of other units before this update, but not "
        "that of this one; add its SNAPSHOT before it, so that it waits for the copy",
    )  # fmt: skip


def _check_pairs(table: Table, out: Ints, back: Ints, places: Ints) -> None:
    refuse(table, out, ~np.isin(places[out], places[back]), "the data that it offloads is never reloaded")
    refuse(table, back, ~np.isin(places[back], places[out]), "the data that it reloads is never offloaded")
