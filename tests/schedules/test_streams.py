"""Proofs of the validator about streams, queues, links and first uses, against a simulation without its rules."""

import random
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import Kind, Schedule, ScheduleError, Sections, build, dumps, loads, validate
from megapipe.schedules.actions import rows_of
from megapipe.schedules.lowering import lower
from megapipe.schedules.schedule import Header, StagePlace
from megapipe.schedules.table import Table
from megapipe.schedules.validation.waits import first_deadlock, first_uses, needs_resident_kernels
from tests.schedules.streams import Hang, run
from tests.schedules.support import schedules


def one_queue(rank: int, stream: Hashable) -> int:
    return 0


def hangs(schedule: Schedule, *arguments: Any, **options: Any) -> bool:
    try:
        run(schedule, 1 if schedule.flushes else 3, *arguments, **options)
    except Hang:
        return True
    return False


@settings(max_examples=60, deadline=None)
@given(st.data(), st.one_of(schedules(max_ranks=5), schedules("forward")))
def test_valid_schedules_run_with_any_number_of_queues(data: st.DataObject, schedule: Schedule) -> None:
    validate(schedule)
    assert not hangs(schedule, one_queue)
    assert not hangs(schedule)
    count = data.draw(st.sampled_from([2, 3, 8]))
    chosen = random.Random(data.draw(st.integers(0, 999)))
    queues: dict[Hashable, int] = {}

    def queue_of(rank: int, stream: Hashable) -> int:
        return queues.setdefault((rank, stream), chosen.randrange(count))

    assert not hangs(schedule, queue_of)
    for each in (one_queue, queue_of):
        assert not hangs(schedule, each, depth=1), "a host that waits whenever a queue holds an operation"


@settings(max_examples=60, deadline=None)
@given(st.one_of(schedules(max_ranks=5), schedules("forward")))
def test_reports_name_schedules_that_need_concurrent_kernels(schedule: Schedule) -> None:
    assert needs_resident_kernels(schedule) == hangs(schedule, serial=True)


@st.composite
def any_order(draw: st.DrawFn) -> Schedule:
    """Compute actions in any order that can run, stages anywhere."""
    ranks = draw(st.integers(2, 4))
    homes = list(range(ranks)) + draw(st.lists(st.integers(0, ranks - 1), max_size=2 * ranks))
    chosen = random.Random(draw(st.integers(0, 10**6)))
    chosen.shuffle(homes)
    halves, bias = draw(st.booleans()), draw(st.floats(0, 1))
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD_INPUT if halves else Kind.BACKWARD, "W": Kind.BACKWARD_WEIGHT}
    ready = [("F", 0, microbatch) for microbatch in range(draw(st.integers(1, 6)))]
    count, order = len(ready), [[] for _ in range(ranks)]
    while ready:
        ready.sort(key=lambda action: (action[0] == "F" and chosen.random() < bias, chosen.random()))
        letter, stage, microbatch = ready.pop(0)
        order[homes[stage]].append(rows_of(int(kinds[letter]), stage, microbatch))
        if letter == "F":
            ready.append(("F", stage + 1, microbatch) if stage + 1 < len(homes) else ("B", stage, microbatch))
        elif letter == "B":
            ready += [("B", stage - 1, microbatch)] if stage else []
            ready += [("W", stage, microbatch)] if halves else []
    stages, units = tuple(StagePlace(stage, 0, rank) for stage, rank in enumerate(homes)), (1,) * len(homes)
    header = Header("any order", "train", ranks, count, stages, (tuple(range(len(homes))),), units, "C", units)
    return Schedule(header, Sections.flushing(tuple(np.concatenate(rows) for rows in order)))


@settings(max_examples=60, deadline=None)
@given(order=any_order(), distance=st.integers(1, 3))
def test_runnable_compute_orders_lower_to_orders_for_one_queue(order: Schedule, distance: int) -> None:
    schedule = lower(order, receive_ahead=distance)
    validate(schedule)
    assert not hangs(schedule, one_queue)


@pytest.mark.parametrize(
    ("schedule", "old", "new", "message", "runs_with_own_queues"),
    [
        # In rank 0's only queue the second receive waits for the first one, and the forward that it needs for both.
        (
            build("interleaved_1f1b", 2, 4, chunks=2),
            "F0.0@0 SA0.0 F0.1@0 SA0.1 RA2.1^1", "RA2.1^1 F0.0@0 SA0.0 F0.1@0 SA0.1",
            r"CUDA_DEVICE_MAX_CONNECTIONS=1\): .*, line \d+\).*; post receives and start", True,
        ),
        # In rank 2's only queue the second sum waits for the first one, which needs gradients that rank 2 sends later.
        (
            build("interleaved_1f1b", 3, 1, chunks=2, tied_groups=[(0, 1, 5), (0, 1, 5)]),
            "DT5/1.0 B2.0@0^0 SG2.0 DT5/2.0", "DT5/1.0 DT5/2.0 B2.0@0^0 SG2.0",
            r"cycle: .* DT5/2.0 of rank 2 \(", True,
        ),
        # The engine reads the scalars at once, so the host does not reach the send that another rank waits for.
        (
            build("1f1b", 2, 2), "SG1.1 DS.1", "DS.1 SG1.1",
            r"cycle: .* waits for SG1.1 of rank 1 .*, which waits for DS.1, which comes after B0.1", False,
        ),
    ],
)  # fmt: skip
def test_orders_that_hang_in_one_queue_are_refused(
    schedule: Schedule, old: str, new: str, message: str, runs_with_own_queues: bool
) -> None:
    validate(schedule)
    assert not hangs(schedule, one_queue)
    text = dumps(schedule)
    assert old in text
    early = loads(text.replace(old, new))
    assert hangs(early, one_queue)
    assert hangs(early) != runs_with_own_queues
    with pytest.raises(ScheduleError, match=message):
        validate(early)


@settings(max_examples=30, deadline=None)
@given(schedule=st.one_of(schedules(max_ranks=6, max_microbatches=13), schedules("forward")))
def test_connected_links_get_every_first_step_through(schedule: Schedule) -> None:
    table = Table.unroll(schedule, 1 if schedule.flushes else 2)
    assert first_deadlock(first_uses(table), schedule.header.connections) == ""
    # The order of connecting does not matter, as long as it is the same on all ranks and leaves no link out.
    assert first_deadlock(first_uses(table), schedule.header.connections[::-1]) == ""


@pytest.mark.parametrize(
    ("name", "ranks", "options", "gets_through"),
    [
        *(("interleaved_1f1b", 2, {"chunks": chunks}, False) for chunks in (2, 4, 7)),
        *((name, 4, {}, True) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "zb_auto", "2bw", "pipedream")),
    ],
)
def test_links_that_connect_at_first_use_hang_some_schedules(
    name: str, ranks: int, options: dict[str, Any], gets_through: bool
) -> None:
    schedule = build(name, ranks, 2 * ranks if ranks == 2 else ranks, **options)
    assert validate(schedule).lazy_links == gets_through
    table, connections = Table.unroll(schedule, 1 if schedule.flushes else 2), schedule.header.connections
    hanging = first_deadlock(first_uses(table), ())
    assert ("RECV" in hanging) != gets_through
    assert gets_through or hanging.startswith("rank 0 at RECV_ACTIVATION stage 2, micro-batch 0")
    assert first_deadlock(first_uses(table), connections[1:]) == "", "the links of one direction are enough"


def test_groups_that_first_reduce_in_a_circle_are_refused() -> None:
    schedule = build("1f1b", 3, 3, tied_groups=[(0, 1), (1, 2), (0, 2)])
    validate(schedule)
    text = dumps(schedule)
    for old, new in (("DT1/1.2 DT1/2.2", "DT1/2.2 DT1/1.2"), ("DT2/2.2 DT2/3.2", "DT2/3.2 DT2/2.2")):
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(ScheduleError, match="first collective of a group blocks the host, as with NCCL: rank 0 at"):
        validate(loads(text))
