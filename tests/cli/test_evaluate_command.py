"""megapipe evaluate: the numbers of an evaluation during training, on any layout and on other shards."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.cli.trained_models import evaluate as main
from megapipe.config import command_line
from megapipe.config.run import PretrainConfig
from tests.support.bert_runs import PRE_NORM, make_bert_config, write_corpus
from tests.support.commands import run as run_command
from tests.support.gpt_runs import GPT2_SHAPE, make_config, train_alone, write_shard
from tests.training.records import events

pytestmark = pytest.mark.slow

STEPS, SAMPLES = 4, 8


def gpt_run(folder: Path) -> PretrainConfig:
    """A run with dropout and documents kept apart, whose schedule and batch an evaluation does not have."""
    model = replace(GPT2_SHAPE, hidden_dropout=0.1, attention_dropout=0.1)
    config = make_config(write_shard(folder, documents=200), model, recompute={"method": "full"})
    config.data.isolate_documents = True
    return config


def bert_run(folder: Path) -> PretrainConfig:
    return make_bert_config(write_corpus(folder), PRE_NORM)


RUNS = {"gpt": gpt_run, "bert": bert_run}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run, and the record of its last evaluation."""
    folder = tmp_path_factory.mktemp(request.param)
    config = RUNS[request.param](folder)
    config.training = replace(config.training, steps=STEPS, directory=str(folder / "run"))
    config.evaluation = replace(config.evaluation, every=STEPS, samples=SAMPLES)
    assert train_alone(config) == 0
    return folder, events(folder / "run", "evaluation")[-1]


def evaluated(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["--checkpoint", str(folder / "run"), "--device", "cpu", "--json", *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def check_same(report: dict[str, Any], record: dict[str, Any]) -> None:
    for name in ("loss", "perplexity", "terms", "accuracies"):
        assert report[name] == pytest.approx(record[name], rel=1e-5), name
    assert report["loss_tokens"] == record["loss_tokens"]
    assert report["step"] == STEPS


def test_the_numbers_are_those_of_training(
    run: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, record = run
    for batch in ("1", "4"):
        check_same(evaluated(capsys, folder, "--samples", str(SAMPLES), "--batch-size", batch), record)
    assert main(["--checkpoint", str(folder / "run"), "--device", "cpu", "--samples", str(SAMPLES)]) == 0
    assert f"after step {STEPS}: validation loss {record['loss']:.4f}" in capsys.readouterr().out


def test_a_long_evaluation_shows_its_progress(
    run: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = run
    monkeypatch.setattr(command_line, "LOG_EVERY", 0.0)
    assert main(["--checkpoint", str(folder / "run"), "--device", "cpu", "--samples", "8", "--batch-size", "2"]) == 0
    first, *lines = capsys.readouterr().err.splitlines()
    assert "8 of " in first
    assert [line.split(" samples")[0] for line in lines] == [f"evaluating: {done} of 8" for done in (2, 4, 6, 8)]


def test_two_ranks_give_the_same(run: tuple[Path, dict[str, Any]]) -> None:
    folder, record = run
    launcher = "python -m torch.distributed.run --standalone --nproc_per_node=2 -m megapipe"
    words = f"--checkpoint {folder}/run --device cpu --json --batch-size 2 --samples {SAMPLES}"
    check_same(json.loads(run_command(f"{launcher} evaluate {words}", 120)), record)


def test_another_shard_is_evaluated_whole_in_full_batches(
    tmp_path: Path, run: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = run
    if folder.name.startswith("bert"):
        pytest.skip("a BERT's samples depend on sentences")
    prefix = write_shard(tmp_path, documents=30, seed=5)
    report = evaluated(capsys, folder, "--data-prefix", prefix, "--batch-size", "7")
    tokens = (tmp_path / "corpus.bin").stat().st_size // 2
    samples = (tokens - 1) // 16
    assert report["samples"] == samples // 7 * 7
    assert 0 < report["loss_tokens"] <= 16 * report["samples"]
    assert report["data"] == [prefix]


def test_wrong_input_is_one_line(run: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = run
    for words, reason in (
        (["--data-prefix", "nowhere"], "nowhere"),
        (["--data-prefix", "nowhere", "--split", "test"], "--split selects a split of the training data"),
        (["--tensor", "2"], "2 ranks, but the launcher started 1"),
    ):
        capsys.readouterr()
        assert main(["--checkpoint", str(folder / "run"), "--device", "cpu", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert reason in line
