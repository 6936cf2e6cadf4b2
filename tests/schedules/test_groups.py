"""Groups: neighbouring compute rows that are one action, as overlapped forwards and backwards are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.schedules import (
    Kind,
    ScheduleError,
    Sections,
    dumps,
    loads,
    lower,
    order,
    rank_costs,
    simulate,
    validate,
)
from megapipe.schedules.actions import GROUP, KIND, MICROBATCH
from megapipe.schedules.drawing.bars import bars_of
from megapipe.schedules.schedule import SECTIONS
from megapipe.schedules.states import StateTable
from tests.schedules.interpreter import run
from tests.schedules.serial import serial
from tests.schedules.support import OVERLAPPED, layouts


def test_handwritten_files_are_lowered_validated_and_written_unchanged():
    schedule = loads(OVERLAPPED)
    assert dumps(schedule) == OVERLAPPED
    lowered = lower(schedule)
    validate(lowered)
    assert "RG0.1^1 F0.2@0+B0.0@0^0 SA0.2 RG0.2^0 F0.3@0+B0.1@0^1 SA0.3" in dumps(lowered)
    assert loads(dumps(lowered)) == lowered


def test_groups_take_a_given_time_or_their_sum():
    """Rank 0 waits at its first pair until the backward of micro-batch 0 has ended on rank 1, at 1 + 1 + 2."""
    lowered = lower(loads(OVERLAPPED))
    for costs, pair in (
        (rank_costs(lowered.header), 3.0),
        (rank_costs(lowered.header, group=0.5), 1.5),
        (replace(rank_costs(lowered.header), groups={((Kind.FORWARD, 0), (Kind.BACKWARD, 0)): 2.0}), 2.0),
    ):
        simulation = simulate(lowered, costs)
        first, second = np.flatnonzero(simulation.table.group == 0).tolist()
        assert (simulation.start[first], simulation.end[second]) == (4.0, 4.0 + pair)
        assert simulation.end[first] == simulation.start[second]
        bars = [bar for bar in bars_of(simulation) if "group 0" in bar.text]
        assert [bar.kind for bar in bars] == [Kind.FORWARD, Kind.BACKWARD]
        sent = simulation.table.rows_with(Kind.SEND_ACTIVATION)
        leaves = simulation.start[sent[simulation.table.microbatch[sent] == 2]]
        assert leaves.tolist() == [4.0 + pair]


def test_the_units_of_a_group_go_together():
    header = loads(OVERLAPPED).header
    states = StateTable.uniform((2, 3), weight_pool=2, gradient_pool=2)
    schedule = replace(
        loads(OVERLAPPED), header=replace(header, units_per_stage=(2, 3), data_parallel=True, states=states)
    )
    lowered = lower(schedule)
    validate(lowered)
    assert "F0/0.2@0+B0/1.0@0^0 RG0.1^1 F0/1.2@0+B0/0.0@0 SA0.2" in dumps(lowered)
    small = replace(schedule, header=replace(schedule.header, states=StateTable.uniform((2, 3), weight_pool=1)))
    with pytest.raises(ScheduleError, match="a pool of 1 has no room for all units that one action uses"):
        lower(small)


def test_a_group_that_waits_for_itself_deadlocks():
    """Rank 1 needs the forward of micro-batch 1, which leaves rank 0 with the pair that waits for its backward."""
    with pytest.raises(ScheduleError, match="deadlocks"):
        lower(loads(OVERLAPPED.replace("F0.1 F0.2+B0.0 F0.3+B0.1", "F0.1+B0.1 F0.2 B0.0 F0.3")), checked=True)


def paired(data, rows):
    """The rows with some neighbours made groups: those of different micro-batches and kinds."""
    rows, number, at = rows.copy(), 0, 0
    while at + 1 < len(rows):
        differ = rows[at, KIND] != rows[at + 1, KIND] and rows[at, MICROBATCH] != rows[at + 1, MICROBATCH]
        if differ and data.draw(st.booleans()):
            rows[at : at + 2, GROUP] = number
            number, at = number + 1, at + 1
        at += 1
    return rows


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_grouped_schedules_end_in_the_same_weights(data):
    name = data.draw(st.sampled_from(["1f1b", "zb_h1", "interleaved_1f1b", "zb_v", "2bw"]))
    arguments = data.draw(layouts(name))
    lowering = {"receive_ahead": arguments.pop("receive_ahead")}
    plain = order(name, **arguments)
    sections = (tuple(paired(data, rows) for rows in plain.sections[part]) for part in SECTIONS)
    try:
        lowered = lower(replace(plain, sections=Sections(*sections)), **lowering)
    except ScheduleError:
        assume(False)
    validate(lowered)
    assert loads(dumps(lowered)) == lowered
    steps = 1 if lowered.flushes else 3
    simulate(lowered, rank_costs(lowered.header), steps)
    ordered = name != "interleaved_1f1b"
    assert run(lowered, steps, ordered=ordered) == serial(lowered.header, steps, ordered=ordered)
