"""Enumerated layouts compared with all combinations of values that validation accepts."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.validation import run_problems
from megapipe.planner.search.space import Layout, Layouts, SearchSpace, Shape, divisors
from megapipe.schedules import Kind, Schedule, lower, order, rank_costs, simulate
from megapipe.schedules.actions import KIND
from tests.planner.search.runs import run, runs

SCHEDULES = ("1f1b", "interleaved_1f1b", "gpipe", "zb_h1", "zb_v", "2bw", "pipedream", "modular")


def brute_force(base: PretrainConfig, devices: int, pinned: frozenset[str], space: SearchSpace) -> set[Layout]:
    """Every combination up to the devices and the batch that nothing has anything against."""

    def values(path: str, own: object, tried: Any) -> Any:
        return [own] if path in pinned else tried

    sizes = range(1, devices + 1)
    parallel, layouts = base.parallel, set()
    chunks = range(2, (space.max_chunks or 99) + 1)
    for tensor, pipeline, context, micro_size, name, number, sequence, zero, recompute in product(
        values("parallel.tensor", parallel.tensor, sizes),
        values("parallel.pipeline", parallel.pipeline, sizes),
        values("parallel.context", parallel.context, range(1, (space.max_context or 1) + 1)),
        values("batch.micro_size", base.batch.micro_size, range(1, (space.max_micro_size or 99) + 1)),
        values("schedule.name", base.schedule.name, space.schedules),
        values("schedule.chunks", base.schedule.chunks, [None, *chunks]),
        values("parallel.sequence", parallel.sequence, space.sequence),
        values("zero.stage", base.zero.stage, space.zero_stages),
        values("recompute.method", base.recompute.method, space.recompute),
    ):
        data, rest = divmod(devices, tensor * pipeline * context)
        if rest or ("parallel.data" in pinned and parallel.data not in (None, data)):
            continue
        layout = Layout(Shape(data, tensor, pipeline, context, micro_size, name, number), sequence, zero, recompute)
        looped = name in ("interleaved_1f1b", "modular", "zb_v")
        if "schedule.chunks" not in pinned and looped != (number is not None):
            continue  # one stage a rank has no number, several always one
        config = layout.applied(base)
        if not config.problems() and not run_problems(config, devices):
            layouts.add(layout)
    return layouts


@settings(max_examples=12, deadline=None)
@given(
    base=runs(),
    devices=st.sampled_from([1, 2, 3, 4, 6, 8]),
    schedules=st.sets(st.sampled_from(SCHEDULES), min_size=1, max_size=3),
    pinned=st.sets(
        st.sampled_from(["parallel.tensor", "batch.micro_size", "schedule.chunks", "zero.stage", "parallel.data"]),
        max_size=2,
    ),
    ramp=st.sampled_from([None, 2, 4]),
)
def test_exactly_the_layouts_that_can_run(
    base: PretrainConfig, devices: int, schedules: set[str], pinned: set[str], ramp: int | None
) -> None:
    if ramp is not None:
        base = replace(base, batch=replace(base.batch, ramp_start=ramp, ramp_samples=100))
    # An asynchronous schedule refuses the clipping that is on by default; without it there is something to find.
    base = replace(base, optimizer=replace(base.optimizer, clip_norm=None))
    space = SearchSpace(
        schedules=tuple(sorted(schedules)), max_context=2, max_micro_size=4, max_chunks=3, recompute=("none", "full")
    )
    layouts = list(Layouts(base, devices, frozenset(pinned), space))
    assert len(layouts) == len(set(layouts))
    expected = brute_force(base, devices, frozenset(pinned), space)
    if "schedule.chunks" not in pinned and "1f1b" in schedules:
        # On one rank they are no better than the plain schedule.
        expected = {
            each for each in expected if not (each.shape.pipeline == 1 and each.shape.schedule == "interleaved_1f1b")
        }
    assert set(layouts) == expected


@pytest.mark.parametrize("chunks", [2, 3])
def test_looped_1f1b_on_one_rank_saves_nothing(chunks: int) -> None:
    looped = order("interleaved_1f1b", 1, 4, chunks=chunks, units_per_stage=[1] * chunks)
    plain = order("1f1b", 1, 4, units_per_stage=[chunks])

    def seconds_and_peak(schedule: Schedule, size: float) -> tuple[float, float]:
        change = np.where(schedule.sections.body[0][:, KIND] == Kind.FORWARD, size, -size)
        costs = rank_costs(schedule.header)
        return simulate(lower(schedule), costs).finish, float(change.cumsum().max())

    both = seconds_and_peak(looped, 1 / chunks), seconds_and_peak(plain, 1.0)
    assert both[0][0] == pytest.approx(both[1][0])
    assert both[0][1] >= both[1][1]


TOO_LONG = replace(run(), data=replace(run().data, sequence_length=256))


@pytest.mark.parametrize(
    ("base", "devices", "pinned", "space", "message"),
    [
        (run(), 4, {"parallel.tensors"}, {}, r"'parallel.tensors' is not a field .*did you mean 'parallel.tensor'"),
        (run(), 0, set(), {}, "the number of devices is 0"),
        (run(), 4, set(), {"schedules": ("1f2b",), "max_chunks": 0}, r"max_chunks is 0; .*\nschedules: .*'1f2b'"),
        (TOO_LONG, 4, set(), {}, r"data\.sequence_length 256 exceeds model\.max_positions 128"),
    ],
)
def test_unsatisfiable_rules_are_reported_before_any_work(base, devices, pinned, space, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Layouts(base, devices, frozenset(pinned), SearchSpace(**space))


def test_a_corpus_need_not_be_named_to_plan() -> None:
    base = run()
    assert list(Layouts(replace(base, data=replace(base.data, prefix="")), 2, frozenset(), SearchSpace()))


def test_divisors() -> None:
    for number in range(1, 200):
        assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]
