"""A rank that is killed or hangs ends the job quickly, and the job says which one it was."""

import os
import signal
from pathlib import Path

import pytest

from tests.faults.jobs import endless_job, needs_proc, wait_for_the_end

pytestmark = needs_proc


def errors_after(signal_number: int, victim: int, folder: Path, *arguments: str, limit: float) -> str:
    """Signal one rank of an endless run, and return what the job says. It must fail within `limit` seconds and leave
    no process running."""
    with endless_job(folder, *arguments) as (process, workers):
        os.kill(workers[victim], signal_number)
        assert process.wait(timeout=limit) != 0
        wait_for_the_end([*workers.values()])
    return (folder / "errors").read_text()


@pytest.mark.parametrize(
    ("links", "victim"),
    [
        ("shared_memory", 1),
        pytest.param("shared_memory", 0, marks=pytest.mark.exhaustive),
        pytest.param("gloo", 0, marks=pytest.mark.exhaustive),
        pytest.param("gloo", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_rank_is_named_and_nothing_is_left(tmp_path: Path, links: str, victim: int) -> None:
    arguments = ["--parallel.pipeline=2", f"--parallel.links={links}"]
    # torchrun kills what does not end by itself after 30 s: the survivor does, in spite of torchrun's SIGTERM.
    errors = errors_after(signal.SIGKILL, victim, tmp_path, *arguments, limit=25)
    # torchrun names the rank that died, and the survivor the peer that it waited for and the action it was in.
    assert f"rank      : {victim}" in errors
    assert f"pipeline rank {1 - victim}, step" in errors
    assert f"rank {victim}" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--parallel.pipeline=2"],
        pytest.param(["--parallel.tensor=2"], marks=pytest.mark.exhaustive),
        pytest.param(["--parallel.data=2"], marks=pytest.mark.exhaustive),
    ],
    ids=lambda each: each[0],
)
def test_a_hanging_rank_is_named_after_the_time_out(tmp_path: Path, arguments: list[str]) -> None:
    # As long as one rank may come late to their meeting. torchrun itself gives a process that ignores its signals half
    # a minute before it kills it.
    errors = errors_after(signal.SIGSTOP, 1, tmp_path, "--parallel.timeout_seconds=15", *arguments, limit=120)
    lines = [line for line in errors.splitlines() if "pipeline rank 0, step" in line]
    assert lines, errors
    assert "rank 1" in lines[0]
