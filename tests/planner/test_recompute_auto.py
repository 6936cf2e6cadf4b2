"""`recompute.method auto` before there is a run: what it becomes, by which figures, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config import ConfigError
from megapipe.config.load import parse
from megapipe.config.memory import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, load_hardware
from megapipe.layout.table import LayoutTable
from megapipe.planner.cost.model import estimate
from megapipe.planner.recompute import GIB, RESERVE, least_recomputation, limited, peak_bytes, resolved
from megapipe.planner.search.plan import search_speed
from tests.planner.command.plan import json_of, output, refusal
from tests.planner.measured.machines import ROWS, machine
from tests.planner.measured.machines import run as measured_run
from tests.support.gpt_runs import GPT2_SHAPE, make_config

CPU = load_hardware("cpu")
MODEL = replace(GPT2_SHAPE, num_layers=6)


def auto(budget: float | None = None, **groups: dict[str, Any]) -> PretrainConfig:
    """budget: bytes."""
    config = make_config("somewhere", MODEL, batch={"micro_size": 2}, **groups)
    memory = None if budget is None else budget / GIB
    return replace(config, recompute=RecomputeConfig(method="auto", memory=memory))


def plain() -> int:
    config = auto()
    named = replace(config, recompute=RecomputeConfig(), parallel=replace(config.parallel, data=1))
    return peak_bytes(named, "cpu")


def with_memory(num_bytes: float) -> Hardware:
    group = CPU.groups[0]
    return replace(CPU, groups=(replace(group, device=replace(group.device, memory_bytes=num_bytes)),))


@pytest.mark.parametrize("share", [1.0, 0.95, 0.85])
def test_auto_chooses_the_least_recomputation_within_budget(share: float) -> None:
    budget = share * plain()
    config = auto(budget)
    resolution = resolved(config, CPU, 1)
    expected = least_recomputation(config, CPU, budget, world_size=1)
    assert resolution.config == replace(config, recompute=expected.config.recompute)
    assert resolution.remark is not None
    assert f"at most {expected.peak_bytes / GIB:.3g} GiB of tensors per rank" in resolution.remark
    assert f"recompute.memory {budget / GIB:g} GiB" in resolution.remark
    slower = expected.step_seconds / expected.plain_seconds - 1
    if share == 1.0:
        assert expected.config.recompute.method == "none"
        assert resolution.remark.startswith("recompute auto: none: ")
        assert resolution.remark.endswith("no recomputation is needed")
    else:
        assert slower > 0
        assert f"{slower:.1%} longer (by the roofline of core) than without recomputation" in resolution.remark
        assert f"which would need {plain() / GIB:.3g} GiB" in resolution.remark


def test_a_method_that_is_named_stays() -> None:
    config = replace(auto(), recompute=RecomputeConfig(method="full", every=2))
    resolution = resolved(config, CPU, 1)
    assert (resolution.config, resolution.remark) == (config, None)


def test_without_a_budget_a_tenth_stays_free() -> None:
    """The same device with just enough, and with a byte less than that."""
    enough = plain() / (1 - RESERVE)
    assert resolved(auto(), with_memory(enough + 2), 1).config.recompute.method == "none"
    less = resolved(auto(), with_memory(enough - 2), 1)
    assert less.config.recompute.method != "none"
    assert f"90% of a device's {enough / GIB:.3g} GiB" in str(less.remark)
    # What the devices at hand have counts more than what the file says.
    assert resolved(auto(), with_memory(enough - 2), 1, device_bytes=enough + 2).config.recompute.method == "none"


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
    config = replace(measured_run(parallel={"data": None}), recompute=RecomputeConfig(method="auto"))
    known = replace(config, recompute=RecomputeConfig(), parallel=replace(config.parallel, data=1))
    config.recompute.memory = 0.95 * peak_bytes(known, "cpu") / GIB
    free = tuple(replace(row, recompute=0.0) for row in ROWS)
    dear = tuple(replace(row, recompute=100 * row.recompute) for row in ROWS)
    methods = {}
    for name, rows in (("free", free), ("dear", dear)):
        resolution = resolved(config, machine(layers=rows), 1)
        methods[name] = resolution.config.recompute.method
        assert resolution.remark is not None
        assert ("layer times measured on made up" in resolution.remark) == (methods[name] != "none")
    assert methods == {"free": "full", "dear": "selective"}
    # Measured of another shape, rows say nothing: not even half of the candidates are compared by them.
    config.data = replace(config.data, sequence_length=32)
    known = replace(config, recompute=RecomputeConfig(), parallel=replace(config.parallel, data=1))
    config.recompute.memory = 0.95 * peak_bytes(known, "cpu") / GIB
    assert "by the roofline of core" in str(resolved(config, machine(layers=free), 1).remark)


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
