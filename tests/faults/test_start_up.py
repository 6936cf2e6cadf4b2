"""A start that cannot succeed ends on all ranks, with one line and status 2, and changes nothing on disk."""

import contextlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from megapipe.checkpoint import CheckpointError
from megapipe.cli.train import run_program
from megapipe.config.run import PretrainConfig
from megapipe.training.resilience.run_identity import locked_folder
from tests.faults.jobs import LIMIT_SECONDS, RUN, statuses
from tests.support.gpt_runs import GPT2_SHAPE, make_config, train_alone, write_shard
from tests.support.launch import ROOT, TINY, rest_of, start
from tests.support.ranks import free_port, run_ranks
from tests.training.records import events

COMMON = [*TINY, "--data.prefix=corpus", "--training.steps=20", "--parallel.data=2", "--checkpoint.every=5"]


@dataclass(frozen=True)
class Launch:
    """A start of ranks 0 and 1 of `world_size` by a launcher other than torchrun."""

    on_rank_1: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    world_size: int = 2
    timeout: float = 60.0
    common: Sequence[str] = ()


def programs(rank: int, folder: Path, launches: list[Launch]) -> list[tuple[int, list[str]]]:
    """Run the program several times in this process, and return the status and error lines of each run."""
    dist.destroy_process_group()
    os.chdir(folder)
    ended = []
    for each in launches:
        variables = {"RANK": rank, "WORLD_SIZE": each.world_size, "LOCAL_RANK": rank, "MASTER_PORT": each.port}
        os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="localhost")
        sys.argv = ["pretrain_gpt.py", *COMMON, f"--parallel.timeout_seconds={each.timeout}"]
        sys.argv += [*each.common, *(each.on_rank_1 if rank == 1 else [])]
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            status = run_program(PretrainConfig, sys.argv[1:])
        ended.append((int(status), errors.getvalue().splitlines()))
    return ended


def lines_of(folder: Path, launches: list[Launch]) -> list[list[str]]:
    """Return the lines that both ranks print for each launch. Every launch must end with status 2 without training."""
    ended = run_ranks(2, programs, folder, launches, timeout=LIMIT_SECONDS)
    assert {status for rank in ended for status, _ in rank} == {2}, ended
    assert not list(folder.rglob("metrics.jsonl"))
    return [first + second for (_, first), (_, second) in zip(*ended, strict=True)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shard(tmp_path)
    (tmp_path / "other").mkdir()
    write_shard(tmp_path / "other", seed=1)
    return tmp_path


def test_a_start_that_cannot_go_well_ends_all_ranks(folder: Path) -> None:
    """Options are those of rank 1. tests/training/test_run_identity.py has all fields."""
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        lines = lines_of(
            folder,
            [
                Launch(["--parallel.data=1", "--parallel.pipeline=2"]),
                Launch(["--model.num_layer=4"]),
                Launch(["--data.prefix=nowhere"]),
                Launch(["--training.directory=elsewhere"]),
                Launch(world_size=3, timeout=2.0),
                Launch(port=port, timeout=2.0),
            ],
        )
    (layout,), (misspelt,), (wrong,), (elsewhere,), (missing,), (unserved, unreached) = lines
    assert layout.startswith(
        "error: the ranks do not run the same job: parallel.pipeline: rank 0 has 1, rank 1 has 2; parallel.data: "
    )
    assert misspelt.startswith("error: rank 1: unknown configuration key 'model.num_layer'")
    assert wrong.startswith("error: rank 1: nowhere.idx does not exist")
    assert elsewhere.startswith("error: rank 1: training.directory elsewhere is not the folder ")
    assert missing == "error: rank 2 did not start within 2 s (parallel.timeout_seconds)"
    assert unserved.startswith(f"error: rank 0 cannot listen on MASTER_PORT={port} of ")
    assert unreached.startswith("error: rank 1 on ")
    assert f"MASTER_PORT={port} within 2 s" in unreached


@pytest.mark.slow
def test_ranks_that_differ_are_refused_on_a_resume(folder: Path) -> None:
    """This must hold even if the rank that differs is the one that fits the checkpoint."""
    launches = [
        Launch(common=["--training.stop_at=2"]),
        Launch(["--training.seed=7"]),
        Launch(["--data.prefix=other/corpus"]),
        Launch(["--training.seed=1234"], common=["--training.seed=7"]),
        Launch(common=["--training.stop_at=3"]),
    ]
    both = run_ranks(2, programs, folder, launches, timeout=LIMIT_SECONDS)
    assert [[status for status, _ in rank] for rank in both] == [[0, 2, 2, 2, 0]] * 2, both
    saved, *refused, resumed = (first[1] + second[1] for first, second in zip(*both, strict=True))
    assert not saved + resumed
    differing = ("training.seed: rank 0 has 1234", "data.prefix: rank 0 has ", "training.seed: rank 0 has 7")
    for (line,), words in zip(refused, differing, strict=True):
        assert line.startswith(f"error: the ranks do not run the same job: {words}")
    assert [each["step"] for each in events(folder / RUN, "start")] == [0, 2], "refused starts write nothing"


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return times and contents of all files and folders."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (folder, *folder.rglob("*"))
    }


@pytest.mark.parametrize("every", [None, 5])
def test_a_refused_second_start_changes_no_file(folder: Path, every: int | None) -> None:
    directory = folder / "run"
    config = make_config(
        str(folder / "corpus"),
        GPT2_SHAPE,
        training={"directory": str(directory), "steps": 2},
        checkpoint={"every": every},
    )
    with locked_folder(directory, 0, None):
        (directory / "stacks").mkdir()
        (directory / "stacks/rank-0-pid-1.txt").write_text("")
        (directory / "metrics.jsonl").write_text("a line of the first start\n")
        before = snapshot(folder)
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on .*another training.directory"):
            train_alone(config)
        assert snapshot(folder) == before
    assert train_alone(config) == 0


PROGRAM = """
import os, signal, sys
from megapipe.config.run import PretrainConfig
from megapipe.engine.engine import Engine
from megapipe.cli.main import end_after
from megapipe.cli.train import run_program
if os.environ["RANK"] == "1":
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == int(os.environ["DIFFERS_AT_START"]):
        sys.argv += ["--training.seed=7"]
    else:
        Engine.feed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
end_after(lambda: run_program(PretrainConfig, sys.argv[1:]))
"""
"""Rank 1 differs at one start, and is killed in its first step at the starts before it."""


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_shows_the_reason_as_root_cause(folder: Path, restarts: int) -> None:
    (folder / "program.py").write_text(PROGRAM)
    arguments = ["--data.prefix=corpus", "--parallel.data=2"]
    variables = {"PYTHONPATH": str(ROOT), "PET_MAX_RESTARTS": str(restarts), "DIFFERS_AT_START": str(restarts)}
    job = start(2, *arguments, folder=folder, program=folder / "program.py", errors=subprocess.STDOUT, **variables)
    output = rest_of(job, LIMIT_SECONDS)
    assert job.returncode == 1, "torchrun's own"
    assert output.count("error: the ranks do not run the same job: training.seed: rank 0 has 1234") == 1, output
    assert statuses(output) == {2}, output
    assert "traceback : the ranks do not run the same job: training.seed" in output.partition("Root Cause")[2], output
