"""Weights and gradients sharded, or weights in host memory: how often units are exchanged, and what that costs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import Kind, Offload, ScheduleError, build, dumps, loads, rank_costs, simulate, validate
from megapipe.schedules.actions import KIND, STAGE, UNIT, VERSION
from megapipe.schedules.build import fit_for_training
from megapipe.schedules.schedule import SECTIONS
from megapipe.schedules.states import WHOLE_STATES
from tests.schedules.support import in_host, one_unit_a_layer, schedules, sharded, with_rank_rows, words

BODIES = 3
"""Bodies of a schedule that never flushes, between its prologue and its epilogue; the middle one is the steady one."""


def counted(schedule, kind, rank=0, section="body"):
    return sum(action.kind == kind for action in schedule.actions(section, rank))


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


@settings(max_examples=150, deadline=None)
@given((schedules() | schedules("forward")).filter(one_unit_a_layer))
def test_gathers_are_those_of_the_next_units(schedule):
    validate(schedule)
    for rank, section in itertools.product(range(schedule.header.num_ranks), SECTIONS):
        gathers = fewest_gathers(schedule, section, rank) if schedule.header.gathered_weights.any() else 0
        assert counted(schedule, Kind.GATHER_WEIGHTS, rank, section) == gathers
        assert counted(schedule, Kind.RELEASE_WEIGHTS, rank, section) == gathers


EXCHANGES = (Kind.GATHER_WEIGHTS, Kind.RELEASE_WEIGHTS, Kind.REDUCE_GRADIENTS)
USES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
SUMS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


@settings(max_examples=250, deadline=None)
@given(st.data(), schedules().filter(lambda schedule: schedule.header.sharded_gradients.any()))
def test_dropped_or_misplaced_exchanges_are_refused(data, schedule):
    """Gathers are moved after a compute that needs them, releases before their last use, reductions before a sum."""
    rank = data.draw(st.integers(0, schedule.header.num_ranks - 1))
    rows = schedule.sections.body[rank]
    at = data.draw(st.sampled_from(np.flatnonzero(np.isin(rows[:, KIND], EXCHANGES)).tolist()))
    order = [index for index in range(len(rows)) if index != at]
    kind, stage, unit = rows[at, [KIND, STAGE, UNIT]].tolist()
    reduces, gathers = kind == Kind.REDUCE_GRADIENTS, kind == Kind.GATHER_WEIGHTS
    reduced_later = (rows[at + 1 :, :3] == rows[at, :3]).all(axis=1).any()
    # Without a reduction, gradients may wait in a buffer for a later one.
    if (reduces and (reduced_later or not schedule.flushes)) or data.draw(st.booleans()):
        place = [STAGE, UNIT] if reduces else [STAGE, UNIT, VERSION]
        used = rows[at].copy()
        used[UNIT] = schedule.header.stage_states[stage][unit].layer
        computes = np.isin(rows[:, KIND], SUMS if reduces else USES) & (rows[:, place] == used[place]).all(axis=1)
        crossed = next(index for index in (order[at:] if gathers else order[:at][::-1]) if computes[index])
        order.insert(order.index(crossed) + gathers, at)
    with pytest.raises(ScheduleError, match=r"rank|gathered"):
        validate(with_rank_rows(schedule, "body", rank, rows[order]))


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


@settings(max_examples=150, deadline=None)
@given(schedules().filter(lambda schedule: schedule.header.sharded_gradients.any() and one_unit_a_layer(schedule)))
def test_gradients_not_needed_soon_are_reduced_at_once(schedule):
    validate(schedule)
    for rank in range(schedule.header.num_ranks):
        assert counted(schedule, Kind.REDUCE_GRADIENTS, rank) == expected_reductions(schedule, rank)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_layered_accumulation_exchanges_as_rarely_as_published(ranks, microbatches):
    """arXiv 2106.02679: twice and once a step, by micro-batch so often in each; layers in the two buffers stay."""
    layers, pools = 5, {"weight_pool": 2, "gradient_pool": 2}
    layered = sharded("modular", ranks, microbatches, [1] * (ranks * layers), chunks=layers, **pools)
    gpipe, alternating = (sharded(name, 1, microbatches, [layers], **pools) for name in ("gpipe", "1f1b"))
    for rank in range(ranks):
        assert counted(layered, Kind.GATHER_WEIGHTS, rank) == 2 * layers - 2
        assert counted(layered, Kind.REDUCE_GRADIENTS, rank) == layers
    every = 2 * microbatches * layers
    assert counted(gpipe, Kind.GATHER_WEIGHTS) == every - 2
    # On one rank 1F1B turns around in every micro-batch and between two of them.
    assert counted(alternating, Kind.GATHER_WEIGHTS) == every - 2 * (2 * microbatches - 1)
    assert counted(alternating, Kind.REDUCE_GRADIENTS) == every // 2


@pytest.mark.parametrize(
    ("pool", "costs", "gathers", "shown"),
    [
        ({"weight_pool": 1}, {"gather_weights": 2.0}, 7, 7 * 0.5),
        ({"weight_pool": 2}, {"gather_weights": 2.0}, 6, 0.5),
        ({"gradient_pool": 1}, {"reduce_gradients": 4.0}, 0, 4.0),
        ({"gradient_pool": 2}, {"reduce_gradients": 4.0}, 0, 1.0),
    ],
)
def test_a_second_buffer_hides_short_exchanges(pool, costs, gathers, shown):
    """One rank, four units of 1 + 2 time, gathers of 0.5 or reductions of 1 each: with one buffer all gathers and
    three reductions show, with two the first gather and the last reduction."""
    schedule = sharded("gpipe", 1, 1, [4], **pool)
    run = simulate(schedule, rank_costs(schedule.header, forward=4.0, backward=8.0, **costs))
    assert (run.weight_gathers, run.finish) == ((gathers,), 12.0 + shown)


def test_layered_accumulation_hides_gathers_that_accumulation_by_microbatch_cannot():
    """Eight layers, eight micro-batches, a gather that takes as long as two forwards of its layer."""
    layered = sharded("modular", 1, 8, [1] * 8, chunks=8, weight_pool=2)
    plain = sharded("gpipe", 1, 8, [8], weight_pool=2)
    finish = [
        simulate(schedule, rank_costs(schedule.header, forward=8.0, gather_weights=16.0)).finish
        for schedule in (layered, plain)
    ]
    assert finish[0] == 8 * 24 + 2.0
    assert finish[1] > 8 * 24 + 60.0


def placed(schedule, *left_out):
    return [word for word in words(schedule, 0).split() if not word.startswith(left_out)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "modular", "zb_h1", "zb_v"])
def test_host_weights_come_and_go_where_sharded_ones_do(name):
    """Apart from the reductions of replicas and the moves around updates, the two schedules are the same."""
    layers = [3] * (2 * (2 if name in ("interleaved_1f1b", "modular", "zb_v") else 1))
    home = build(name, 2, 4, **in_host(*layers))
    validate(home)
    assert home.header.host_weights.any()
    assert not home.header.data_parallel
    assert loads(dumps(home)) == home
    assert placed(home, "RE", "OF") == placed(sharded(name, 2, 4, layers, weight_pool=2), "DG")


def test_copies_of_host_weights_take_turns_with_reloads_of_activations():
    """Units of 1 and 2 time, copies of weights of 1: they hide alone, but not with those of activations."""
    finish = {}
    for units in ((), (0, 1, 2)):
        schedule = build("gpipe", 1, 1, **in_host(4) | {"offload": Offload((units,), optimizer=True)})
        costs = rank_costs(schedule.header, forward=4.0, gather_weights=4.0, offload=6.0)
        finish[units] = simulate(schedule, costs).finish
        free = costs.without(Kind.OFFLOAD, Kind.RELOAD)
        assert simulate(schedule, free).finish == 12.0 + 1.0
    assert finish[()] == 13.0
    assert finish[0, 1, 2] == 15.5  # with a stream of their own, copies of weights would end at 14.5


def test_compute_files_use_the_runs_weight_placement():
    file = build("1f1b", 1, 2, **in_host(3))
    bare = loads("megapipe schedule 1\nname mine\nmicrobatches 2\nstage 0 rank 0\nbody\nrank 0: F0.0 B0.0 F0.1 B0.1\n")
    run = {"num_ranks": 1, "num_microbatches": 2, **in_host(3)}
    assert words(fit_for_training(bare, **run), 0) == words(file, 0)
    with pytest.raises(ScheduleError, match="made for weight_pool 2, but this run has 0"):
        fit_for_training(file, **run | {"states": WHOLE_STATES})
