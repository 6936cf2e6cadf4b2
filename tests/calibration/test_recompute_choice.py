"""`recompute.method auto` of a run: one choice for all ranks, within the budget by bytes that are counted."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.calibration import planning
from megapipe.calibration.planning import with_recompute
from megapipe.config import ConfigError
from megapipe.config.bert import BertDataConfig, BertModelConfig
from megapipe.config.memory import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.planner.recompute import GIB, peak_bytes
from tests.docs.figures import read
from tests.docs.figures.planning import RECOMPUTE_AUTO
from tests.docs.figures.planning import chosen as chosen_by_the_guide
from tests.support.bert_runs import make_bert_config
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard
from tests.support.launch import environment, launch
from tests.support.meshes import run_threads

ROOT = Path(__file__).resolve().parents[2]
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
