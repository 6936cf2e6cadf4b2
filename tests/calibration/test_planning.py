"""`--plan` and `recompute.method auto` of a run: the machine, what stays pinned, and one choice for all ranks."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.calibration import planning
from megapipe.calibration.planning import planned, preset_of, this_machine, with_recompute
from megapipe.config import ConfigError
from megapipe.config.bert import BertDataConfig, BertModelConfig
from megapipe.config.load import build_parser, parse_given
from megapipe.config.memory import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import load_hardware, written
from megapipe.parallel.groups import LaunchError
from megapipe.parallel.mesh import Mesh
from megapipe.planner.recompute import GIB, peak_bytes, resolved
from megapipe.training.validation import validate
from tests.docs.figures import read
from tests.docs.figures.planning import RECOMPUTE_AUTO
from tests.docs.figures.planning import chosen as chosen_by_the_guide
from tests.planner.measured.machines import ROWS, machine, run
from tests.support.bert_runs import make_bert_config
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard
from tests.support.launch import ROOT, TINY, environment, launch
from tests.support.meshes import run_threads


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
    for value, rule in (("x", "='x' is not an integer"), ("0", "=0 is below 1")):
        with pytest.raises(LaunchError, match=f"LOCAL_WORLD_SIZE{rule}"):
            planned(given(), "auto", {"LOCAL_WORLD_SIZE": value}, 2)
    with pytest.raises(ConfigError, match=r"model.num_heads"):
        planned(given("--parallel.tensor=3"), "auto", {}, 3)


def test_layout_and_run_both_fit_the_memory_budget() -> None:
    """The search leaves the method open within the budget; the run chooses one for its layout."""
    flags = ["--model.num_layers=6", "--batch.micro_size=2", "--zero.stage=0"]
    asked = given("--recompute.method=auto", "--recompute.memory=0.0012", *flags)
    config, message = planned(asked, "cpu", {}, 2)
    assert (config.recompute.method, config.recompute.memory, config.recompute.hardware) == ("auto", 0.0012, "cpu")
    assert "recompute auto" in message
    assert resolved(config, load_hardware("cpu"), 2)[0].recompute.method != "auto"
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


MODEL = replace(GPT2_SHAPE, num_layers=6)


def gpt(prefix: str = "somewhere") -> PretrainConfig:
    config = make_config(prefix, MODEL, batch={"micro_size": 2})
    return replace(config, parallel=replace(config.parallel, data=1, pipeline=2))


def bert() -> PretrainConfig:
    model = BertModelConfig(vocabulary_size=61, num_layers=6, hidden_size=32, num_heads=4, max_positions=24)
    config = make_bert_config(BertDataConfig(prefix="somewhere", sequence_length=24), model, batch={"micro_size": 2})
    return replace(config, parallel=replace(config.parallel, data=1, pipeline=2))


def auto(config: PretrainConfig, budget: float | None, hardware: str | None = None) -> PretrainConfig:
    """budget: bytes."""
    memory = None if budget is None else budget / GIB
    return replace(config, recompute=RecomputeConfig(method="auto", memory=memory, hardware=hardware))


def chosen(mesh: Mesh, config: PretrainConfig) -> tuple[RecomputeConfig | ConfigError, list[str]]:
    lines: list[str] = []
    try:
        return with_recompute(config, mesh, lines.append).recompute, lines
    except ConfigError as error:
        return error, lines


@pytest.mark.parametrize("make", [gpt, bert], ids=["gpt", "bert"])
def test_every_rank_uses_the_choice_of_the_first(make: Callable[[], PretrainConfig]) -> None:
    config = make()
    budget = 0.9 * peak_bytes(config, "cpu")
    (first, messages), (second, _) = run_threads({"pipeline": 2}, chosen, auto(config, budget))
    assert isinstance(first, RecomputeConfig)
    assert first == second
    assert first.method != "none"
    assert peak_bytes(replace(config, recompute=first), "cpu") <= budget
    assert len(messages) == 1
    assert messages[0].startswith("recompute auto: ")


def test_the_devices_memory_suffices_for_a_small_model() -> None:
    (choice, messages), _ = run_threads({"pipeline": 2}, chosen, auto(gpt(), None))
    assert choice == RecomputeConfig()
    assert "90% of a device's" in messages[0]


@pytest.mark.parametrize(
    ("budget", "hardware", "message"),
    [
        (1e5, None, "a rank needs at least"),
        (1e6, "a100-80", "recompute.hardware a100-80 describes cuda devices, but this run uses cpu"),
        (1e6, "atuo", "unknown hardware 'atuo'"),
    ],
)
def test_every_rank_gets_the_reason_of_a_refusal(budget: float, hardware: str | None, message: str) -> None:
    for error, lines in run_threads({"pipeline": 2}, chosen, auto(gpt(), budget, hardware)):
        assert isinstance(error, ConfigError)
        assert message in str(error)
        assert not lines


def test_formats_without_a_peak_use_the_fastest_peak() -> None:
    """The CPU's preset has fp32 alone; recomputation is chosen by comparison."""
    config = gpt()
    config.training = replace(config.training, precision="bf16")
    (choice, _), _ = run_threads({"pipeline": 2}, chosen, auto(config, 0.9 * peak_bytes(config, "cpu")))
    assert isinstance(choice, RecomputeConfig)
    assert choice.method != "none"


def test_machines_with_two_memory_sizes_use_the_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank asks its own device; here by turns."""
    sizes = iter([1e12, 500_000.0])
    monkeypatch.setattr(planning, "memory_bytes", lambda device, ranks: next(sizes))
    for error, _ in run_threads({"pipeline": 2}, chosen, auto(gpt(), None)):
        assert isinstance(error, ConfigError)
        assert "90% of a device's 0.000466 GiB" in str(error)


@pytest.mark.slow
def test_the_command_of_the_guide_runs(tmp_path: Path) -> None:
    """Fewer steps, on another corpus of bytes."""
    (command,) = re.findall(RECOMPUTE_AUTO, read("docs/memory.md"))
    prefix = write_shard(tmp_path, documents=600, vocabulary=257)
    flags = [f"--data.prefix={prefix}", "--training.steps=2", f"--training.directory={tmp_path / 'run'}"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "pretrain_gpt.py"]
    finished = subprocess.run(
        [*start, *shlex.split(command), *flags, "--optimizer.warmup_steps=1", "--parallel.device=cpu"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"{chosen_by_the_guide()}\n" in finished.stdout
    assert "step 2/2" in finished.stdout


@pytest.mark.slow
def test_runs_report_their_choice_and_resumes_choose_again(tmp_path: Path) -> None:
    """Six steps at once without recomputation; or three on one rank within a budget, and three more on two ranks
    of a pipeline within another one."""
    prefix = write_shard(tmp_path)
    model = ["--model.num_layers=6", "--batch.micro_size=2", f"--data.prefix={prefix}", "--training.log_every=1"]
    whole = [*model, "--training.steps=6"]
    reference = launch(1, *whole, f"--training.directory={tmp_path / 'plain'}", folder=tmp_path)
    assert reference.returncode == 0, reference.stderr
    budgets = [0.9 * peak_bytes(_of(prefix, pipeline), "cpu") / GIB for pipeline in (1, 2)]
    folder = ["--training.directory", str(tmp_path / "run"), "--checkpoint.every=3", "--recompute.method=auto"]
    first = launch(1, *whole, *folder, f"--recompute.memory={budgets[0]}", "--training.stop_at=3", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("recompute auto: ") == 1
    (manifest,) = (tmp_path / "run" / "checkpoints").glob("*3/manifest.json")
    kept = json.loads(manifest.read_text())["config"]["recompute"]
    assert kept["method"] in ("selective", "full")
    assert kept["memory"] is None
    second = launch(2, *whole, *folder, f"--recompute.memory={budgets[1]}", "--parallel.pipeline=2", folder=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "resumed from" in second.stdout
    assert second.stdout.count("recompute auto: ") == 1
    assert f"recompute.memory {budgets[1]:g} GiB" in second.stdout
    assert _losses(tmp_path / "run") == _losses(tmp_path / "plain")
    refused = launch(2, *whole, *folder, "--recompute.memory=0.0001", "--parallel.pipeline=2", folder=tmp_path)
    assert refused.returncode != 0
    assert "error: recompute.method auto: " in refused.stderr
    assert "Traceback" not in refused.stderr.partition("elastic")[0]


def _of(prefix: str, pipeline: int) -> PretrainConfig:
    """The configuration that `launch` starts, as far as it determines memory."""
    model = replace(MODEL, tie_embeddings=PretrainConfig().model.tie_embeddings)
    config = make_config(prefix, model, batch={"micro_size": 2, "global_size": 4})
    return replace(config, parallel=replace(config.parallel, data=1, pipeline=pipeline))


def _losses(directory: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
