"""training.deterministic: the switches are on, and two runs have the same bits."""

import os
from pathlib import Path

import pytest
import torch

from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training.device import require_determinism
from tests.support.gpt_runs import LLAMA_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.launch import launch
from tests.support.meshes import run_mesh


def test_the_switches_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        require_determinism()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def train(mesh: Mesh, config: PretrainConfig) -> RankRun:
    require_determinism()
    return run_gpt(mesh, config, steps=3)


@pytest.mark.slow
def test_two_runs_have_the_same_bits(tmp_path: Path) -> None:
    config = make_config(write_shard(tmp_path), LLAMA_SHAPE, parallel={"pipeline": 2})
    first, second = (run_mesh({"pipeline": 2}, train, config) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.results == other.results
        assert len(one.weights) == len(other.weights) > 0
        for weight, same in zip(one.weights, other.weights, strict=True):
            assert torch.equal(weight.values, same.values)


@pytest.mark.slow
def test_two_starts_of_the_program_have_the_same_bits(tmp_path: Path) -> None:
    corpus = write_shard(tmp_path)
    arguments = ["--data.prefix", corpus, "--training.steps", "3", "--training.deterministic", "true",
                 "--checkpoint.every", "3", "--model.hidden_dropout", "0.1", "--parallel.pipeline", "2"]  # fmt: skip
    outcomes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        finished = launch(2, *arguments, folder=tmp_path / name)
        assert finished.returncode == 0, finished.stderr
        step = tmp_path / name / "runs/default/checkpoints/step-00000003"
        outcomes.append({path.name: path.read_bytes() for path in sorted(step.glob("*.safetensors"))})
    assert len(outcomes[0]) == 2
    assert outcomes[0] == outcomes[1]
