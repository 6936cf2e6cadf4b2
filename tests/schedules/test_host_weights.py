"""Weights in host memory: placed like sharded ones, copied alongside the compute, refused where unsupported."""

import json

import pytest

from megapipe.schedules import Kind, Offload, ScheduleError, build, dumps, loads, rank_costs, simulate, validate
from megapipe.schedules.build import fit_for_training
from megapipe.schedules.command.main import main
from megapipe.schedules.states import WHOLE_STATES, StateTable
from tests.schedules.support import NEVER_FLUSHING, words

UPDATES_IN_HOST = Offload(optimizer=True)


def in_host(*layers_per_stage, pool=2):
    """Arguments that keep all weights in host memory, with room for some units on the device."""
    states = StateTable.uniform(layers_per_stage, weight_pool=pool, weights="host")
    return {"units_per_stage": layers_per_stage, "states": states, "offload": UPDATES_IN_HOST}


def placed(schedule, *left_out):
    return [word for word in words(schedule, 0).split() if not word.startswith(left_out)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "modular", "zb_h1", "zb_v"])
def test_weights_come_and_go_where_sharded_ones_do(name):
    """Apart from the reductions of replicas and the moves around updates, the two schedules are the same."""
    stages = 2 * (2 if name in ("interleaved_1f1b", "modular", "zb_v") else 1)
    sizes = {"units_per_stage": [3] * stages}
    shared = build(name, 2, 4, **sizes, data_parallel=True, states=StateTable.uniform([3] * stages, weight_pool=2))
    home = build(name, 2, 4, **in_host(*[3] * stages))
    validate(home)
    assert home.header.host_weights.any()
    assert not home.header.data_parallel
    assert loads(dumps(home)) == home
    assert placed(home, "RE", "OF") == placed(shared, "DG")


def test_evaluation_brings_weights_and_changes_none():
    schedule = build("1f1b", 1, 2, mode="forward", **in_host(3))
    validate(schedule)
    assert words(schedule, 0) == (
        "GW0/0.0 GW0/1.0 F0/0.0 LW0/0.0 GW0/2.0 F0/1.0 LW0/1.0 GW0/0.1 F0/2.0 LW0/2.0 GW0/1.1 F0/0.1 LW0/0.1 GW0/2.1 "
        "F0/1.1 LW0/1.1 F0/2.1 LW0/2.1"
    )


def test_copies_of_weights_take_turns_with_reloads_of_activations():
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("weights host", "weights sharded", "no rank to gather from"),
        ("weight_pool 2", "weight_pool 0", "needs 1 of the weight_pool for its whole weights, but the pool is 0"),
        ("GW0/1.0@0 F0/0.0@0", "F0/0.0@0", "not gathered here"),
        ("RE0/0.0@1 U0/0.0@1 OF0/0.0@1", "U0/0.0@1", "but this updates them on the device"),
    ],
)
def test_each_broken_rule_is_named(old, new, message):
    units = [1] if old.startswith("RE") else [3]
    text = dumps(build("gpipe", 1, 1, **in_host(*units)))
    assert text.count(old) == 1, text
    with pytest.raises(ScheduleError, match=message):
        validate(loads(text.replace(old, new)))


def test_unsupported_host_weights_are_refused_with_the_reason():
    for name in NEVER_FLUSHING:
        with pytest.raises(ScheduleError, match="never flushes and keeps several weight versions on the device"):
            build(name, 2, 4, **in_host(1, 1))
    with pytest.raises(ScheduleError, match="optimizer state, which must be offloaded too"):
        build("1f1b", 2, 4, **in_host(1, 1) | {"offload": Offload()})
    assert main(["simulate", "--offload-weights=2", "--weight-buffers=2"]) == 2


def test_compute_files_use_the_runs_weight_placement():
    file = build("1f1b", 1, 2, **in_host(3))
    bare = loads("megapipe schedule 1\nname mine\nmicrobatches 2\nstage 0 rank 0\nbody\nrank 0: F0.0 B0.0 F0.1 B0.1\n")
    run = {"num_ranks": 1, "num_microbatches": 2, **in_host(3)}
    assert words(fit_for_training(bare, **run), 0) == words(file, 0)
    with pytest.raises(ScheduleError, match="made for weight_pool 2, but this run has 0"):
        fit_for_training(file, **run | {"states": WHOLE_STATES})


def test_the_command_keeps_weights_in_host_memory(tmp_path, capsys):
    shape = ["--schedule=gpipe", "--ranks=1", "--microbatches=1", "--units=4", "--gather-time=4", "--forward=4"]
    assert main(["simulate", "--json", *shape, "--offload-weights=2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["weight_gathers"], figures["exposed_communication"]) == ([6], 0.0)
    trace = tmp_path / "trace.json"
    assert main(["draw", *shape, "--offload-weights=2", "--output", str(trace)]) == 0
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events if event["name"].startswith("gather")} == {"copy in"}
