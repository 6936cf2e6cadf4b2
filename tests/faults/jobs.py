"""Jobs under torchrun as tests see them: their processes, output, metrics and checkpoints."""

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.faults.faulty_pretrain import MARK, VARIABLE, Fault
from tests.support.gpt_runs import write_shard
from tests.support.launch import ROOT, rest_of, start
from tests.training.records import comparable_steps

LIMIT_SECONDS = 180
"""For what takes a few seconds on a machine with nothing else to do."""
RUN = Path("runs/default")
"""Folder of a run, within that of its job."""

PROGRAM = Path(__file__).with_name("faulty_pretrain.py")

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds worker processes through /proc")


def children_of(parent: int) -> list[int]:
    """Processes that another one has started."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in listed.split()]


def children(pid: int) -> dict[int, int]:
    """Rank -> process of the workers that a torchrun process has started."""
    pids: dict[int, int] = {}
    for child in children_of(pid):
        with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            pids |= {int(each[5:]): child for each in variables if each.startswith(b"RANK=")}
    return pids


def ended(process: int) -> bool:
    """Whether it is gone, or dead and waits for a parent to hear of it, which may be a container's first process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for_the_end(processes: list[int]) -> None:
    """Return once none of them is left."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while left := [pid for pid in processes if not ended(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.05)


def metrics_of_steps(run: Path) -> dict[int, dict[str, Any]]:
    """Return the last metrics of every step in a run's metrics.jsonl, without times."""
    return {step["step"]: step for step in comparable_steps(run)}


def saved_steps(run: Path) -> list[int]:
    """Steps whose checkpoints are whole by their names."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def saved_files(run: Path, step: int) -> list[bytes]:
    """Return the bytes of a checkpoint's tensor files."""
    files = (run / f"checkpoints/step-{step:08d}").glob("*.safetensors")
    return [path.read_bytes() for path in sorted(files)]


def assert_same_run(actual: Path, expected: Path, step: int) -> None:
    """Check that metrics of every step up to `step`, and tensors saved after it, are the same, bit for bit."""
    assert metrics_of_steps(actual) == metrics_of_steps(expected)
    assert saved_files(actual, step) == saved_files(expected, step) != []


class Job:
    """A job with a fault, started as users start it: under torchrun, or one rank by itself."""

    def __init__(self, folder: Path, fault: Fault | None, *arguments: str, ranks: int = 2) -> None:
        variables = {} if fault is None else {VARIABLE: json.dumps(asdict(fault))}
        self.output: list[str] = []
        self.workers: list[int] = []
        variables["PYTHONPATH"] = str(ROOT)
        self.process = start(ranks, *arguments, folder=folder, program=PROGRAM, errors=subprocess.STDOUT, **variables)

    def wait_for(self, words: str) -> None:
        """Read on until a line holds them; its workers are known then."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if words in line:
                self.workers = [*children(self.process.pid).values()]
                return
        pytest.fail(f"never said {words!r}: {''.join(self.output)}")

    def end(self) -> str:
        """Return its output, after it has ended with all of its processes."""
        output = rest_of(self.process, LIMIT_SECONDS)
        wait_for_the_end(self.workers)
        return "".join([*self.output, output])


@contextmanager
def endless_job(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """A job of two ranks after ten steps, and its workers by rank. Its errors go to `errors` in `folder`."""
    with (folder / "errors").open("w") as errors:
        endless = ["--data.prefix", write_shard(folder), "--training.steps=1000000"]
        process = start(2, *endless, *arguments, folder=folder, errors=errors.fileno())
    assert process.stdout is not None
    output = process.stdout
    try:
        steps = itertools.islice((line for line in output if line.startswith("step ")), 2)
        assert len(list(steps)) == 2, (folder / "errors").read_text()
        threading.Thread(target=output.read, daemon=True).start()
        yield process, children(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def output_of(folder: Path, fault: Fault | None, *arguments: str) -> str:
    """Return the output of a job that runs to its end, after its fault if it has one."""
    job = Job(folder, fault, *arguments)
    if fault is not None:
        job.wait_for(MARK)
    return job.end()


def statuses(output: str) -> set[int]:
    """Return the exit statuses of ranks that torchrun reports as failed."""
    return {int(status) for status in re.findall(r"exitcode +: (-?\d+)", output)}
