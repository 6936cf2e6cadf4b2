"""The first step if the first use of a link or a group blocks the host, as with NCCL."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import Schedule, ScheduleError, build, dumps, loads, validate
from megapipe.schedules.table import Table
from megapipe.schedules.validation.waits import first_deadlock, first_uses
from tests.schedules.support import schedules


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
