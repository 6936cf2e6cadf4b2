"""A killed rank ends the job quickly, and the job says which one it was."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.gpt_runs import write_shard
from tests.support.launch import command, environment

LIMIT_SECONDS = 60


def children(pid: int) -> dict[int, int]:
    """Rank -> process of the workers that a torchrun process has started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if parent == pid:
            for variable in variables:
                if variable.startswith(b"RANK="):
                    found[int(variable[5:])] = int(entry.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds worker processes through /proc")
@pytest.mark.parametrize("links", ["shared_memory", "gloo"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_nothing_is_left(tmp_path: Path, links: str, victim: int) -> None:
    corpus = write_shard(tmp_path)
    arguments = [
        "--data.prefix",
        corpus,
        "--training.steps=1000000",
        "--parallel.pipeline=2",
        f"--parallel.links={links}",
    ]
    process = subprocess.Popen(
        command(2, *arguments),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                break
        workers = children(process.pid)
        os.kill(workers[victim], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
        assert time.monotonic() - killed < LIMIT_SECONDS
        assert process.returncode != 0
        survivor = 1 - victim
        # torchrun names the rank that died, and the survivor the peer that it waited for and the action it was in.
        assert f"rank      : {victim}" in errors
        assert f"pipeline rank {survivor}, step" in errors
        assert f"rank {victim}" in errors
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
