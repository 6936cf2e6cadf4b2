"""The loop of one process from its configuration: ramp, evaluation, checkpoints, resumption, blends, files, words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.run import PretrainConfig
from megapipe.data import mixing
from megapipe.engine.engine import Engine
from megapipe.training.loop.replica import Replica
from megapipe.training.resilience.failures import OutOfMemory
from tests.support.gpt_runs import GPT2_SHAPE, make_config, train_alone, write_shard
from tests.training.records import events, records, steps

RAMP = {"global_size": 8, "ramp_start": 2, "ramp_samples": 16}
SIZES = [2, 2, 2, 4, 4, 6, 8, 8]
"""2 + 6 * consumed / 16, rounded down to a multiple of 2 and of the start."""


def configuration(corpus: str, directory: Path, **training: Any) -> PretrainConfig:
    config = make_config(
        corpus,
        replace(GPT2_SHAPE, hidden_dropout=0.1),
        data={"split": "80,20,0"},
        batch=RAMP,
        optimizer={"warmup_steps": 2},
        evaluation={"every": 3, "samples": 16},
        checkpoint={"every": 2, "keep_last": None},
        training={"steps": 8, "log_every": 4, "directory": str(directory)},
    )
    config.training = replace(config.training, **training)
    return config


def test_a_whole_run_reports_all_it_did(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    assert train_alone(configuration(corpus, directory)) == 0
    output = capsys.readouterr().out
    assert [record["samples"] for record in steps(directory)] == SIZES
    assert [record["consumed_samples"] for record in steps(directory)] == [sum(SIZES[: n + 1]) for n in range(8)]
    assert [record["step"] for record in events(directory, "evaluation")] == [3, 6, 8]
    saved = [record["path"] for record in events(directory, "checkpoint")]
    assert saved == [str(directory / f"checkpoints/step-{step:08d}") for step in (2, 4, 6, 8)]
    assert all(Path(path).is_dir() for path in saved)
    assert (directory / "loss_curve.png").stat().st_size > 10_000
    assert "losses to beat: ln(vocabulary) 4.111, unigram entropy 3." in output
    assert "perplexity" in output
    last = output.splitlines()[-1]
    assert last.startswith(f"finished after step 8/8, loss {steps(directory)[-1]['loss']:.4f}")
    for path in (directory / "metrics.jsonl", directory / "loss_curve.png", saved[-1]):
        assert str(path) in last


@pytest.mark.usefixtures("without_pictures")
def test_auto_precision_is_decided_once(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megapipe.training.device.product_seconds", lambda dtype, device: dtype.itemsize * 1e-3)
    train_alone(configuration(corpus, tmp_path, precision="auto", stop_at=2))
    assert "precision: bf16 is faster" in capsys.readouterr().out
    monkeypatch.setattr("megapipe.training.device.product_seconds", lambda dtype, device: 1.0 / dtype.itemsize)
    train_alone(configuration(corpus, tmp_path, precision="auto", stop_at=3))
    assert "precision: bf16, as in the checkpoint" in capsys.readouterr().out
    precisions = [start["config"]["training"]["precision"] for start in events(tmp_path, "start")]
    assert precisions == ["bf16", "bf16"]


def test_only_what_is_configured_is_done(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapipe.training.pretrain.require_determinism", pytest.fail)
    config = configuration(corpus, tmp_path, steps=2)
    config.evaluation = replace(config.evaluation, every=None)
    config.checkpoint = replace(config.checkpoint, every=None, at_end=False)
    train_alone(config)
    assert [record.get("event") for record in records(tmp_path)] == ["start", None, None, "end"]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [".lock", "config.yaml", "log.txt", "loss_curve.png", "metrics.jsonl", "run.json"]


@pytest.mark.usefixtures("without_pictures")
def test_the_last_step_is_saved_and_determinism_required(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr("megapipe.training.pretrain.require_determinism", lambda: calls.append(True))
    config = configuration(corpus, tmp_path, steps=2, deterministic=True)
    config.checkpoint = replace(config.checkpoint, every=None)
    train_alone(config)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert calls == [True]


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(("training", "steps_done"), [(True, 0), (False, 3)], ids=["step", "evaluation"])
def test_running_out_of_memory_is_reported_wherever_it_happens(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch, training: bool, steps_done: int
) -> None:
    forward_engine = Replica.forward_engine

    def allocate(*_: object) -> None:
        if torch.is_grad_enabled() == training:
            torch.empty(2**50, dtype=torch.uint8)

    def broken(replica: Replica) -> Engine:
        (head,) = replica.stages[0].units[-1]
        assert isinstance(head, torch.nn.Module)
        head.register_forward_hook(allocate)
        return forward_engine(replica)

    monkeypatch.setattr(Replica, "forward_engine", broken)
    with pytest.raises(OutOfMemory, match=r"^out of memory in unit head: ") as caught:
        train_alone(configuration(corpus, tmp_path))
    assert "alive by unit" in str(caught.value)
    assert len(steps(tmp_path)) == steps_done


@pytest.fixture(scope="module")
def blended(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> PretrainConfig:
    """A run over two corpora in Megatron-LM's order; faults/test_resume_points has the keyed order."""
    blend = {corpus: 0.7, write_shard(tmp_path_factory.mktemp("second"), documents=60, seed=1): 0.3}
    config = configuration(corpus, tmp_path_factory.mktemp("unused"))
    return replace(config, data=replace(config.data, prefix="", blend=blend, order="megatron"))


def in_folder(config: PretrainConfig, directory: Path, **training: Any) -> PretrainConfig:
    return replace(config, training=replace(config.training, directory=str(directory), **training))


@pytest.mark.usefixtures("without_pictures")
def test_blends_are_of_one_length_and_report_rounded_weights(
    blended: PretrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_alone(in_folder(blended, tmp_path / "exact", stop_at=1)) == 0
    assert "were rounded" not in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"training\.steps is 9 and was 8"):
        train_alone(in_folder(blended, tmp_path / "exact", steps=9))
    monkeypatch.setattr(mixing, "LONGEST_PERIOD", 1024)  # an order of a shorter period takes less time to make
    weights = dict(zip(blended.data.blend, (2**0.5, 1.0), strict=True))
    rounded = replace(blended, data=replace(blended.data, blend=weights, order="keyed"))
    assert train_alone(in_folder(rounded, tmp_path / "rounded", stop_at=1)) == 0
    assert "weights were rounded to 1,048,576ths of the blend" in capsys.readouterr().out
