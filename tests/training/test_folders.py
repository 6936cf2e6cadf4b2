"""Folders that cannot be written are told before anything starts, by the host's first rank alone."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.training.folders import make_folders
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard

ROOT = Path(__file__).parents[2]


def configuration(directory: Path, trace: Path | None = None) -> PretrainConfig:
    config = make_config("corpus", GPT2_SHAPE, training={"directory": str(directory)})
    config.profile = replace(config.profile, trace=None if trace is None else str(trace))
    return config


def test_folders_are_made(tmp_path: Path) -> None:
    make_folders(configuration(tmp_path / "a" / "b", tmp_path / "c"), LaunchEnvironment())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c"]


def test_every_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(ConfigError) as told:
        make_folders(configuration(file, file / "below"), LaunchEnvironment())
    assert [problem.split(" cannot")[0] for problem in told.value.problems] == [
        f"training.directory {file}",
        f"profile.trace {file / 'below'}",
    ]
    assert file.read_text() == "not a folder"


def test_a_rank_makes_what_it_writes(tmp_path: Path) -> None:
    config = configuration(tmp_path / "run", tmp_path / "trace")
    make_folders(config, LaunchEnvironment(rank=3, world_size=4, local_rank=1))
    assert not list(tmp_path.iterdir())
    make_folders(config, LaunchEnvironment(rank=2, world_size=4, local_rank=0))
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_the_program_says_it_in_one_line(tmp_path: Path) -> None:
    corpus = write_shard(tmp_path, documents=80)
    command = [sys.executable, "pretrain_gpt.py", "--config", "examples/gpt_tiny.yaml", "--data.prefix", corpus]
    command += ["--model.vocabulary_size=512", "--data.split=80,20,0", "--training.directory=/proc/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: training.directory /proc/run cannot be written: ")
    assert len(done.stderr.splitlines()) == 1
