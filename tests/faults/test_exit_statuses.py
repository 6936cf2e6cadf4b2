"""Statuses that torchrun reports of jobs that end by their own decision, and of one that hangs."""

from pathlib import Path

import pytest

from megapipe.training.resilience.signals import ExitCode
from tests.faults.faulty_pretrain import Fault
from tests.faults.jobs import RUN, needs_proc, output_of, saved_steps, statuses

pytestmark = [pytest.mark.slow, needs_proc]


def test_persistent_high_loss_ends_with_its_own_status(tmp_path: Path, corpus: str) -> None:
    arguments = [f"--data.prefix={corpus}", "--parallel.data=2", "--training.steps=20", "--checkpoint.every=4"]
    arguments += ["--spikes.deviations=10", "--spikes.window=4", "--spikes.patience=1", "--spikes.skip_batches=1"]
    arguments += ["--optimizer.learning_rate=0.005", "--optimizer.warmup_steps=2"]
    output = output_of(
        tmp_path, Fault("batches", rank=None, step=24), *arguments
    )  # those of step 7 and of all later steps
    assert ExitCode.SPIKES in statuses(output), output
    assert output.count("error: the loss jumped up again") == 1, output
    assert "after 1 returns to the checkpoint after step 4" in output
    assert saved_steps(tmp_path / RUN) == [4]


def test_wrong_input_is_reported_once_despite_late_rank_0(tmp_path: Path) -> None:
    """The other rank has noticed it long before, and waits, because its exit would end the rank that reports it."""
    output = output_of(tmp_path, Fault("start", rank=0), "--data.prefix=nowhere", "--parallel.data=2")
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "nowhere" in error
    assert ExitCode.WRONG_INPUT in statuses(output), output


def test_replicas_that_differ_end_with_their_own_status(tmp_path: Path, corpus: str) -> None:
    arguments = [f"--data.prefix={corpus}", "--parallel.data=2", "--training.steps=8", "--checkpoint.every=2"]
    arguments += ["--reliability.compare_every=2"]
    output = output_of(tmp_path, Fault("weights", step=4), *arguments)
    assert ExitCode.REPLICAS_DIFFER in statuses(output), output
    assert output.count("error: after step 4 ranks differ in state that must be equal: weights of ") == 1, output
    assert "on rank 1 against rank 0" in output
    assert saved_steps(tmp_path / RUN) == [2], "what differs is not saved"


def test_watchdogs_name_ranks_asleep_in_a_collective(tmp_path: Path, corpus: str) -> None:
    arguments = [f"--data.prefix={corpus}", "--parallel.data=2", "--training.steps=1000"]
    arguments += ["--watchdog.floor_seconds=5", "--watchdog.factor=20"]
    output = output_of(tmp_path, Fault("collective", step=20), *arguments)
    assert ExitCode.STALLED in statuses(output), output
    reports = [line for line in output.splitlines() if line.startswith("watchdog: rank 1 ")]
    assert reports, output
    assert " in step 20: " in reports[0]
    assert "is waiting" in reports[0]
    (file,) = (tmp_path / RUN / "stacks").glob("rank-1-pid-*.txt")
    stacks = file.read_text()
    assert "in strike" in stacks, "where it sleeps"
    assert "in all_reduce" not in stacks, "it never entered the collective"
