"""Folders that cannot be written are reported before anything starts, by the host's first rank alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.training.resilience.run_identity import make_folders
from tests.support.gpt_runs import GPT2_SHAPE, make_config


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
    with pytest.raises(ConfigError) as raised:
        make_folders(configuration(file, file / "below"), LaunchEnvironment())
    assert [problem.split(" cannot")[0] for problem in raised.value.problems] == [
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
