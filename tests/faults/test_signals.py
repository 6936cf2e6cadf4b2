"""Signals at awkward moments of a job under torchrun: what was done is saved, the exit status says so, no process is
left, and the job goes on from there as if nothing had happened.
"""

import signal
import time
from pathlib import Path

import pytest

from megapipe.training.resilience.signals import ECHO_SECONDS
from tests.faults.faulty_pretrain import MARK, Fault
from tests.faults.jobs import RUN, Job, assert_same_run, needs_proc, output_of, saved_steps, statuses
from tests.support.patience import wait_until

pytestmark = [pytest.mark.slow, needs_proc]


@pytest.mark.exhaustive
def test_signals_in_evaluations_and_saves_cost_nothing(tmp_path: Path, corpus: str) -> None:
    """Start one job four times: each is ended where a signal is easily lost, and the next one continues there. The
    oracle is the job that nothing disturbed."""
    arguments = [f"--data.prefix={corpus}", "--data.split=50,50,0", "--parallel.data=2", "--training.steps=14"]
    arguments += ["--evaluation.every=3", "--evaluation.samples=16", "--checkpoint.every=5"]
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    for folder in (disturbed, whole):
        folder.mkdir()
    between, background = "--checkpoint.asynchronous=false", "--checkpoint.asynchronous=true"
    lives = [
        (Fault("evaluation", 1, signal.SIGTERM), background, 3, {143, 130}),
        (Fault("save", 1, signal.SIGINT), between, 5, {130}),
        (Fault("save during training", 0, signal.SIGTERM), background, 12, {143, 130}),  # asked in step 11
    ]
    for fault, how, step, expected in lives:
        output = output_of(disturbed, fault, *arguments, how)
        assert statuses(output) <= expected, output
        assert "stopped by" in output
        assert saved_steps(disturbed / RUN)[-1] == step, "no further step was made"
    for folder in (disturbed, whole):
        output = output_of(folder, None, *arguments, background)
        assert "finished after step 14/14" in output, output
    assert_same_run(disturbed / RUN, whole / RUN, 14)


@pytest.mark.exhaustive
def test_a_signal_during_the_first_compile_saves_two_steps(tmp_path: Path, corpus: str) -> None:
    arguments = [f"--data.prefix={corpus}", "--training.compile=true", "--training.steps=4", "--checkpoint.every=100"]
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    for folder in (disturbed, whole):
        folder.mkdir()
    pipeline = "--parallel.pipeline=2"
    output = output_of(disturbed, Fault("compile", 1, signal.SIGTERM), *arguments, pipeline)
    assert statuses(output) <= {143, 130}, output
    assert saved_steps(disturbed / RUN) == [2], "ranks agree at the start of a step, and the first step had started"
    for folder in (disturbed, whole):
        assert "finished after step 4/4" in output_of(folder, None, *arguments, pipeline)
    assert_same_run(disturbed / RUN, whole / RUN, 4)


@pytest.mark.parametrize(
    ("place", "number"), [("process groups", signal.SIGTERM), ("process groups", signal.SIGINT), ("model", None)]
)
def test_before_training_a_job_ends_at_once(
    tmp_path: Path, corpus: str, place: str, number: signal.Signals | None
) -> None:
    """Where one rank waits in C for another, which sleeps, or where a rank is asked to end as it builds its model."""
    arguments = [f"--data.prefix={corpus}", "--parallel.data=2", "--training.steps=3", "--checkpoint.every=1"]
    job = Job(tmp_path, Fault(place, 1, -1 if number else signal.SIGTERM), *arguments)
    job.wait_for(MARK)
    if number is not None:
        job.process.send_signal(number)
    asked = time.monotonic()
    output = job.end()
    assert time.monotonic() - asked < 20, "torchrun kills what does not end within 30 s"
    assert job.process.returncode != 0
    if number is None:
        assert -signal.SIGTERM in statuses(output), output
    assert saved_steps(tmp_path / RUN) == []
    assert "Traceback" not in "".join(line for line in output.splitlines() if "[rank" in line)


def test_a_second_signal_ends_a_job_stuck_saving(tmp_path: Path, corpus: str) -> None:
    """After the first signal the save goes on. The second one leaves no checkpoint: the next run starts at step 1."""
    arguments = [f"--data.prefix={corpus}", "--training.steps=3", "--checkpoint.every=2"]
    job = Job(tmp_path, Fault("save", 0), *arguments, "--checkpoint.asynchronous=false", ranks=1)
    job.wait_for(MARK)
    job.process.send_signal(signal.SIGINT)
    time.sleep(2 * ECHO_SECONDS)
    assert job.process.poll() is None

    def ended_by_another() -> bool:
        """Signals that reach a blocked process count as one."""
        job.process.send_signal(signal.SIGINT)
        time.sleep(2 * ECHO_SECONDS)
        return job.process.poll() is not None

    wait_until(ended_by_another)
    assert job.end().count("Traceback") == 0
    assert job.process.returncode == -signal.SIGINT
    assert saved_steps(tmp_path / RUN) == []
    again = Job(tmp_path, None, *arguments, ranks=1)
    assert "finished after step 3/3" in again.end()
    assert saved_steps(tmp_path / RUN) == [2, 3]


def test_sigusr1_to_a_rank_saves_and_training_goes_on(tmp_path: Path, corpus: str) -> None:
    arguments = [f"--data.prefix={corpus}", "--parallel.data=2", "--training.steps=8", "--checkpoint.every=100"]
    output = output_of(tmp_path, Fault("step", 1, signal.SIGUSR1, step=3), *arguments)
    assert "finished after step 8/8" in output
    assert saved_steps(tmp_path / RUN) in ([4, 8], [5, 8]), "noticed in that step or the next"
