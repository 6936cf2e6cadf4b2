"""Sharded gradients: how often units are reduced, what the validator refuses, what a missing buffer costs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import Kind, ScheduleError, build, dumps, loads, rank_costs, simulate, validate
from megapipe.schedules.states import StateTable
from tests.schedules.support import one_unit_a_layer, schedules, with_rank_rows, words


def sharded(name, ranks, microbatches, stages, units=1, buffers=2, **options):
    schedule = build(
        name,
        ranks,
        microbatches,
        units_per_stage=[units] * stages,
        data_parallel=True,
        states=StateTable.uniform([units] * stages, gradient_pool=buffers),
        **options,
    )
    validate(schedule)
    return schedule


BODIES = 3
"""Bodies of a schedule that never flushes, between its prologue and its epilogue; the middle one is the steady one."""


def reductions(schedule, rank=0):
    return sum(action.kind == Kind.REDUCE_GRADIENTS for action in schedule.actions("body", rank))


def room(schedule, places):
    """Return the pool's free room when it contains these gradients."""
    sizes = (schedule.header.stage_states[stage][unit].size for stage, unit, _ in places)
    return schedule.header.states.gradient_pool - sum(sizes)


def expected_reductions(schedule, rank):
    """Naively: a unit's gradient of an update stays if it is added to again before the pool needs its room."""
    each = schedule.header.num_microbatches // schedule.header.updates_per_step
    bodies = 1 if schedule.flushes else BODIES
    sections = schedule.expand_sections(schedule.prologue_steps + bodies)[rank]
    runs, body = [], []
    for section, rows in enumerate(sections):
        for kind, stage, unit, microbatch in rows[:, :4].tolist():
            place = stage, unit, microbatch // each
            if kind not in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                continue
            if not schedule.header.sharded_gradients[stage, unit]:
                continue
            if runs[-1:] != [place]:
                runs.append(place)
                body.append(section == (bodies + 1) // 2)
            else:
                body[-1] = section == (bodies + 1) // 2  # a run's last row decides
    states = schedule.header.stage_states
    own = [unit for stage in schedule.header.stages_on(rank) for unit in states[stage]]
    count = sum(not unit.sharded_gradients for unit in own) * schedule.header.updates_per_step
    for place, unit in enumerate(runs):
        later = runs[place + 1 :]
        others = later[: later.index(unit)] if unit in later else None
        count += body[place] and (others is None or room(schedule, {unit, *others}) < 0)
    return count


def test_two_micro_batches_of_three_layers_by_hand():
    one = words(sharded("gpipe", 1, 2, 1, units=3, buffers=1), 0)
    assert one.endswith(
        "B0/2.0 DG0/2.0 B0/1.0 DG0/1.0 B0/0.0 DG0/0.0 B0/2.1 DG0/2.1 B0/1.1 DG0/1.1 B0/0.1 DG0/0.1 "
        "DS.1 U0/0.1 U0/1.1 U0/2.1"
    )
    assert reductions(sharded("gpipe", 1, 2, 1, units=3, buffers=3)) == 3


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("microbatches", [1, 9])
def test_layered_accumulation_reduces_once_a_layer_whatever_the_microbatches(ranks, microbatches):
    layers = 5
    schedule = sharded("modular", ranks, microbatches, ranks * layers, chunks=layers)
    plain = sharded("1f1b", ranks, microbatches, ranks, units=layers)
    for rank in range(ranks):
        assert reductions(schedule, rank) == layers
        assert reductions(plain, rank) == microbatches * layers


@settings(max_examples=150, deadline=None)
@given(schedules().filter(lambda schedule: schedule.header.sharded_gradients.any() and one_unit_a_layer(schedule)))
def test_gradients_not_needed_soon_are_reduced_at_once(schedule):
    validate(schedule)
    for rank in range(schedule.header.num_ranks):
        assert reductions(schedule, rank) == expected_reductions(schedule, rank)


@settings(max_examples=100, deadline=None)
@given(st.data(), schedules().filter(lambda schedule: schedule.header.sharded_gradients.any()))
def test_dropped_or_early_reductions_are_refused(data, schedule):
    rank = data.draw(st.integers(0, schedule.header.num_ranks - 1))
    rows = schedule.sections.body[rank]
    places = [at for at, row in enumerate(rows.tolist()) if row[0] == Kind.REDUCE_GRADIENTS]
    at = data.draw(st.sampled_from(places))
    order = [index for index in range(len(rows)) if index != at]
    stage, unit = rows[at, 1:3].tolist()
    is_last = schedule.flushes and not any(
        rows[place, 1:3].tolist() == [stage, unit] for place in places if place > at
    )
    if not is_last or data.draw(st.booleans()):  # others may be dropped where buffers are left
        adding = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        place = [stage, schedule.header.stage_states[stage][unit].layer]
        crossed = next(i for i in order[:at][::-1] if rows[i, 0] in adding and rows[i, 1:3].tolist() == place)
        order.insert(order.index(crossed), at)
    with pytest.raises(ScheduleError, match="rank"):
        validate(with_rank_rows(schedule, "body", rank, rows[order]))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("DG0/1.0 B0/0.0", "B0/0.0 DG0/1.0", "gradient_pool of 1 has no room for another"),
        ("DG0/2.1", "DG0/2.0", "last micro-batch that it includes"),
        ("DG0/2.1", "DG0/2.1 DG0/2.1", "nothing was added"),
        (" DG0/0.1", "", "not reduced after it"),
    ],
)
def test_each_broken_rule_is_named(old, new, message):
    text = dumps(sharded("gpipe", 1, 2, 1, units=3, buffers=1))
    old, new = ((each.replace("B0/0.0", "B0/0.0@0")) for each in (old, new))
    assert text.count(old) == 1, text
    with pytest.raises(ScheduleError, match=message):
        validate(loads(text.replace(old, new)))


def test_what_cannot_shard_its_gradients_says_why():
    with pytest.raises(ScheduleError, match="no rank to shard them with"):
        build("1f1b", 2, 4, states=StateTable.uniform([1, 1], gradient_pool=2))
    with pytest.raises(ScheduleError, match="gradient_pool is -1"):
        build("1f1b", 2, 4, data_parallel=True, states=StateTable.uniform([1, 1], gradient_pool=-1))


def test_a_second_buffer_hides_short_reductions():
    """One rank, four units of 1 + 2 time, reductions of 1 each: with one buffer three show, the last one always."""
    times = {}
    for buffers in (1, 2):
        schedule = sharded("gpipe", 1, 1, 1, units=4, buffers=buffers)
        run = simulate(schedule, rank_costs(schedule.header, forward=4.0, backward=8.0, reduce_gradients=4.0))
        times[buffers] = run.finish
    assert times == {1: 12.0 + 4.0, 2: 12.0 + 1.0}
