"""`--plan`: the machine that a run is planned for, what stays pinned, and that all ranks choose the same layout."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.calibration.planning import planned, preset_of, this_machine
from megapipe.config import ConfigError
from megapipe.config.load import build_parser, parse_given
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import load_hardware, written
from megapipe.planner.recompute import resolved
from megapipe.training.validation import validate
from tests.planner.measured.machines import ROWS, machine, run
from tests.support.gpt_runs import write_shard
from tests.support.launch import TINY, launch

GIB = 2**30


def given(*arguments: str):
    return parse_given(build_parser(""), PretrainConfig, [*TINY, "--data.prefix=unread", *arguments])


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32"),
    ],
)
def test_gpus_are_known_by_their_names_and_memory(name: str, gib: float, preset: str) -> None:
    assert preset_of(name, gib * GIB) == preset


@pytest.mark.parametrize(
    ("name", "gib"), [("NVIDIA GeForce RTX 4090", 24), ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5)]
)
def test_a_refused_gpu_without_a_preset_names_the_fix(name: str, gib: float) -> None:
    with pytest.raises(ConfigError, match=r"no preset matches .* and give --plan machine.yaml"):
        preset_of(name, gib * GIB)


def test_a_node_has_as_many_devices_as_ranks() -> None:
    hardware = this_machine("cpu", 3)
    assert [node.devices_per_node for node in hardware.nodes(6)] == [3, 3]


def test_the_plan_is_valid_and_repeats_and_keeps_flags() -> None:
    asked = given("--parallel.pipeline=2", "--batch.micro_size=2", "--zero.stage=1")
    config, message = planned(asked, "auto", {"LOCAL_WORLD_SIZE": "4"}, 4)
    assert message.startswith("plan for 4 x core: ")
    validate(config, 4)
    assert planned(asked, "auto", {"LOCAL_WORLD_SIZE": "4"}, 4) == (config, message)
    assert (config.parallel.pipeline, config.batch.micro_size, config.zero.stage) == (2, 2, 1)
    assert config.parallel.data * config.parallel.tensor * config.parallel.context == 2
    assert (config.training.precision, config.data.prefix) == ("fp32", "unread")


def test_a_measured_machine_is_planned_by_its_measurements(tmp_path: Path) -> None:
    messages = []
    for factor in (1.0, 100.0):
        rows = tuple(replace(row, forward=factor * row.forward, backward=factor * row.backward) for row in ROWS)
        file = tmp_path / f"times-{factor:g}.yaml"
        file.write_text(written(machine(layers=rows)))
        asked = replace(given("--recompute.method=none", "--batch.micro_size=2"), config=run())
        messages.append(planned(asked, str(file), {}, 1)[1])
    assert messages[0] != messages[1]


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown hardware 'atuo'"):
        planned(given(), "atuo", {}, 2)
    with pytest.raises(ConfigError, match=r"3 devices are requested, but hardware 'CPU, 2 cores' has 2"):
        planned(given(), "cpu", {}, 3)
    with pytest.raises(ConfigError, match=r"training.precision auto"):
        planned(given("--training.precision=auto"), "auto", {}, 2)
    with pytest.raises(ConfigError, match=r"model.num_heads"):
        planned(given("--parallel.tensor=3"), "auto", {}, 3)


def test_layout_and_run_both_fit_the_memory_budget() -> None:
    """The search leaves the method open within the budget; the run chooses one for its layout."""
    flags = ["--model.num_layers=6", "--batch.micro_size=2", "--zero.stage=0"]
    asked = given("--recompute.method=auto", "--recompute.memory=0.0012", *flags)
    config, message = planned(asked, "cpu", {}, 2)
    assert (config.recompute.method, config.recompute.memory, config.recompute.hardware) == ("auto", 0.0012, "cpu")
    assert "recompute auto" in message
    assert resolved(config, load_hardware("cpu"), 2).config.recompute.method != "auto"
    assert planned(asked, "auto", {"LOCAL_WORLD_SIZE": "2"}, 2)[0].recompute.hardware is None
    with pytest.raises(ConfigError, match=r"no layout fits 2 devices of 'CPU, 2 cores, recompute.memory 1e-05 GiB'"):
        planned(given("--recompute.method=auto", "--recompute.memory=0.00001"), "cpu", {}, 2)


@pytest.mark.slow
def test_two_ranks_plan_by_themselves_and_train(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path)
    flags = [f"--data.prefix={prefix}", "--training.steps=2", "--training.log_every=1"]
    folders = ["--training.directory", str(tmp_path / "run")]
    finished = launch(2, *flags, *folders, "--plan", "auto", "--parallel.pipeline", "2", folder=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("plan for 2 x core: pipeline 2") == 1
    assert "step 2/2" in finished.stdout
    start = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert (start["layout"]["pipeline"], start["layout"]["data"]) == (2, 1)
    wrong = launch(2, *flags, "--plan", "auto", "--parallel.tensor", "3", folder=tmp_path)
    assert wrong.returncode != 0
    assert "error: " in wrong.stderr
    assert "Traceback" not in wrong.stderr.partition("elastic")[0]


def test_the_driver_starts_with_its_variables_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # undone at the end of the test
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    monkeypatch.setattr("megapipe.parallel.launch._variables_set", {})
    seen: list[str | None] = []

    def is_available() -> bool:
        seen.append(os.environ.get("CUDA_MODULE_LOADING"))
        return False

    for name in ("NCCL_RUNTIME_CONNECT", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    this_machine("auto", 1)
    assert seen == ["EAGER"]
