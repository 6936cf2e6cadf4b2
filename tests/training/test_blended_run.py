"""Runs over a blend in Megatron-LM's order, and rounded weights; faults/test_resume_points has the keyed order."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.run import PretrainConfig
from megapipe.data import mixing
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.training.pretrain import pretrain
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [write_shard(tmp_path_factory.mktemp(f"corpus{seed}"), documents=60, seed=seed) for seed in range(2)]


def configuration(corpora: list[str], directory: Path, weights: list[float], **data: object) -> PretrainConfig:
    config = make_config(
        corpora[0],
        GPT2_SHAPE,
        batch={"global_size": 3},
        evaluation={"every": 4, "samples": 6},
        checkpoint={"every": 4},
        parallel={"device": "cpu"},
        training={"steps": 8, "directory": str(directory)},
    )
    blend = dict(zip(corpora, weights, strict=True))
    return replace(config, data=replace(config.data, prefix="", blend=blend, split="80,20,0", **data))


def run(config: PretrainConfig, **training: object) -> list[tuple[int, float]]:
    """Return step and loss of every step in the metrics of the directory's runs."""
    config = replace(config, training=replace(config.training, **training))
    assert pretrain(config, LaunchEnvironment()) == 0
    lines = (Path(config.training.directory) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["loss"]) for record in records if "event" not in record]


@pytest.mark.exhaustive
def test_a_stopped_run_goes_on_with_the_same_samples(corpora: list[str], tmp_path: Path) -> None:
    whole = run(configuration(corpora, tmp_path / "whole", [0.7, 0.3], order="megatron"))
    config = configuration(corpora, tmp_path / "parts", [0.7, 0.3], order="megatron")
    run(config, stop_at=4)
    assert run(config) == whole
    assert [step for step, _ in whole] == list(range(1, 9))


def test_the_megatron_order_is_of_one_length(
    corpora: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(corpora, tmp_path, [0.7, 0.3], order="megatron")
    run(config, stop_at=1)
    assert "were rounded" not in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"training\.steps is 9 and was 8"):
        run(config, steps=9)


def test_rounded_blend_weights_are_reported(
    corpora: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mixing, "LONGEST_PERIOD", 1024)  # an order of a shorter period takes less time to make
    run(configuration(corpora, tmp_path / "rounded", [2**0.5, 1.0]), stop_at=1)
    assert "weights were rounded to 1,048,576ths of the blend" in capsys.readouterr().out
