"""Recomputation by a memory budget: never over it, never more than needed, borne out by bytes of real runs; and what
`recompute.method auto` becomes, by which figures, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.load import parse
from megapipe.config.memory import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, load_hardware
from megapipe.layout.prediction import predict_rank
from megapipe.layout.table import LayoutTable
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.recompute import (
    GIB,
    RESERVE,
    Recomputation,
    least_recomputation,
    limited,
    peak_bytes,
    resolved,
)
from megapipe.planner.search.plan import search_speed
from tests.planner.command.plan import json_of, output, refusal
from tests.planner.measured.machines import ROWS, machine
from tests.planner.measured.machines import run as measured_run
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard
from tests.support.layout_runs import run_layout
from tests.support.meshes import run_mesh

CPU = load_hardware("cpu")
MODEL = replace(GPT2_SHAPE, num_layers=6)


def known(prefix: str = "somewhere", **groups: dict[str, Any]) -> PretrainConfig:
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
    config = known(schedule={"name": schedule})
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
    config = known(training={"compile": True})
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
    """Bytes of live tensors, counted while it trains, are within a tenth of the prediction and within the budget."""
    config = known(write_shard(tmp_path))
    config.parallel.pipeline = pipeline
    budget = 0.9 * peak_bytes(config, "cpu")
    plan = least_recomputation(config, CPU, budget)
    assert plan.config.recompute.method != "none"
    ranks = run_mesh({"data": 1, "pipeline": pipeline, "context": 1, "tensor": 1}, run_layout, plan.config)
    peak = max(rank.lasting - rank.host + rank.together for rank in ranks)
    assert peak == pytest.approx(plan.peak_bytes, rel=0.1)
    assert peak <= budget


def test_the_cost_models_memory_is_the_same_functions() -> None:
    """`predict` reports the bytes of `predict_rank` for each pipeline rank, and the covering array of
    tests/distributed/test_covering.py compares them with real runs, part by part. Their sum is a bound of the peak."""
    config = known()
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
    config = known()
    for group, fields in change.items():
        setattr(config, group, replace(getattr(config, group), **fields))
    with pytest.raises(ConfigError, match=message):
        least_recomputation(config, CPU, 1e9)


def auto(budget: float | None = None, **groups: dict[str, Any]) -> PretrainConfig:
    """budget: bytes."""
    config = make_config("somewhere", MODEL, batch={"micro_size": 2}, **groups)
    memory = None if budget is None else budget / GIB
    return replace(config, recompute=RecomputeConfig(method="auto", memory=memory))


def plain() -> int:
    """Bytes of the run without recomputation."""
    return peak_bytes(known(), "cpu")


def with_memory(num_bytes: float) -> Hardware:
    group = CPU.groups[0]
    return replace(CPU, groups=(replace(group, device=replace(group.device, memory_bytes=num_bytes)),))


@pytest.mark.parametrize("share", [1.0, 0.95, 0.85])
def test_auto_chooses_the_least_recomputation_within_budget(share: float) -> None:
    budget = share * plain()
    config = auto(budget)
    chosen, remark = resolved(config, CPU, 1)
    expected = least_recomputation(config, CPU, budget, world_size=1)
    assert chosen == replace(config, recompute=expected.config.recompute)
    assert remark is not None
    assert f"at most {expected.peak_bytes / GIB:.3g} GiB of tensors per rank" in remark
    assert f"recompute.memory {budget / GIB:g} GiB" in remark
    slower = expected.step_seconds / expected.plain_seconds - 1
    if share == 1.0:
        assert expected.config.recompute.method == "none"
        assert remark.startswith("recompute auto: none: ")
        assert remark.endswith("no recomputation is needed")
    else:
        assert slower > 0
        assert f"{slower:.1%} longer (by the roofline of core) than without recomputation" in remark
        assert f"which would need {plain() / GIB:.3g} GiB" in remark


def test_a_method_that_is_named_stays() -> None:
    config = replace(auto(), recompute=RecomputeConfig(method="full", every=2))
    assert resolved(config, CPU, 1) == (config, None)


def test_without_a_budget_a_tenth_stays_free() -> None:
    """The same device with just enough, and with a byte less than that."""
    with pytest.raises(ConfigError, match="budget is 0 bytes; it must be above 0"):
        least_recomputation(known(), CPU, 0)
    enough = plain() / (1 - RESERVE)
    assert resolved(auto(), with_memory(enough + 2), 1)[0].recompute.method == "none"
    less, remark = resolved(auto(), with_memory(enough - 2), 1)
    assert less.recompute.method != "none"
    assert f"90% of a device's {enough / GIB:.3g} GiB" in str(remark)
    # What the devices at hand have counts more than what the file says.
    assert resolved(auto(), with_memory(enough - 2), 1, device_bytes=enough + 2)[0].recompute.method == "none"


def test_small_budgets_are_refused_with_bytes_and_fixes() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(auto(100_000), CPU, 1)
    (problem,) = caught.value.problems
    config = replace(auto(), recompute=RecomputeConfig(method="full"), parallel=replace(auto().parallel, data=1))
    least = peak_bytes(config, "cpu") / GIB
    assert problem.startswith(f"recompute.method auto: a rank needs at least {least:.3g} GiB")
    assert "lower batch.micro_size" in problem
    assert problem.endswith(f"or allow more memory (recompute.memory {100_000 / GIB:g} GiB)")


def test_measured_layers_decide_where_there_are_some() -> None:
    """By the roofline a block's parts are cheaper to recompute than blocks; on a machine where whole blocks recompute
    in no time the blocks are taken."""
    for length, shape in ((64, "measured"), (32, "of another shape")):
        known_run = measured_run(data={"sequence_length": length})
        memory = 0.95 * peak_bytes(known_run, "cpu") / GIB
        config = replace(known_run, recompute=RecomputeConfig(method="auto", memory=memory))
        for factor, method in ((0.0, "full"), (100.0, "selective")):
            rows = tuple(replace(row, recompute=factor * row.recompute) for row in ROWS)
            chosen, remark = resolved(config, machine(layers=rows), 1)
            if shape == "measured":
                assert chosen.recompute.method == method
                assert "layer times measured on made up" in str(remark)
            else:  # rows say nothing: not even half of the candidates are compared by them
                assert "by the roofline of core" in str(remark)


def test_searches_vary_the_method_on_devices_of_the_budget() -> None:
    """The best layout's own choice within the budget is as fast as what the search took, or faster."""
    budget = 0.85 * plain()
    config, hardware = limited(auto(budget), CPU)
    assert config.recompute == RecomputeConfig()
    assert [group.device.memory_bytes for group in hardware.groups] == pytest.approx([budget])
    best = search_speed(config, hardware, 1, frozenset({"batch.micro_size"})).best
    assert best.estimate.peak_bytes <= budget
    assert best.config.recompute.method != "none"
    own = least_recomputation(best.config, CPU, budget)
    assert own.step_seconds <= estimate(best.config, CPU).step_seconds


@pytest.mark.parametrize(
    ("recompute", "groups", "message"),
    [
        ({"method": "full", "memory": 1.0}, {}, "recompute.memory and recompute.hardware need recompute.method auto"),
        ({"hardware": "a100-80"}, {}, "recompute.memory and recompute.hardware need recompute.method auto"),
        ({"method": "auto", "memory": 0.0}, {}, "recompute.memory is 0.0; it must be above 0, or null"),
        ({"method": "auto", "memory": float("nan")}, {}, "recompute.memory is nan"),
        ({"method": "auto", "memory": float("inf")}, {}, "recompute.memory is inf"),
        ({"method": "auto", "num_blocks": 2}, {}, "recompute.num_blocks need recompute.method full"),
        ({"method": "auto", "parts": ["mlp"]}, {}, "recompute.parts is set but recompute.method is auto"),
        (
            {"method": "auto"},
            {"schedule": {"name": "./own.txt"}},
            "recompute.method auto cannot be combined with the schedule file ./own.txt",
        ),
        ({"method": "auto"}, {"offload": {"activations": "blocks"}}, "with offload.activations blocks: both choose"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together_are_refused(
    recompute: dict[str, Any], groups: dict[str, dict[str, Any]], message: str
) -> None:
    config = replace(make_config("somewhere", MODEL, **groups), recompute=RecomputeConfig(**recompute))
    assert any(message in problem for problem in config.problems())
    assert not auto(1e6).problems()


def test_auto_is_never_taken_for_nothing() -> None:
    """Where a method is needed and none has been chosen, an error says so."""
    config = replace(auto(), parallel=replace(auto().parallel, data=1))
    for ask in (
        lambda: estimate(config, CPU),
        lambda: peak_bytes(config, "cpu"),
        lambda: search_speed(config, CPU, 1),
        lambda: LayoutTable.of(config),
    ):
        with pytest.raises(ConfigError, match=r"recompute.method auto.*planner.recompute"):
            ask()


ASKED = [
    "--model=examples/models/gpt2_355m.yaml", "--model.vocabulary_size=512", "--hardware=a100-40",
    "--batch.global_size=64", "--data.sequence_length=1024", "--recompute.method=auto", "--recompute.memory=4",
]  # fmt: skip
LAYOUT = ["--devices=4", "--parallel.pipeline=2", "--parallel.data=2", "--batch.micro_size=4"]


def test_predict_and_explain_choose_first_and_print_it() -> None:
    for command in ("predict", "explain"):
        printed = output(command, *ASKED, *LAYOUT)
        (line,) = [line for line in printed.splitlines() if "recompute auto: " in line]
        assert line.startswith("note: recompute auto: ")
        assert "recompute.memory 4 GiB" in line
        report = json_of(command, *ASKED, *LAYOUT)
        assert line.removeprefix("note: ") in report["remarks"]
        assert report["layout"]["recompute"] in ("selective", "full")
        assert max(report["memory_bytes"]) <= 4 * GIB


def test_compare_shows_what_each_layout_would_recompute(tmp_path: Path) -> None:
    files = []
    for memory in (3, 40):
        files.append(str(tmp_path / f"within-{memory}.yaml"))
        Path(files[-1]).write_text(f"recompute: {{method: auto, memory: {memory}}}\n")
    flags = [flag for flag in (*ASKED, *LAYOUT) if not flag.startswith("--recompute")]
    cells = {each["file"]: each["layout"]["recompute"] for each in json_of("compare", *files, *flags)}
    assert cells[files[0]] != "none"
    assert cells[files[1]] == "none"


def test_search_keeps_to_the_budget_and_writes_what_runs(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    pins = ["--devices=4", "--parallel.pipeline=2", "--batch.micro_size=4"]
    printed = output("search", *ASKED, *pins, "--write_config", str(file))
    assert "note: recompute.method auto: the search also chooses the method" in printed
    report = json_of("search", *ASKED, *pins)
    assert report["memory_limit_bytes"] == 4 * GIB
    assert max(report["memory_bytes"]) <= 4 * GIB
    config = parse(["--config", str(file), "--data.prefix=unread"])
    assert config.recompute.method == report["layout"]["recompute"] != "auto"
    assert not config.problems()


def test_commands_refuse_a_budget_in_which_nothing_fits() -> None:
    (line,) = refusal("predict", *ASKED, *LAYOUT, "--recompute.memory=0.5")
    assert "GiB with any recomputation, but the budget is 0.5" in line
