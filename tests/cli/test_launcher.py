"""`megapipe train -n 2`: ranks that train, the reason as the last line, and the rank's own exit status."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megapipe.cli import train as train_command
from megapipe.cli.train import Job, first_slurm_node, slurm_variables, status_of
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.training.resilience.signals import ExitCode
from tests.faults.jobs import LIMIT_SECONDS, children, needs_proc, saved_steps, wait_for_the_end
from tests.support.gpt_runs import write_shard
from tests.support.launch import TINY, environment
from tests.support.patience import wait_until
from tests.support.ranks import free_port

MEGAPIPE = [sys.executable, "-P", "-m", "megapipe", "train"]
STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "rack[07-08]-gpu",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node3", "node3"),
        ("a1,b[2-4]", "a1"),
        ("rack[07-08]-gpu", "rack07-gpu"),
        ("n[12,14-15]", "n12"),
        ("r[1-2]n[3,5]x,z", "r1n3x"),
    ],
)
def test_the_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_slurm_node(STEP | {"SLURM_STEP_NODELIST": nodes}) == (first, 23456)


def test_a_task_of_a_slurm_step_is_a_rank() -> None:
    read = LaunchEnvironment.read(slurm_variables(STEP))
    assert read == LaunchEnvironment(11, 16, 3, "rack07-gpu", 23456)
    assert slurm_variables(STEP)["LOCAL_WORLD_SIZE"] == "8"
    assert slurm_variables(STEP | {"RANK": "0"}) == {}
    assert slurm_variables(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert slurm_variables({}) == {}


def started(folder: Path, *arguments: str, screen: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start a job in a session of its own, with stderr in stdout, as a screen shows them."""
    return subprocess.Popen(
        [*MEGAPIPE, *TINY, "--data.prefix=corpus", *arguments],
        cwd=folder,
        env=environment(),
        stdout=screen,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def train(
    folder: Path, *arguments: str, program: list[str] = MEGAPIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a job of two ranks to its end, with stderr in stdout."""
    return subprocess.run(
        [*program, "-n", "2", *TINY, "--data.prefix=corpus", *arguments],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shard(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_two_ranks_train_without_a_word_of_the_launcher(folder: Path) -> None:
    """Files of the current folder do not hide modules, and no file is left in the folder for temporary ones."""
    (folder / "torch.py").write_text("raise SystemExit('the wrong torch')")
    (folder / "tmp").mkdir()
    done = train(folder, "--parallel.pipeline=2", "--training.steps=4", TMPDIR=str(folder / "tmp"))
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert lines[:2] == ["starting 2 ranks", "loading torch"]
    assert lines[2].startswith("kernels: ")
    assert lines[-1].startswith("finished after step 4/4")
    assert not [line for line in lines if re.match(r"[IWE]\d{4} |.*elastic|.*OMP_NUM_THREADS", line)]
    assert saved_steps(folder / "runs/default") == [4]
    assert not list((folder / "tmp").iterdir())


@pytest.mark.slow
def test_ranks_of_one_host_need_no_known_host_name(folder: Path) -> None:
    """As in a container whose name no name server knows."""
    program = "import socket, sys; socket.getfqdn = lambda *_: 'no-host.invalid'; sys.argv[0] = 'megapipe'; "
    start = [sys.executable, "-P", "-c", f"{program}from megapipe.cli.main import start; start()", "train"]
    done = train(folder, "--parallel.pipeline=2", "--training.steps=1", program=start)
    assert done.returncode == 0, done.stdout
    assert "finished after step 1/1" in done.stdout


WRONG = {
    "--data.prefix=nowhere": "error: nowhere.idx does not exist",
    "--parallel.data=3": "error: parallel.data 3 x parallel.pipeline 1 x parallel.tensor 1 = 3 ranks, but ",
    "--training.steps=0": "error: training.steps is 0; it must be at least 1",
    "--model.num_heads=7": "error: model.hidden_size 32 is not divisible by model.num_heads 7",
    "--schedule.name=1f2b": "error: schedule.name: unknown schedule '1f2b'; did you mean '1f1b'?",
    "--plan=nowhere.yaml": "error: cannot read nowhere.yaml: No such file or directory",
}
"""Input that the launcher or the ranks refuse, and the last line."""


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("argument", WRONG)
def test_wrong_input_of_ranks_is_the_last_line(folder: Path, argument: str) -> None:
    done = train(folder, argument)
    assert done.returncode == 2, done.stdout
    *others, line = done.stdout.splitlines()
    assert line.startswith(WRONG[argument])
    assert others in ([], ["starting 2 ranks", "loading torch"])


class Endless(NamedTuple):
    """A job of two ranks that has taken some steps. screen: its file for stdout and stderr."""

    process: subprocess.Popen[str]
    screen: Path


@pytest.fixture
def endless(folder: Path) -> Iterator[Endless]:
    screen = folder / "screen"
    with screen.open("w") as output:
        process = started(folder, "-n", "2", "--training.steps=1000000", "--parallel.data=2", screen=output)
    try:
        wait_until(lambda: screen.read_text().count("step ") >= 2)
        yield Endless(process, screen)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@needs_proc
@pytest.mark.slow
def test_a_killed_rank_is_named_in_the_last_line(endless: Endless) -> None:
    ranks = children(endless.process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    assert endless.process.wait(timeout=LIMIT_SECONDS) == 128 + signal.SIGKILL
    assert endless.screen.read_text().splitlines()[-1].startswith("error: rank 1 was killed by SIGKILL")
    wait_for_the_end([*ranks.values()])


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_becomes_the_jobs_status(endless: Endless, folder: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches all processes, SIGTERM the launcher."""
    ranks = children(endless.process.pid)
    (os.killpg if number == signal.SIGINT else os.kill)(endless.process.pid, number)
    assert endless.process.wait(timeout=LIMIT_SECONDS) == 128 + number
    last = endless.screen.read_text().splitlines()[-1]
    assert last.startswith(f"stopped by {number.name} after step "), endless.screen.read_text()
    assert len(saved_steps(folder / "runs/default")) == 1
    wait_for_the_end([*ranks.values()])


def test_a_rank_that_lost_its_peer_is_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent notes the end of the killed rank later than the other one writes its reason."""
    lost = tmp_path / "error.json"
    lost.write_text('{"message": {"message": "lost rank 1", "extraInfo": {"timestamp": "1000"}}}')
    failures = {0: ProcessFailure(0, 101, ExitCode.PEER_LOST, str(lost)), 1: ProcessFailure(1, 102, -9, "none")}
    assert status_of(failures) == 137
    assert capsys.readouterr().err.startswith("error: rank 1 was killed by SIGKILL; ")
    assert status_of({0: failures[0]}) == ExitCode.PEER_LOST
    assert status_of({1: ProcessFailure(1, 102, -15, "none"), 3: ProcessFailure(3, 104, 2, "none")}) == 143


def test_srun_with_one_task_per_node_names_the_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(train_command, "launch", lambda job, _: jobs.append(job) or 0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    for name, value in (STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}).items():
        monkeypatch.setenv(name, value)
    assert train_command.main(["-n", "8", "--config", "gpt_tiny", "--batch.global_size", "64"]) == 0
    assert jobs == [Job(8, 2, "rack07-gpu:23456", 0, "123456")]


@pytest.mark.parametrize(
    ("words", "variables", "reason"),
    [
        ("-n 8", STEP, "srun started 16 tasks on 2 nodes: use one task per node, or one per rank without -n"),
        ("-n 8", {"RANK": "1"}, "this process is rank 1 already"),
        ("-n 8", {"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_NODES is not set, but SLURM_STEP_NUM_TASKS is '2'"),
        ("", STEP | {"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS is '': start ranks with srun"),
        ("", STEP | {"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS is '0'"),
        ("", STEP | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is '', but SLURM_STEP_NUM_TASKS is '16'"),
        (
            "",
            STEP | {"SLURM_JOB_ID": "a"},
            "SLURM_JOB_ID is 'a', but SLURM_STEP_NUM_TASKS is '16': start ranks with sr",
        ),
        ("-n 2 --parallel.tensor 3", {}, "world size 2 is not a multiple of"),
        ("-n 99999", {}, "global_size 16 is not divisible by batch.micro_size 4 x data-parallel size 99999"),
        ("-n 2 --data.sequence_length 999", {}, "exceeds model.max_positions 256"),
    ],
)
def test_no_rank_starts_inside_ranks_or_in_wrong_layouts(
    words: str,
    variables: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train_command, "launch", lambda *_: pytest.fail("ranks were started"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train_command.main(["--config", "gpt_tiny", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "status"), [("--training.steps=3", 0), ("--data.prefix=nowhere", 2)])
def test_two_nodes_meet(folder: Path, argument: str, status: int) -> None:
    """Two launchers of this host, with a rank each."""
    words = ["-n=1", "--nodes=2", f"--rendezvous=localhost:{free_port()}", argument]
    nodes = [started(folder, *words) for _ in range(2)]
    outputs = [node.communicate(timeout=LIMIT_SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [status] * 2, outputs
    lines = [line for output in outputs for line in output.splitlines()]
    if status == 0:
        assert sum(line.startswith("finished after step 3/3") for line in lines) == 1
        assert saved_steps(folder / "runs/default") == [3]
    else:
        (error,) = set(lines) - {"starting 2 ranks", "loading torch"}  # the rank that reports first says it for all
        assert error.startswith(WRONG[argument])
        assert lines.count(error) == 1
