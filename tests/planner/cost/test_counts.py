"""What is counted of schedules without walking through all of their lowering: beside that, action by action."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.planner.cost.in_flight import most_held
from megapipe.planner.cost.run_layout import lay_run
from megapipe.planner.cost.simulated import schedule_of
from megapipe.planner.cost.traffic_counts import traffic_counts
from megapipe.schedules import Kind, order
from megapipe.schedules.actions import KIND, STAGE
from tests.planner.cost.runs import SMALL, config_of, machine

CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "modular": 2, "zb_h1": 1, "zb_v": 2, "2bw": 1, "pipedream": 1}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CHUNKS)),
    ranks=st.integers(1, 4),
    count=st.integers(1, 8),
    buffers=st.integers(1, 3),
    gradients=st.integers(1, 3),
    stage=st.integers(2, 3),
    layers=st.integers(0, 8),
)
def test_traffic_of_replicas_is_that_of_the_lowered_schedule(
    name: str, ranks: int, count: int, buffers: int, gradients: int, stage: int, layers: int
) -> None:
    """Action by action, up to three micro-batches a rank: of a schedule that never flushes in its steady step."""
    count = min(3 * ranks, max(count, ranks) if name in ("2bw", "pipedream") else count)
    zero = {"stage": stage, "gradient_buffers": gradients} | ({"weight_buffers": buffers} if stage == 3 else {})
    config = config_of(
        replace(SMALL, num_layers=ranks * CHUNKS[name] + layers),
        parallel={"pipeline": ranks, "data": 2},
        schedule={"name": name},
        batch={"global_size": 2 * count},
        zero=zero,
        optimizer={"clip_norm": None if name == "pipedream" else 1.0},
    )
    run = lay_run(config, machine())
    found, rows = traffic_counts(run), np.concatenate(schedule_of(run).sections.body)
    passes = np.array(run.stages.units_per_stage) * count
    for kind, counted in ((Kind.GATHER_WEIGHTS, found.all_gathers), (Kind.REDUCE_GRADIENTS, found.all_sums)):
        exact = np.bincount(rows[rows[:, KIND] == kind, STAGE], minlength=len(passes)) / passes
        assert counted == pytest.approx(exact)


@pytest.mark.parametrize(
    ("name", "ranks", "count"), [("1f1b", 4, 40), ("interleaved_1f1b", 4, 24), ("zb_h1", 3, 31), ("2bw", 4, 200)]
)
def test_traffic_of_many_micro_batches_goes_on_as_it_begins(name: str, ranks: int, count: int) -> None:
    config = config_of(
        replace(SMALL, num_layers=24),
        parallel={"pipeline": ranks, "data": 2},
        schedule={"name": name},
        batch={"global_size": 2 * count},
        zero={"stage": 3},
    )
    run = lay_run(config, machine())
    found, rows = traffic_counts(run), np.concatenate(schedule_of(run).sections.body)
    passes = np.array(run.stages.units_per_stage) * count
    for kind, counted in ((Kind.GATHER_WEIGHTS, found.all_gathers), (Kind.REDUCE_GRADIENTS, found.all_sums)):
        exact = np.bincount(rows[rows[:, KIND] == kind, STAGE], minlength=len(passes)) / passes
        assert counted == pytest.approx(exact, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["interleaved_1f1b", "zb_h1", "zb_h2", "zb_v"]),
    ranks=st.integers(1, 5),
    count=st.integers(1, 12),
)
def test_fullest_moments_are_those_that_no_other_moment_holds_as_much_as(name: str, ranks: int, count: int) -> None:
    chunks = 2 if name in ("interleaved_1f1b", "zb_v") else 1
    options = {"chunks": 2} if name == "interleaved_1f1b" else {}
    found = most_held(name, ranks, count, chunks, options)  # type: ignore[arg-type]
    schedule = order(name, ranks, min(count, 3 * ranks), **options)  # type: ignore[arg-type]
    for rank, rows in enumerate(schedule.expand(1)):
        own = schedule.header.stages_on(rank)
        held = [0] * (2 * chunks)
        moments = set()
        for kind, stage in rows[:, [KIND, STAGE]].tolist():
            chunk = own.index(stage)
            held[chunk] += (kind == Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT))
            held[chunks + chunk] += (kind == Kind.BACKWARD_INPUT) - (kind == Kind.BACKWARD_WEIGHT)
            moments.add(tuple(held))
        fullest = {
            one
            for one in moments
            if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in moments)
        }
        assert {tuple(int(each) for each in row) for row in found[rank]} == fullest
