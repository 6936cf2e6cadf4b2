"""A run's folder records every start: configuration, command, versions and end; no start overwrites an earlier one."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.directory import LOCK
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.load import parse_as
from megapipe.config.run import PretrainConfig
from megapipe.training.observe.metrics import read_losses
from megapipe.training.resilience.guards import NonFiniteError
from megapipe.training.resilience.run_identity import RunFolder
from tests.support.gpt_runs import GPT2_SHAPE, make_config, train_alone
from tests.training.records import events

pytestmark = pytest.mark.usefixtures("without_pictures")


def configuration(corpus: str, directory: Path, **training: Any) -> PretrainConfig:
    training = {"steps": 6, "log_every": 1, "directory": str(directory), **training}
    groups: dict[str, Any] = {"batch": {"global_size": 2}, "checkpoint": {"every": 2}}
    return make_config(corpus, GPT2_SHAPE, **groups, training=training)


def starts(directory: Path) -> list[dict[str, Any]]:
    starts: list[dict[str, Any]] = json.loads((directory / "run.json").read_text())["starts"]
    return starts


def contents(directory: Path) -> dict[Path, bytes]:
    """Return all files but two that every start changes: it prints a line and holds the lock."""
    changing = ("log.txt", LOCK)
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name not in changing}


def test_three_starts_explain_themselves(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--data.prefix", "a corpus"])
    first, second = configuration(corpus, tmp_path, stop_at=4), configuration(corpus, tmp_path)
    assert train_alone(first) == 0
    (tmp_path / "checkpoints/step-00000004").rename(tmp_path / "lost")  # the second start repeats steps 3 and 4
    log = (tmp_path / "log.txt").read_text()
    assert train_alone(second) == 0
    before = contents(tmp_path)
    assert train_alone(second) == 0
    assert "already finished" in (tmp_path / "log.txt").read_text()
    assert contents(tmp_path) == before

    entries = starts(tmp_path)
    assert [(each["first_step"], each["last_step"], each["status"]) for each in entries] == [
        (1, 4, "finished"),
        (3, 6, "finished"),
    ]
    assert [each["config"] for each in entries] == ["config.yaml", f"config-{entries[1]['id']}.yaml"]
    for entry, config in zip(entries, (first, second), strict=True):
        assert parse_as(PretrainConfig, [f"--config={tmp_path / entry['config']}"]) == config
        assert entry["command"] == "pretrain_gpt.py --data.prefix 'a corpus'"
        assert entry["start"] <= entry["end"]
        assert {"python", "megapipe", "torch", "numpy"} <= entry["versions"].keys()
        assert (len(entry["hosts"]), entry["devices"], entry["layout"]["data"]) == (1, {"cpu": 1}, 1)
        assert entry["git"] is None or len(entry["git"].removesuffix("-dirty")) == 40
    assert [line["run"] for line in events(tmp_path, "start")] == [each["id"] for each in entries]
    assert (tmp_path / "log.txt").read_text().startswith(log), "nothing is overwritten"
    assert (tmp_path / "log.txt").read_text().count("===== start ") == 3
    history = read_losses(tmp_path / "metrics.jsonl")
    assert sorted(history.training) == [1, 2, 3, 4, 5, 6]
    assert [sorted(dropped) for dropped in history.dropped] == [[3, 4]]


def test_the_commit_is_that_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "megapipe"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr("megapipe.__file__", str(package / "__init__.py"))

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
        done = subprocess.run(["git", "-C", tmp_path, *identity, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def recorded() -> str | None:
        RunFolder(tmp_path, "one", PretrainConfig(), 0, {})
        commit: str | None = starts(tmp_path)[-1]["git"]
        return commit

    git("init", "--quiet")
    assert recorded() is None, "not one of the files of this checkout"
    git("add", "megapipe")
    git("commit", "--quiet", "--message=one")
    assert recorded() == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed = True\n")
    assert recorded() == git("rev-parse", "HEAD") + "-dirty"


def test_a_failed_run_says_why(tmp_path: Path, corpus: str) -> None:
    config = configuration(corpus, tmp_path)
    config.optimizer = replace(config.optimizer, learning_rate=1e30, warmup_steps=0)
    config.reliability = replace(config.reliability, non_finite_patience=1)
    with pytest.raises(NonFiniteError):
        train_alone(config)
    (entry,) = starts(tmp_path)
    assert entry["status"].startswith("failed: NonFiniteError: 1 steps in a row")
    assert "failed: NonFiniteError" in (tmp_path / "log.txt").read_text()


def test_a_damaged_run_json_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"starts": [')
    for run in ("one", "two"):
        RunFolder(tmp_path, run, PretrainConfig(), 0, {}).event("end", status=0, step=1)
    assert [each["id"] for each in starts(tmp_path)] == ["one", "two"]
    assert (tmp_path / "run.json.unreadable-one").read_text() == '{"starts": ['


def test_a_bert_configuration_can_be_used_again(tmp_path: Path) -> None:
    RunFolder(tmp_path, "one", BertPretrainConfig(), 0, {})
    assert parse_as(BertPretrainConfig, [f"--config={tmp_path / 'config.yaml'}"]) == BertPretrainConfig()
