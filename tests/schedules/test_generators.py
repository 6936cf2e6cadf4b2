"""The orders that the papers give, and that every built schedule trains the model that one process would."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import (
    GENERATORS,
    Kind,
    Offload,
    ScheduleError,
    build,
    check_microbatches,
    order,
    rank_costs,
    simulate,
    validate,
)
from megapipe.schedules.generators.interleaved_1f1b import default_group_size
from megapipe.schedules.states import StateTable
from tests.schedules.interpreter import run
from tests.schedules.serial import serial
from tests.schedules.support import BOTH_WAYS, NEVER_FLUSHING, in_host, schedules, words

ORDERS: list[tuple[str, int, int, dict[str, int], dict[int, str]]] = [
    ("gpipe", 2, 3, {}, {0: "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", 1: "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"}),
    ("1f1b", 3, 4, {}, {
        0: "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        1: "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
        2: "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
    }),
    ("1f1b", 4, 2, {}, {0: "F0.0 F0.1 B0.0 B0.1"}),
    # Megatron-LM's order: stage = chunk * 2 + rank.
    ("interleaved_1f1b", 2, 4, {}, {
        0: "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        1: "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    }),
    ("modular", 2, 2, {}, {0: "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"}),
    ("modular", 1, 2, {"chunks": 3}, {0: "F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 B2.0 B2.1 B1.0 B1.1 B0.0 B0.1"}),
    ("zb_h1", 2, 3, {}, {
        0: "F0.0 F0.1 BI0.0 BW0.0 F0.2 BI0.1 BW0.1 BI0.2 BW0.2",
        1: "F1.0 BI1.0 F1.1 BI1.1 BW1.0 F1.2 BI1.2 BW1.1 BW1.2",
    }),
    ("zb_h2", 2, 3, {}, {0: "F0.0 F0.1 F0.2 BI0.0 BW0.0 BI0.1 BW0.1 BI0.2 BW0.2"}),
    ("zb_v", 2, 3, {}, {
        1: "F1.0 F2.0 F1.1 F2.1 BI2.0 BW2.0 F1.2 BI1.0 BW1.0 F2.2 BI2.1 BW2.1 BI1.1 BI2.2 BI1.2 BW1.1 BW2.2 BW1.2",
    }),
    # Chimera's figure 3 and BitPipe's program; odd micro-batches run up.
    ("chimera", 4, 4, {}, {
        0: "F0.0 F0.2 F7.1 B7.1 F7.3 B7.3 B0.0 B0.2",
        1: "F1.0 F6.1 F1.2 F6.3 B6.1 B1.0 B6.3 B1.2",
    }),
    ("bitpipe", 4, 4, {}, {
        0: "F0.0 F0.2 F11.1 F12.1 F11.3 F12.3 F7.0 B7.0 F7.2 B7.2 B12.1 B11.1 B12.3 B11.3 B0.0 B0.2",
        1: "F1.0 F10.1 F1.2 F10.3 F13.1 F6.0 F13.3 F6.2 B6.0 B13.1 B6.2 B13.3 B10.1 B1.0 B10.3 B1.2",
    }),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options", "expected"), ORDERS)
def test_orders_are_those_that_the_papers_give(name, ranks, microbatches, options, expected):
    schedule = order(name, ranks, microbatches, **options)
    assert {rank: words(schedule, rank) for rank in expected} == expected


@pytest.mark.parametrize("name", GENERATORS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_schedule_validates_and_trains_the_serial_model(name, data):
    schedule = data.draw(schedules(names=[name]))
    ordered = GENERATORS[name].numerical_class != "C"
    assert validate(schedule).canonical_order >= ordered
    for steps in (1, 3):
        assert run(schedule, steps, ordered=ordered) == serial(schedule.header, steps, ordered=ordered)


@settings(max_examples=80, deadline=None)
@given(schedules("forward"))
def test_forward_mode_holds_forwards_activations_and_weights_alone(schedule):
    validate(schedule)
    header = schedule.header
    actions = [action for rank in range(header.num_ranks) for action in schedule.actions("body", rank)]
    forwards = {(action.stage, action.microbatch) for action in actions if action.kind == Kind.FORWARD}
    assert len(forwards) == len(header.routes[0]) * header.num_microbatches
    expected = {Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION}
    gathers = {Kind.GATHER_WEIGHTS, Kind.RELEASE_WEIGHTS} if header.gathered_weights.any() else set()
    assert {action.kind for action in actions} <= expected | gathers


def test_every_generator_cites_its_source():
    for generator in GENERATORS.values():
        assert "arXiv" in (generator.order.__doc__ or ""), generator.name


def test_2bw_starts_the_next_batch_early():
    schedule = order("2bw", 2, 2)
    assert words(schedule, 0, "prologue") == "F0.0 F0.1 B0.0"
    assert words(schedule, 0) == "F0.2 B0.1 F0.3 B0.2"
    assert words(schedule, 0, "epilogue") == "B0.1"
    assert words(schedule, 1, "prologue") == "F1.0 B1.0 F1.1 B1.1"
    assert words(schedule, 1) == "F1.2 B1.2 F1.3 B1.3"
    assert words(schedule, 1, "epilogue") == ""


def test_2bw_updates_lazily_or_eagerly():
    lazy, eager = (words(build("2bw", 2, 3, update=update), 0).split() for update in ("lazy", "eager"))
    assert lazy[-1] == "U0/0.2"
    assert eager[eager.index("B0.2") : eager.index("B0.2") + 3] == ["B0.2", "DS.2", "U0/0.2"]
    assert build("2bw", 2, 3).header.gradient_buffers == 2
    assert build("2bw", 2, 3, update="eager").header.gradient_buffers == 1


def test_weight_versions():
    assert validate(build("2bw", 4, 4)).weight_versions == (2, 2, 2, 2)
    assert validate(build("pipedream", 4, 4)).weight_versions == (4, 3, 2, 1)
    assert validate(build("pipedream", 4, 4, vertical_sync=True)).weight_versions == (4, 4, 4, 4)


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_two_bp_keeps_weight_halves_under_the_cap(cap):
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "modular"):
        report = validate(build(name, 4, 8, two_bp=True, max_pending=cap))
        chunks = GENERATORS[name].chunks
        assert max(report.pending_weight_halves) * chunks <= cap


@pytest.mark.parametrize("limit", [1, 2, 4, 6, 8])
def test_zb_auto_keeps_its_memory_limit(limit):
    schedule = build("zb_auto", 4, 12, memory_limit=limit)
    for rank in range(4):
        in_flight = most = 0
        for action in schedule.actions("body", rank):
            in_flight += {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0)
            most = max(most, in_flight)
        assert most <= limit


TWO_UNITS: dict[str, Any] = {"units_per_stage": [2, 2]}
THREE_LAYERS = StateTable.uniform([1] * 3, weight_pool=1)
REPLICAS: dict[str, Any] = {"data_parallel": True}


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "options", "message"),
    [
        ("1f1c", 2, 2, {}, r"'1f1c'.*did you mean '1f1b'"),
        ("gpipe", 0, 2, {}, "the number of pipeline ranks of gpipe is 0"),
        ("2bw", 4, 3, {}, "2bw needs at least as many micro-batches as pipeline ranks: 3 micro-batches on 4 ranks"),
        ("pipedream", 4, 3, {}, "use at least 4 micro-batches"),
        *(
            (name, ranks, microbatches, {}, message)
            for name in BOTH_WAYS
            for ranks, microbatches, message in (
                (3, 6, "runs in both directions over pairs of ranks, got 3; use an even number"),
                (4, 6, "needs a multiple of its 4 pipeline ranks as the number of micro-batches, got 6; use 8"),
                (4, 2, "got 2; use 4"),
            )
        ),
        (
            "1f1b", 4, 4, {"group_size": 2},
            "1f1b does not accept the option 'group_size'; it accepts chunks, max_pending, times, two_bp",
        ),
        ("1f1b", 4, 4, {"chunks": 2}, "placement linear puts 1 chunk on each rank, not 2"),
        ("zb_v", 4, 4, {"chunks": 3}, "placement v_shape puts 2 chunks on each rank, not 3"),
        ("interleaved_1f1b", 4, 4, {"group_size": 0}, "group of at least 1"),
        ("modular", 4, 4, {"chunks": 0}, "at least 1 chunk"),
        ("2bw", 4, 4, {"update": "late"}, "must be eager or lazy"),
        ("gpipe", 4, 4, {"two_bp": True, "max_pending": 0}, "max_pending is 0"),
        ("gpipe", 4, 4, {"max_pending": 2}, "only with two_bp"),
        ("zb_auto", 4, 4, {"memory_limit": 0}, "memory_limit is 0"),
        ("zb_auto", 4, 4, {"memory_limit": float("nan")}, "memory_limit is nan; it must be a finite number"),
        ("gpipe", 2, 2, {"units_per_stage": [1]}, "each of 2 stages"),
        ("gpipe", 2, 2, {"units_per_stage": [1] * 3, "states": THREE_LAYERS}, "each of 2 stages"),
        ("gpipe", 2, 2, {"tied_groups": [(0, 2)]}, "must name stages 0 to 1"),
        ("gpipe", 2, 2, {"receive_ahead": 0}, "receive_ahead is 0"),
        ("pipedream", 2, 2, {"tied_groups": [(0, 1)]}, "untie it"),
        # recomputed spans
        ("1f1b", 2, 2, TWO_UNITS | {"recompute": [[range(1)]]}, "spans for 1 stages, but there are 2"),
        ("1f1b", 2, 2, TWO_UNITS | {"recompute": [[range(3)], []]}, "from 0 to 1"),
        ("1f1b", 2, 2, TWO_UNITS | {"recompute": [[range(2), range(1, 2)], []]}, "after the previous span"),
        ("1f1b", 2, 2, TWO_UNITS | {"recompute": [[range(0), range(1)], []]}, "one or more consecutive units"),
        ("1f1b", 2, 2, TWO_UNITS | {"recompute": [[range(0, 2, 2)], []]}, "consecutive units"),
        # offloaded units
        ("1f1b", 2, 2, TWO_UNITS | {"offload": Offload(((0,),))}, "units for 1 stages, but there are 2"),
        ("1f1b", 2, 2, TWO_UNITS | {"offload": Offload(((0, 2), ()))}, "from 0 to 1"),
        ("1f1b", 2, 2, TWO_UNITS | {"offload": Offload(((0, 0), ()))}, "must be distinct"),
        ("1f1b", 2, 2, TWO_UNITS | {"offload": Offload(((0,), ()), 0)}, "prefetch is 0; it must be at least 1"),
        (
            "1f1b", 1, 2, {"units_per_stage": [2], "offload": Offload(((0, 1),)), "recompute": [[range(1, 2)]]},
            r"units \[1\] are both recomputed and offloaded",
        ),
        # sharded state
        ("1f1b", 2, 4, {"states": StateTable.uniform([1, 1], weight_pool=2)}, "no rank to gather from"),
        ("1f1b", 2, 4, {"states": StateTable.uniform([1, 1], gradient_pool=2)}, "no rank to shard them with"),
        ("1f1b", 2, 4, REPLICAS | {"states": StateTable.uniform([1, 1], weight_pool=-1)}, "weight_pool is -1"),
        ("1f1b", 2, 4, REPLICAS | {"states": StateTable.uniform([1, 1], gradient_pool=-1)}, "gradient_pool is -1"),
        (
            "chimera", 2, 2, REPLICAS | {"states": StateTable.uniform([1] * 4, gradient_pool=1)},
            r"stages 0, 2 hold the same part of the model.*ZeRO stage 1",
        ),
        # weights in host memory
        *(
            (name, 2, 4, in_host(1, 1), "never flushes and keeps several weight versions on the device")
            for name in NEVER_FLUSHING
        ),
        ("1f1b", 2, 4, in_host(1, 1) | {"offload": Offload()}, "optimizer state, which must be offloaded too"),
    ],
)  # fmt: skip
def test_what_a_schedule_cannot_run_names_the_rule(name, ranks, microbatches, options, message):
    with pytest.raises(ScheduleError, match=message):
        validate(build(name, ranks, microbatches, **options))


def test_batches_without_micro_batches_or_steps_are_refused():
    with pytest.raises(ScheduleError, match="the number of micro-batches of gpipe is 0"):
        check_microbatches("gpipe", 2, 0)
    with pytest.raises(ScheduleError, match="cannot run 0 steps"):
        build("2bw", 2, 2).expand(0)


RAGGED = [
    (ranks, rounds, left, chunks)
    for ranks, rounds, chunks in itertools.product(range(2, 9), range(1, 5), range(2, 5))
    for left in range(1, ranks)
]
"""Ranks, whole rounds of micro-batches, what is left over, chunks."""


@pytest.mark.parametrize(
    ("ranks", "rounds", "left", "chunks"),
    [pytest.param(*shape, marks=[pytest.mark.exhaustive] * (at % 29 > 0)) for at, shape in enumerate(RAGGED)],
)
def test_default_groups_of_ragged_batches_are_the_better(ranks, rounds, left, chunks):
    microbatches = ranks * rounds + left
    larger = -(-microbatches // rounds)
    times = {}
    for size in (ranks, larger):
        schedule = build("interleaved_1f1b", ranks, microbatches, chunks=chunks, group_size=size)
        run = simulate(schedule, rank_costs(schedule.header))
        times[size] = run.makespan, max(run.peak_activations)
    default = default_group_size(ranks, microbatches, chunks)
    assert default == (larger if times[larger][1] <= times[ranks][1] + 2 + 1e-9 else ranks)
    assert times[default][0] <= times[ranks][0] + 1e-9


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "size", "makespan"),
    [(8, 9, 2, 9, 37.5), (8, 17, 3, 9, 58.0), (8, 15, 4, 8, 51.75), (8, 16, 2, 8, 58.5), (8, 5, 2, 8, None)],
)
def test_default_groups_of_some_batches(ranks, microbatches, chunks, size, makespan):
    assert default_group_size(ranks, microbatches, chunks) == size
    schedule = build("interleaved_1f1b", ranks, microbatches, chunks=chunks)
    assert schedule == build("interleaved_1f1b", ranks, microbatches, chunks=chunks, group_size=size)
    if makespan is not None:
        assert simulate(schedule, rank_costs(schedule.header)).makespan == pytest.approx(makespan)
