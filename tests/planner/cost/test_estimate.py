"""The estimate compared with the paper's FLOPs, simulation, exact memory, and common sense."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, load_hardware
from megapipe.planner.cost.model import estimate, explain_stages, predict
from megapipe.planner.fitting import A100
from tests.planner.cost.runs import PLAIN, SELENE, SMALL, closed_over_simulated, config_of, layout, machine


def row(name: str) -> PretrainConfig:
    """One of the layouts that a row of the paper's table 1 may have had."""
    return next(next(run.candidates()) for run in (*A100.rows, *A100.unfitted) if run.name == name)


def sc21_flops(config: PretrainConfig) -> float:
    """96 B s l h^2 (1 + s / 6h + V / 16lh): arXiv 2104.04473, equation 3."""
    model, s = config.model, config.data.sequence_length
    h, layers, vocabulary = model.hidden_size, model.num_layers, model.vocabulary_size
    return 96 * config.batch.global_size * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))


@pytest.mark.parametrize("name", [run.name for run in (*A100.rows, *A100.unfitted)])
def test_executed_flops_with_full_recomputation_are_equation_3(name: str) -> None:
    result = estimate(row(name), SELENE)
    assert result.executed_flops == pytest.approx(sc21_flops(result.config), rel=1e-12)
    assert result.executed_flops > result.model_flops


SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "modular", "zb_h1", "zb_h2", "zb_v", "2bw"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pipeline", "microbatches"), [(1, 3), (2, 4), (4, 4), (4, 16), (8, 16)])
@pytest.mark.parametrize("parallel", [{}, {"tensor": 4}, {"tensor": 4, "sequence": True}])
def test_closed_form_and_simulation_agree(
    name: str, pipeline: int, microbatches: int, parallel: dict[str, Any]
) -> None:
    """Equal where stages are even and nothing overlaps, but for updates of a schedule without a flush, and those that
    the last weight halves delay."""
    config = layout(name, pipeline, microbatches, parallel=parallel)
    within = {"zb_h2": 1e-3, "zb_v": 1e-3, "2bw": 5e-3}.get(name, 1e-12)
    assert closed_over_simulated(config, SELENE) == pytest.approx(1.0, rel=within)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "modular", "2bw"])
@pytest.mark.parametrize(
    "groups",
    [
        {"recompute": {"method": "full"}},
        {"recompute": {"method": "selective"}, "parallel": {"tensor": 2, "sequence": True}},
        {"parallel": {"data": 2}},
        {"parallel": {"context": 2}},
        {"parallel": {"data": 2}, "zero": {"stage": 1}},
    ],
)  # fmt: skip
def test_with_recomputation_and_replicas_they_agree_within_6_percent(name: str, groups: dict[str, Any]) -> None:
    assert closed_over_simulated(layout(name, 4, 8, **deepcopy(groups)), SELENE) == pytest.approx(1.0, rel=0.06)


LAYOUTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from([*SCHEDULES, "zb_auto", "pipedream"]),
        "pipeline": st.sampled_from([1, 2, 4]),
        "microbatches": st.integers(4, 10),
        "data": st.sampled_from([1, 2, 4]),
        "tensor": st.sampled_from([1, 2]),
        "zero": st.integers(0, 3),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "micro_size": st.sampled_from([1, 3]),
        "precision": st.sampled_from(["bf16", "fp32"]),
        "tied": st.booleans(),
        "attention": st.sampled_from(["sdpa", "unfused"]),
    }
)


def drawn(values: dict[str, Any]) -> PretrainConfig:
    name, data = values["name"], values["data"]
    model = replace(SMALL, num_layers=8, tie_embeddings=values["tied"] and name != "pipedream")
    return config_of(
        replace(model, attention=values["attention"], hidden_dropout=0.1),
        parallel={"pipeline": values["pipeline"], "data": data, "tensor": values["tensor"]},
        schedule={"name": name},
        batch={
            "global_size": values["microbatches"] * data * values["micro_size"],
            "micro_size": values["micro_size"],
        },
        zero={"stage": values["zero"] if data > 1 else 0},
        recompute={"method": values["recompute"]},
        training={"precision": values["precision"]},
        optimizer={"clip_norm": None if name == "pipedream" else 1.0},
    )


@given(LAYOUTS)
@settings(max_examples=60, deadline=None)
def test_closed_memory_is_the_exact_one(values: dict[str, Any]) -> None:
    """Never under it by more than 1%, nor over it by more than 5%, at any pipeline coordinate."""
    config = drawn(values)
    closed, exact = estimate(config, SELENE).memory, predict(config, SELENE).estimate.memory
    assert len(closed) == len(exact) == config.parallel.pipeline
    for one, other in zip(closed, exact, strict=True):
        assert min(one) >= 0
        assert 0.99 * other.total <= one.total <= 1.05 * other.total
        assert one[:4] == other[:4], "the state"


@given(LAYOUTS, st.floats(1.0, 20.0))
@settings(max_examples=60, deadline=None)
def test_terms_add_up_and_faster_machines_are_never_slower(values: dict[str, Any], factor: float) -> None:
    """zb_auto is simulated, and an order generated for other times may be slightly worse for them."""
    config = drawn(values)
    result = estimate(config, machine(5e-6, 20e9))
    assert sum(term.seconds for term in result.terms) == pytest.approx(result.step_seconds)
    assert all(term.seconds > 0 and term.source for term in result.terms)
    (group,) = machine(5e-6, 20e9).groups
    peaks = {name: peak * factor for name, peak in group.device.peak_flops.items()}
    memory = group.device.memory_bandwidth * factor
    most = result.step_seconds * (1.02 if values["name"] == "zb_auto" else 1 + 1e-9)
    for faster in (
        machine(5e-6, 20e9 * factor),
        machine(5e-6 / factor, 20e9),
        Hardware("inside", (replace(group, inside=machine(5e-6, 20e9 * factor).groups[0].inside),)),
        Hardware("outside", (replace(group, outside=machine(5e-6, 20e9 * factor).groups[0].outside),)),
        Hardware("peak", (replace(group, device=replace(group.device, peak_flops=peaks)),)),
        Hardware("memory", (replace(group, device=replace(group.device, memory_bandwidth=memory)),)),
    ):
        assert estimate(config, faster).step_seconds <= most


def test_terms_of_a_simulation_add_up() -> None:
    config = layout("1f1b", 4, 8, parallel={"data": 2})
    prediction = predict(config, SELENE)
    slow_down = prediction.estimate.seconds_of("slow-down")
    assert 0 < slow_down < 0.1 * prediction.estimate.step_seconds
    assert prediction.estimate.step_seconds - slow_down == pytest.approx(prediction.simulation.finish)
    assert predict(config, SELENE, assumptions=PLAIN).estimate.seconds_of("slow-down") == 0.0
    assert prediction.schedule.header.num_microbatches == 8
    assert prediction.estimate.world_size == 8


KERNELS = ("forward", "backward_input", "backward_weight")


def test_stages_are_explained_one_by_one() -> None:
    config = layout("interleaved_1f1b", 4, 8, parallel={"tensor": 2}, recompute={"method": "full"})
    stages, whole = explain_stages(config, SELENE), estimate(config, SELENE)
    assert [stage["rank"] for stage in stages] == [0, 1, 2, 3] * 2
    assert stages[0]["layers"] == ("embedding", "blocks.0", "blocks.1")
    assert stages[-1]["layers"] == ("blocks.14", "blocks.15", "head")
    work = [0.0] * 4
    for stage in stages:
        work[stage["rank"]] += sum(stage[phase] for phase in (*KERNELS, "recompute", "tensor"))
    busiest = work.index(max(work))
    own = [stage for stage in stages if stage["rank"] == busiest]
    for term, phases in (("compute", KERNELS), ("recompute", ["recompute"]), ("tensor", ["tensor"])):
        seconds = sum(stage[phase] for stage in own for phase in phases)
        assert whole.seconds_of(term) == pytest.approx(8 * seconds)


def test_data_may_be_left_open() -> None:
    config = config_of(batch={"global_size": 64}, parallel={"data": None, "tensor": 2})
    result = estimate(config, SELENE, world_size=16)
    assert (result.config.parallel.data, result.world_size, config.parallel.data) == (8, 16, None)
    assert json.loads(json.dumps(result.as_json()))["layout"]["data"] == 8


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"parallel": {"data": None}}, "parallel.data is null and no number of devices is given"),
        ({"offload": {"activations": "auto", "memory": 1}}, "is decided by measurements at the start of a run"),
        ({"parallel": {"tensor": 3}}, "is not divisible by parallel.tensor 3"),
        ({"parallel": {"pipeline": 40}}, "exceeds the 18 layers of the model"),
        ({"batch": {"global_size": 7, "micro_size": 2}}, "batch.global_size 7 is not divisible"),
        ({"schedule": {"name": "1f1c"}}, "did you mean '1f1b'"),
    ],
)
def test_incomplete_configurations_are_refused_before_any_work(groups: dict[str, Any], message: str) -> None:
    for ask in (estimate, predict):
        with pytest.raises(ConfigError, match=message):
            ask(config_of(**deepcopy(groups)), SELENE)


def test_a_device_without_the_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no peak for 'bf16'"):
        estimate(config_of(), load_hardware("v100-16"))
