"""Is no receive buffer overwritten while it is in use, and does each reader name the buffer that was filled for it?"""

import numpy as np

from megapipe.schedules.actions import Kind, Mask
from megapipe.schedules.dependencies import BACKWARDS
from megapipe.schedules.lowering.slots import GRADIENT_RELEASES, activation_releases, receive_lives
from megapipe.schedules.table import Table
from megapipe.schedules.tokens import describe
from megapipe.schedules.validation.failure import action_at, failure


def check_buffers(table: Table) -> None:
    """Raise ScheduleError at the first receive into a live or unknown slot, or reader of another slot."""
    header = table.header
    opens = table.opens_chunk()
    for receive, readers, releases, slots in (
        (Kind.RECV_ACTIVATION, (Kind.FORWARD,), activation_releases(header.mode), header.activation_slots),
        (Kind.RECV_GRADIENT, BACKWARDS, GRADIENT_RELEASES, header.gradient_slots),
    ):
        lives = receive_lives(table, receive, releases)
        slot = table.slot[lives.start].astype(np.int64)
        count = np.array(slots, dtype=np.int64)[lives.stage]
        if (slot >= count).any():
            row = int(np.argmax(slot >= count))
            raise failure(table, int(lives.start[row]), f"the stage has {count[row]} slots of this direction")
        order = np.lexsort((lives.start, slot, lives.stage))
        same = (lives.stage[order][1:] == lives.stage[order][:-1]) & (slot[order][1:] == slot[order][:-1])
        early = same & (lives.start[order][1:] < lives.end[order][:-1])
        if early.any():
            index = int(np.argmax(early))
            first, second = int(order[index]), int(order[index + 1])
            user = describe(action_at(table, int(lives.end[first])))
            problem = f"the slot is used by micro-batch {lives.microbatch[first]} until {user} ends"
            raise failure(table, int(lives.start[second]), problem)
        _check_readers(table, receive, table.is_kind(*readers), opens)


def _check_readers(table: Table, receive: Kind, reading: Mask, opens: Mask) -> None:
    received = table.rows_with(receive)
    slot_of = np.full(table.num_stages * table.num_microbatches, -1, dtype=np.int64)
    slot_of[table.key[received]] = table.slot[received]
    rows = np.flatnonzero(reading)
    expected = np.where(opens[rows], slot_of[table.key[rows]], -1)
    wrong = table.slot[rows] != expected
    if wrong.any():
        index = int(np.argmax(wrong))
        problem = f"slot {expected[index]} was filled for it" if expected[index] >= 0 else "it reads no receive buffer"
        raise failure(table, int(rows[index]), problem)
