"""Does what leaves for host memory come back, once, and is there room for it?"""

import numpy as np

from megapipe.schedules.actions import Ints, Kind, Mask
from megapipe.schedules.offload import (
    STATES_ON_DEVICE,
    activations_moved,
    state_places,
    states_moved,
    unit_places,
)
from megapipe.schedules.table import Table
from megapipe.schedules.validation.failure import failure


def check_offload(table: Table) -> None:
    """Raise ScheduleError at the first row that moves what is not there, or moves it twice, or leaves it away."""
    updates = table.rows_with(Kind.UPDATE)
    if table.header.weights_in_host and len(states_moved(table, Kind.RELOAD)) == 0:
        everything = np.ones(len(updates), dtype=np.bool_)
        _refuse(table, updates, everything, "weights are in host memory, but this updates them on the device")
    if len(table.rows_with(Kind.OFFLOAD, Kind.RELOAD)) == 0:
        return
    out, back = activations_moved(table, Kind.OFFLOAD), activations_moved(table, Kind.RELOAD)
    places = unit_places(table)
    _require_once(table, (out, back), places)
    forward, again = (places[table.rows_with(kind)] for kind in (Kind.FORWARD, Kind.RECOMPUTE))
    _refuse(table, out, ~np.isin(places[out], forward), "no forward of this chunk or unit leaves activations")
    _refuse(table, out, np.isin(places[out], again), "these activations are recomputed and must not be offloaded")
    _check_pairs(table, out, back, places)
    _check_states(table)


def _check_states(table: Table) -> None:
    out, back = states_moved(table, Kind.OFFLOAD), states_moved(table, Kind.RELOAD)
    if len(out) + len(back) == 0:
        return
    places = state_places(table)
    updates = table.rows_with(Kind.UPDATE)
    _require_once(table, (out, back), places)
    _check_pairs(table, out, back, places)
    _refuse(table, out, ~np.isin(places[out], places[updates]), "no update changes this state")
    _refuse(
        table,
        updates,
        ~np.isin(places[updates], places[out]),
        "the state of other updates is moved, but not that of this one",
    )
    moves = np.sort(np.concatenate([out, back]))
    there = np.cumsum(np.where(table.is_kind(Kind.RELOAD)[moves], 1, -1))  # all of a rank's leave: each starts from 0
    _refuse(table, moves, there > STATES_ON_DEVICE, f"the state of {STATES_ON_DEVICE} units is already on the device")


def _require_once(table: Table, kinds: tuple[Ints, ...], places: Ints) -> None:
    for rows in kinds:
        ordered = rows[np.argsort(places[rows], kind="stable")]
        again = np.append(False, places[ordered][1:] == places[ordered][:-1])
        _refuse(table, ordered, again, "it appears a second time")


def _check_pairs(table: Table, out: Ints, back: Ints, places: Ints) -> None:
    _refuse(table, out, ~np.isin(places[out], places[back]), "the data that it offloads is never reloaded")
    _refuse(table, back, ~np.isin(places[back], places[out]), "the data that it reloads is never offloaded")


def _refuse(table: Table, rows: Ints, wrong: Mask, problem: str) -> None:
    if wrong.any():
        raise failure(table, int(rows[np.argmax(wrong)]), problem)
