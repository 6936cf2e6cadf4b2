"""tools/data.py stalls, from a configuration to its table and its JSON."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megapipe.calibration import stalls as stalls_module
from megapipe.calibration.stalls import ColdShards
from megapipe.cli.data import read_config
from megapipe.cli.data import stalls as main
from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.data import files
from megapipe.training.loop.batches import open_samples
from tests.support.bert_runs import write_corpus
from tests.support.gpt_runs import VOCABULARY, write_shard
from tests.support.patience import undisturbed

MODEL = {"vocabulary_size": VOCABULARY, "num_layers": 1, "hidden_size": 32, "num_heads": 4, "max_positions": 16}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A tiny GPT over a shard of its own."""
    groups = {
        "model": MODEL,
        "data": {"prefix": write_shard(tmp_path, documents=400), "sequence_length": 16},
        "batch": {"global_size": 8, "micro_size": 2},
        "parallel": {"device": "cpu"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(groups))
    return path


def stalls(config: Path, *more: str) -> dict[str, Any]:
    output = config.parent / "stalls.json"
    status = main(["--config", str(config), "--steps", "3", "--warm-up", "1", "--json", str(output), *more])
    assert status == 0
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def test_a_configuration_is_measured_and_reported(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = stalls(config)
    assert report["tokens_per_step"] == 8 * 16
    assert report["samples_per_step"] == 8
    rates = report["tokens_per_second"]
    seconds = report["seconds_per_step"]
    assert rates["ingestion"] == pytest.approx(128 / seconds["resident"]["whole"])
    assert rates["preparation"] == pytest.approx(128 / seconds["loading_cached"]["whole"])
    assert report["samples_per_second"]["ingestion"] == pytest.approx(rates["ingestion"] / 16)
    assert not report["ingestion_was_given"]
    assert (report["storage_not_measured"] is None) == (seconds["cold"] is not None)
    printed, said = capsys.readouterr()
    sources = ("with the shards on storage", "with the shards in memory", "on a batch in memory")
    lines = [f"run {number} of 3: 4 steps {source}" for number, source in enumerate(sources, start=1)]
    assert said.splitlines()[-3:] == lines
    assert "ingestion: model, batches in memory" in printed
    assert "stalls, as shares of a step: preparation" in printed
    assert "what if" in printed


def test_a_given_ingestion_rate_is_shared_by_the_replicas(config: Path) -> None:
    layout = ("--parallel.data", "2", "--parallel.pipeline", "2", "--schedule.name", "1f1b")
    report = stalls(config, "--ingestion-tokens-per-second", "64000", *layout, "--model.num-layers", "2")
    assert report["tokens_per_second"]["ingestion"] == 32000
    assert report["samples_per_step"] == 4
    assert report["replicas"] == 2
    # 64 tokens at 32,000 per second: the pause that replaces the model takes at least this long.
    assert report["seconds_per_step"]["resident"]["whole"] >= 0.002


def test_reading_the_tokens_is_in_the_loaders_time(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay of 10 ms in every micro-batch's reading, of which a step has four."""

    def slow_samples(run: PretrainConfig, split: Any) -> Any:
        samples = open_samples(run, split)
        tokens = samples.tokens

        def slowly(ordinals: Any) -> np.ndarray:
            time.sleep(0.01)
            return tokens(ordinals)

        monkeypatch.setattr(samples, "tokens", slowly)
        return samples

    monkeypatch.setattr(stalls_module, "open_samples", slow_samples)
    report = undisturbed(
        lambda: stalls(config, "--ingestion-tokens-per-second", "64000"),
        lambda report: report["stall_shares"]["preparation"] > 0.5,
    )
    assert report["seconds_per_step"]["loading_cached"]["whole"] >= 0.04
    assert report["tokens_per_second"]["preparation"] <= 128 / 0.04
    assert report["stall_shares"]["preparation"] > 0.5
    assert report["what_if"]["accelerator_headroom"]["memory"] < 0.1


def test_files_that_stay_in_memory_are_not_called_cold(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls_module, "resident_share", lambda paths: 0.7)
    report = stalls(config, "--ingestion-tokens-per-second", "1e6")
    assert "70% of the shards remain in memory" in report["storage_not_measured"]
    assert report["tokens_per_second"]["fetch"] is None
    assert report["stall_shares"]["fetch"] is None
    assert report["seconds_per_step"]["cold"] is None


def test_a_corpus_that_one_read_caches_is_reported(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In memory after the first drop, before the second and after it."""
    shares = iter([0.0, 0.9, 0.0])
    monkeypatch.setattr(stalls_module, "resident_share", lambda paths: next(shares))
    report = stalls(config, "--ingestion-tokens-per-second", "1e6")
    assert report["resident_share_after_a_cold_run"] == 0.9
    assert report["storage_not_measured"] is None
    assert report["seconds_per_step"]["cold"] is not None
    assert "note: 90% of the shards were in memory after the run from storage" in capsys.readouterr().out


def test_a_system_without_fadvise_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(files.os, "posix_fadvise")
    shards = ColdShards((write_shard(tmp_path),))
    assert not shards.make()
    assert shards.why_not is not None
    assert "no posix_fadvise" in shards.why_not


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["--parallel.pipeline", "2"], "--ingestion-tokens-per-second"),
        (["--data.prefix", "nowhere"], "nowhere.idx does not exist"),
        (["--batch.micro-size", "3"], "batch.global_size 8 is not divisible"),
        (["--json", "/nowhere/stalls.json"], "/nowhere/stalls.json cannot be written because the folder /nowhere"),
        (["--model.width", "3"], "unknown configuration key 'model.width'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    config: Path, fields: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(config), *fields]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_is_one_line(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stalls_module, "measure_stalls", interrupted)
    assert main(["--config", str(config)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_kind_follows_from_the_fields(tmp_path: Path) -> None:
    assert type(read_config(None, ["--data.prefix", "x"])).__name__ == "PretrainConfig"
    assert type(read_config(None, ["--data.prefix", "x", "--data.pairs", "next"])).__name__ == "BertPretrainConfig"
    assert type(read_config("bert", ["--data.prefix", "x"])).__name__ == "BertPretrainConfig"
    with pytest.raises(ConfigError, match=r"^unknown configuration key 'data.isolate'"):
        read_config(None, ["--data.pairs", "next", "--data.isolate", "true"])


@pytest.mark.slow
def test_a_bert_is_measured_by_the_same_command(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    config = tmp_path / "bert.yaml"
    groups = {
        "model": {**MODEL, "max_positions": 24},
        "data": {"prefix": data.prefix, "tokenizer": data.tokenizer, "sequence_length": 24, "split": "80,20,0"},
        "batch": {"global_size": 8, "micro_size": 2},
        "parallel": {"device": "cpu"},
    }
    config.write_text(yaml.safe_dump(groups))
    report = stalls(config)
    assert report["tokens_per_step"] == 8 * 24
    assert min(report["tokens_per_second"][name] for name in ("ingestion", "preparation")) > 0
    given = stalls(config, "--ingestion-tokens-per-second", "1e6")
    assert given["tokens_per_second"]["ingestion"] == 1e6
