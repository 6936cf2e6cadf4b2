"""Counts of schedules without a full lowering, compared with counts of its actions."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.run import PretrainConfig
from megapipe.layout.table import lowered_schedule
from megapipe.planner.cost.run_layout import lay_run
from megapipe.planner.cost.step_time import traffic_counts
from megapipe.schedules import Kind
from megapipe.schedules.actions import KIND, STAGE
from tests.planner.cost.runs import SMALL, config_of, machine

CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "modular": 2, "zb_h1": 1, "zb_v": 2, "2bw": 1, "pipedream": 1}


def check_counts(config: PretrainConfig, count: int, rel: float | None = None) -> None:
    """Gathers and sums of each stage and micro-batch are those of the lowered schedule."""
    run = lay_run(config, machine())
    counts, rows = traffic_counts(run), np.concatenate(lowered_schedule(run.config, run.stages).sections.body)
    passes = np.array(run.stages.units_per_stage) * count
    for kind, counted in ((Kind.GATHER_WEIGHTS, counts.all_gathers), (Kind.REDUCE_GRADIENTS, counts.all_sums)):
        exact = np.bincount(rows[rows[:, KIND] == kind, STAGE], minlength=len(passes)) / passes
        assert counted == pytest.approx(exact, rel=rel)


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
    check_counts(config, count)


@pytest.mark.parametrize(
    ("name", "ranks", "count"), [("1f1b", 4, 40), ("interleaved_1f1b", 4, 24), ("zb_h1", 3, 31), ("2bw", 4, 200)]
)
def test_traffic_of_many_micro_batches_is_periodic(name: str, ranks: int, count: int) -> None:
    config = config_of(
        replace(SMALL, num_layers=24),
        parallel={"pipeline": ranks, "data": 2},
        schedule={"name": name},
        batch={"global_size": 2 * count},
        zero={"stage": 3},
    )
    check_counts(config, count, rel=0.1)
