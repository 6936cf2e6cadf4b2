"""Recomputation by a memory budget: never over it, never more than needed, borne out by bytes of real runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import load_hardware
from megapipe.layout.prediction import predict_rank
from megapipe.planner.cost.model import predict
from megapipe.planner.recompute import Recomputation, least_recomputation, peak_bytes
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard
from tests.support.layout_runs import run_layout
from tests.support.meshes import run_mesh

CPU = load_hardware("cpu")
MODEL = replace(GPT2_SHAPE, num_layers=6)


def run(prefix: str = "somewhere", **groups: dict[str, Any]) -> PretrainConfig:
    config = make_config(prefix, MODEL, batch={"micro_size": 2}, **groups)
    return replace(config, parallel=replace(config.parallel, data=1))


def planned(config: PretrainConfig, budget: float) -> Recomputation | None:
    """None where nothing fits."""
    try:
        return least_recomputation(config, CPU, budget)
    except ConfigError as error:
        if "with any recomputation, but the budget is" not in str(error):
            raise
        return None


@given(
    budgets=st.lists(st.integers(200_000, 2_000_000), min_size=2, max_size=4),
    pipeline=st.sampled_from([1, 2]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
@settings(max_examples=12, deadline=None)
def test_never_over_budget_and_never_slower_with_more(budgets: list[int], pipeline: int, schedule: str) -> None:
    config = run(schedule={"name": schedule})
    config.parallel.pipeline = pipeline
    times = []
    for budget in sorted(budgets):
        plan = planned(config, budget)
        if plan is None:
            assert not times, "a larger budget is refused where a smaller one was enough"
            continue
        assert plan.peak_bytes == peak_bytes(plan.config, "cpu") <= budget
        times.append(plan.step_seconds)
    assert times == sorted(times, reverse=True)


def test_every_fewer_block_is_over_the_budget() -> None:
    """Brute force over whole blocks alone, on a run that allows no parts."""
    config = run(training={"compile": True})
    whole = {
        count: peak_bytes(replace(config, recompute=replace(config.recompute, method="full", num_blocks=count)), "cpu")
        for count in range(1, 7)
    }
    nothing = peak_bytes(config, "cpu")
    for budget in sorted({*whole.values(), nothing}):
        chosen = least_recomputation(config, CPU, budget).config.recompute
        expected = next((count for count, peak in whole.items() if peak <= budget), None)
        if nothing <= budget:
            assert chosen.method == "none"
        else:
            assert (chosen.method, chosen.num_blocks) == ("full", expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_real_run_holds_what_was_planned(tmp_path: Path, pipeline: int) -> None:
    """Bytes of live tensors, counted while it trains, within a tenth of the prediction: under the budget with that."""
    config = run(write_shard(tmp_path))
    config.parallel.pipeline = pipeline
    plain = peak_bytes(config, "cpu")
    plan = least_recomputation(config, CPU, 0.9 * plain)
    assert plan.config.recompute.method != "none"
    ranks = run_mesh({"data": 1, "pipeline": pipeline, "context": 1, "tensor": 1}, run_layout, plan.config)
    peak = max(rank.lasting - rank.host + rank.together for rank in ranks)
    assert peak == pytest.approx(plan.peak_bytes, rel=0.1)
    assert peak <= plain


def test_the_cost_models_memory_is_the_same_functions() -> None:
    """`predict` reports the bytes of `predict_rank` for each pipeline rank, and the covering array of
    tests/distributed/test_covering.py compares them with real runs, part by part. Their sum is a bound of the peak."""
    config = run()
    config.parallel.pipeline = 2
    prediction = predict(config, CPU)
    for rank, memory in enumerate(prediction.estimate.memory):
        exact = predict_rank(config, prediction.schedule, rank, device="cpu")
        state, peak = exact.state(), exact.peak()
        assert (memory.weights, memory.master, memory.gradients, memory.moments) == (
            state.weights, state.master, state.gradients, state.moments
        )  # fmt: skip
        assert memory.activations == peak.activations
        assert memory.messages == exact.messages
        assert memory.buffers == peak.weights + peak.gradients + peak.summands + peak.reloaded
        assert exact.device_bytes() <= memory.total


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel": {"data": None}}, "parallel.data is null and no number of devices is given"),
        (
            {"offload": {"activations": "auto", "memory": 1.0}},
            "recompute.method none and offload.activations auto, which recomputes too",
        ),
        ({"batch": {"global_size": 7}}, "batch.global_size 7 is not divisible"),
    ],
)
def test_invalid_configurations_are_refused_before_a_choice(change: dict[str, dict[str, Any]], message: str) -> None:
    config = run()
    for group, fields in change.items():
        setattr(config, group, replace(getattr(config, group), **fields))
    with pytest.raises(ConfigError, match=message):
        least_recomputation(config, CPU, 1e9)


def test_the_default_budget_is_the_devices_memory() -> None:
    assert least_recomputation(run(), CPU).config.recompute.method == "none"
    with pytest.raises(ConfigError, match="budget is 0 bytes; it must be above 0"):
        least_recomputation(run(), CPU, 0)
