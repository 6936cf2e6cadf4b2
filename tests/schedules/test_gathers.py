"""Sharded weights: how often units are gathered, what the validator refuses, what gathers cost."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import Kind, ScheduleError, build, dumps, loads, rank_costs, simulate, validate
from megapipe.schedules.actions import STAGE, UNIT, VERSION
from megapipe.schedules.schedule import SECTIONS
from megapipe.schedules.states import StateTable
from tests.schedules.support import one_unit_a_layer, schedules, with_rank_rows, words

PLACE = [STAGE, UNIT, VERSION]


def counted(schedule, kind, rank=0, section="body"):
    return sum(action.kind == kind for action in schedule.actions(section, rank))


def sharded(name, ranks, microbatches, stages, units=1, buffers=2, **options):
    schedule = build(
        name,
        ranks,
        microbatches,
        units_per_stage=[units] * stages,
        data_parallel=True,
        states=StateTable.uniform([units] * stages, weight_pool=buffers),
        **options,
    )
    validate(schedule)
    return schedule


def fewest_gathers(schedule, section, rank):
    """Naively: at every run hold the next different units that fit into the pool; count new ones."""
    runs, last = [], None
    for action in schedule.actions(section, rank):
        uses = action.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)
        if uses and schedule.header.gathered_weights[action.stage, action.unit]:
            place = action.stage, action.unit, action.version
            this = place if action.group < 0 else action.group
            if this != last:
                runs.append([])
            runs[-1].append(place)
            last = this
    pool, count = set(), 0
    for start in range(len(runs)):
        upcoming = list(dict.fromkeys(itertools.chain(*runs[start:])))
        sizes = [schedule.header.stage_states[stage][unit].size for stage, unit, _ in upcoming]
        room = schedule.header.states.weight_pool
        window = set(itertools.compress(upcoming, (total <= room for total in itertools.accumulate(sizes))))
        count += len(window - pool)
        pool = window
    return count


def test_two_layers_on_one_rank_by_hand():
    schedule = sharded("gpipe", 1, 1, 1, units=3, buffers=1)
    assert words(schedule, 0) == (
        "DC.0 GW0/0.0 F0/0.0 LW0/0.0 GW0/1.0 F0/1.0 LW0/1.0 GW0/2.0 F0/2.0 B0/2.0 LW0/2.0 DG0/2.0 "
        "GW0/1.0 B0/1.0 LW0/1.0 DG0/1.0 GW0/0.0 B0/0.0 LW0/0.0 DG0/0.0 DS.0 U0/0.0 U0/1.0 U0/2.0"
    )
    early = words(sharded("gpipe", 1, 1, 1, units=3), 0)
    assert early.startswith("DC.0 GW0/0.0 GW0/1.0 F0/0.0 LW0/0.0 GW0/2.0 F0/1.0 F0/2.0 B0/2.0 LW0/2.0")


@pytest.mark.parametrize(("ranks", "layers"), [(1, 8), (4, 3)])
@pytest.mark.parametrize("microbatches", [1, 9])
def test_layered_accumulation_gathers_twice_and_reduces_once(ranks, layers, microbatches):
    """Arxiv 2106.02679; the layer of the last forward and, with two buffers, the one before it are still on hand."""
    schedule = sharded("modular", ranks, microbatches, ranks * layers, chunks=layers)
    for rank in range(ranks):
        assert counted(schedule, Kind.GATHER_WEIGHTS, rank) == 2 * layers - 2
        assert counted(schedule, Kind.REDUCE_GRADIENTS, rank) == layers


@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_accumulation_by_microbatch_gathers_twice_a_microbatch(microbatches):
    """On one rank gpipe turns around once a step, 1f1b in every micro-batch and between two of them."""
    layers = 8
    gpipe = sharded("gpipe", 1, microbatches, 1, units=layers)
    assert counted(gpipe, Kind.GATHER_WEIGHTS) == 2 * microbatches * layers - 2
    alternating = sharded("1f1b", 1, microbatches, 1, units=layers)
    assert counted(alternating, Kind.GATHER_WEIGHTS) == 2 * microbatches * layers - 2 * (2 * microbatches - 1)
    for schedule in (gpipe, alternating):
        assert counted(schedule, Kind.REDUCE_GRADIENTS) == layers


@settings(max_examples=150, deadline=None)
@given((schedules() | schedules("forward")).filter(one_unit_a_layer))
def test_gathers_are_those_of_the_next_units(schedule):
    validate(schedule)
    for rank, section in itertools.product(range(schedule.header.num_ranks), SECTIONS):
        gathers = fewest_gathers(schedule, section, rank) if schedule.header.gathered_weights.any() else 0
        assert counted(schedule, Kind.GATHER_WEIGHTS, rank, section) == gathers
        assert counted(schedule, Kind.RELEASE_WEIGHTS, rank, section) == gathers


@settings(max_examples=150, deadline=None)
@given(st.data(), schedules().filter(lambda schedule: schedule.header.gathered_weights.any()))
def test_dropped_or_late_gathers_and_releases_are_refused(data, schedule):
    ranks = [rank for rank in range(schedule.header.num_ranks) if counted(schedule, Kind.GATHER_WEIGHTS, rank)]
    rank = data.draw(st.sampled_from(ranks))
    rows = schedule.sections.body[rank]
    places = [at for at, row in enumerate(rows.tolist()) if row[0] in (Kind.GATHER_WEIGHTS, Kind.RELEASE_WEIGHTS)]
    at = data.draw(st.sampled_from(places))
    order = [index for index in range(len(rows)) if index != at]
    if data.draw(st.booleans()):
        stage, unit, version = rows[at, PLACE].tolist()
        place = [stage, schedule.header.stage_states[stage][unit].layer, version]
        sign = 1 if rows[at, 0] == Kind.GATHER_WEIGHTS else -1
        compute = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
        side = order[at:] if sign > 0 else order[:at][::-1]
        crossed = next(i for i in side if rows[i, 0] in compute and rows[i, PLACE].tolist() == place)
        order.insert(order.index(crossed) + (sign > 0), at)
    with pytest.raises(ScheduleError, match=r"rank|gathered"):
        validate(with_rank_rows(schedule, "body", rank, rows[order]))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("GW0/1.0@0 F0/0.0@0", "F0/0.0@0", "not gathered here"),
        ("GW0/0.0@0 GW0/1.0@0", "GW0/0.0@0 GW0/0.0@0 GW0/1.0@0", "already gathered"),
        ("LW0/1.0@0 DG0/1.0", "LW0/1.0@0 LW0/1.0@0 DG0/1.0", "not gathered here"),
        ("LW0/0.0@0 GW0/2.0@0", "GW0/2.0@0 LW0/0.0@0", "weight_pool of 2 has no room for it"),
        ("LW0/0.0@0 DG0/0.0", "LW0/0.0@0 GW0/0.0@0 LW0/0.0@0 DG0/0.0", "nothing uses the weights"),
        ("LW0/0.0@0 DG0/0.0", "DG0/0.0", "never released"),
        ("state 0/0-2 weights sharded", "state 0/0-2", "keeps all weights whole"),
        ("GW0/0.0@0 GW0/1.0@0", "GW0/0.0 GW0/1.0@0", "version must be given"),
    ],
)
def test_each_broken_rule_is_named(old, new, message):
    text = dumps(sharded("gpipe", 1, 1, 1, units=3))
    assert text.count(old) == 1, text
    with pytest.raises(ScheduleError, match=message):
        validate(loads(text.replace(old, new)))


def test_what_cannot_shard_its_weights_says_why():
    with pytest.raises(ScheduleError, match="no rank to gather from"):
        build("1f1b", 2, 4, states=StateTable.uniform([1, 1], weight_pool=2))
    with pytest.raises(ScheduleError, match="weight_pool is -1"):
        build("1f1b", 2, 4, data_parallel=True, states=StateTable.uniform([1, 1], weight_pool=-1))


def test_prefetch_hides_gathers_that_are_shorter_than_a_unit():
    """One rank, four units of 1 + 2 time: with one buffer all gathers show, with two the first one."""
    times = {}
    for buffers in (1, 2):
        schedule = sharded("gpipe", 1, 1, 1, units=4, buffers=buffers)
        costs = rank_costs(schedule.header, forward=4.0, backward=8.0, gather_weights=2.0)
        run = simulate(schedule, costs)
        times[buffers] = run.finish
        assert run.weight_gathers == ((7,), (6,))[buffers - 1]
    assert times == {1: 12.0 + 7 * 0.5, 2: 12.0 + 0.5}


def test_layered_accumulation_hides_gathers_that_accumulation_by_microbatch_cannot():
    """Eight layers, eight micro-batches, a gather that takes as long as two forwards of its layer."""
    layered, plain = sharded("modular", 1, 8, 8, chunks=8), sharded("gpipe", 1, 8, 1, units=8)
    finish = [
        simulate(schedule, rank_costs(schedule.header, forward=8.0, gather_weights=16.0)).finish
        for schedule in (layered, plain)
    ]
    assert finish[0] == 8 * 24 + 2.0
    assert finish[1] > 8 * 24 + 60.0
