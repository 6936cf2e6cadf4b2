"""Saves of whole runs: during training or between steps, by steps, minutes or measured cost, and retention.

The oracle of a save during training is the run that saves between its steps: the same files, bit for bit.
"""

import itertools
import math
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.checkpoint import CheckpointError
from megapipe.checkpoint.background import Snapshot
from megapipe.checkpoint.save_and_load import Content
from megapipe.config.run import CheckpointConfig, SpikesConfig
from megapipe.engine.host_memory import Move, ThreadCopies
from megapipe.engine.step import StepResult
from megapipe.parallel.launch import initialize
from megapipe.training.loop import checkpoints, steps
from megapipe.training.loop.checkpoints import Saves
from tests.checkpoint.disks import disk_before, save_on
from tests.faults.jobs import saved_files, saved_steps
from tests.support.gpt_runs import GPT2_SHAPE, make_config, train_alone
from tests.support.patience import wait_until

pytestmark = pytest.mark.usefixtures("without_pictures")

RARE = pytest.mark.exhaustive


Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, corpus: str) -> Run:
    """A run in a folder below `tmp_path`, with other values of the configuration's groups."""

    def started(*, folder: str = "", steps: int = 6, groups: Any = None, **checkpoint: Any) -> int:
        config = make_config(
            corpus,
            GPT2_SHAPE,
            batch={"global_size": 2},
            checkpoint={"keep_last": None, **checkpoint},
            training={"steps": steps, "directory": str(tmp_path / folder)},
            **(groups or {}),
        )
        return train_alone(config)

    return started


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("2bw", marks=RARE)])
def test_background_saves_equal_saves_between_steps(
    tmp_path: Path, run: Run, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, chosen = ThreadCopies.copy, random.Random(3)

    def slow(self: ThreadCopies, moves: Sequence[Move]) -> None:
        """Copies that end before, during or after the step that starts them."""
        time.sleep(chosen.choice((0.0, 0.01, 0.05)))
        copy(self, moves)

    monkeypatch.setattr(ThreadCopies, "copy", slow)
    kinds: dict[str, dict[str, Any]] = {"between": {"asynchronous": False}, "during": {}}
    kinds["in the next step"] = {"snapshot": "next_step"}
    for name, options in kinds.items():
        assert run(folder=name, every=1, groups={"schedule": {"name": schedule}}, **options) == 0
        assert saved_steps(tmp_path / name) == [1, 2, 3, 4, 5, 6]
        for step in range(1, 7):
            assert saved_files(tmp_path / name, step) == saved_files(tmp_path / "between", step)


@pytest.mark.slow
def test_auto_measures_then_saves_at_its_cost_limit(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder="dear", steps=40, every="auto", max_overhead=1e-6) == 0
    assert saved_steps(tmp_path / "dear") == [10, 40], "a limit that every save exceeds"
    ended = Saves.step_ended

    def far_longer_than_a_save(self: Saves, seconds: float) -> None:
        wait_until(lambda: not self.background.under_way)
        ended(self, 1000.0)

    monkeypatch.setattr(Saves, "step_ended", far_longer_than_a_save)
    assert run(steps=40, every="auto", max_overhead=1e6) == 0
    steps = saved_steps(tmp_path)
    assert (steps[0], steps[-1]) == (10, 40)
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    assert gaps <= {1, 2}, "a limit that no save reaches leaves the disk's speed alone, which a step outlasts"


def test_saves_to_silent_disks_fail_before_a_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 must report a save to which no rank writes before its peers take it for lost."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(checkpoints, "BackgroundSaver", lambda *_, **options: given.update(options))
    for timeout in (0.5, 600.0):
        Saves(CheckpointConfig(every=1), tmp_path, initialize({}, "cpu"), timeout, lambda line: None)
        assert 0 < given["patience"] <= 0.75 * timeout


def test_minutes(tmp_path: Path, run: Run) -> None:
    assert run(steps=4, every_minutes=1e-9, asynchronous=False) == 0
    assert saved_steps(tmp_path) == [2, 3, 4], "the length of the first step is unknown"


def test_auto_waits_an_interval_after_a_save_that_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def full(*arguments: Any) -> Path:
        attempts.append(arguments)
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(checkpoints, "save", full)
    assert run(steps=25, every="auto", asynchronous=False, at_end=False) == 0
    assert len(attempts) == 2, "after every tenth step; one attempt per step would slow training"


def on(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object]) -> None:
    """Let runs save on a disk that calls `before` with the step of every rename, which makes a folder a checkpoint."""
    disk = disk_before("rename", lambda _, target: before(int(target.name.removeprefix("step-"))))
    save_on(disk, monkeypatch)


def refuse(monkeypatch: pytest.MonkeyPatch, *refused: int, after: float = 0.0) -> None:
    """Let runs save on a disk that refuses the checkpoints of these steps after some seconds."""

    def before(step: int) -> None:
        if step in refused:
            time.sleep(after)
            raise OSError(5, "Input/output error")

    on(monkeypatch, before)


@pytest.mark.parametrize(
    ("saves", "failing"),
    [
        ({"every_minutes": 1e-9, "asynchronous": False}, 4),
        pytest.param({"every_minutes": 1e-9}, 4, marks=RARE),
        ({"every": 2}, 4),
        pytest.param({"every": 3}, 3, marks=RARE),
    ],
    ids=["timed", "timed in the background", "by steps", "before the end"],
)
def test_failed_saves_end_no_run_without_a_final_save(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    saves: dict[str, Any],
    failing: int,
) -> None:
    begin = Saves.begin

    def begin_and_await_earlier_saves(self: Saves, *arguments: Any, **options: Any) -> Path:
        path = begin(self, *arguments, **options)
        if arguments[2].step < failing:  # a save that still runs would put off the one that fails
            wait_until(lambda: not self.background.under_way)
        return path

    monkeypatch.setattr(Saves, "begin", begin_and_await_earlier_saves)
    refuse(monkeypatch, failing, after=0.5)  # the steps after it end meanwhile
    assert run(steps=4, at_end=False, **saves) == 0
    assert failing not in saved_steps(tmp_path)
    assert capsys.readouterr().out.count(f"warning: no checkpoint after step {failing}: ") == 1


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ((6,), "step-00000003 after step 3"),
        pytest.param((3, 6), "no save of this run has succeeded yet", marks=RARE),
    ],
    ids=["second", "both"],
)
def test_spikes_are_watched_after_a_failed_save(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: tuple[int, ...],
    words: str,
) -> None:
    ended, spikes = Saves.step_ended, [9]

    def after_the_save(self: Saves, seconds: float) -> None:
        wait_until(lambda: not self.background.under_way)
        ended(self, seconds)

    def limit(config: SpikesConfig, losses: Sequence[float]) -> float:
        return spikes.pop() - 9.0 if len(losses) + 1 in spikes else math.inf

    refuse(monkeypatch, *refused)
    monkeypatch.setattr(Saves, "step_ended", after_the_save)
    monkeypatch.setattr(steps, "spike_limit", limit)
    assert run(steps=10, every=3, groups={"spikes": {"threshold": 1e9}}) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "the loss jumped up" in line]
    assert "at step 9" in line
    assert words in line


@pytest.mark.parametrize(
    ("number", "every", "status", "steps"),
    [
        (signal.SIGTERM, 1000, 143, [4]),
        pytest.param(signal.SIGINT, 1000, 130, [4], marks=RARE),
        pytest.param(signal.SIGHUP, 1000, 129, [4], marks=RARE),
        (signal.SIGUSR1, 1000, 0, [4, 6]),
        (signal.SIGUSR1, None, 0, []),
    ],
)
def test_a_signal_saves_after_the_current_step(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    every: int | None,
    status: int,
    steps: list[int],
) -> None:
    """SIGUSR1 ends nothing."""
    ended: list[float] = []

    def signalled(self: Saves, seconds: float) -> None:
        ended.append(seconds)
        if len(ended) == 3:
            signal.raise_signal(number)

    monkeypatch.setattr(Saves, "step_ended", signalled)
    assert run(every=every, at_end=every is not None) == status
    assert saved_steps(tmp_path) == steps
    ignored = "note: SIGUSR1 asks for a checkpoint, but this run does not save" in capsys.readouterr().out
    assert ignored == (not every)


def signal_as_a_save_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, once: a second one that comes late, for example after a slow disk, would end the tests."""
    begin, left = Saves.begin, [signal.SIGTERM]

    def signalled(self: Saves, *args: Any, **options: Any) -> Path:
        if left:
            signal.raise_signal(left.pop())
        return begin(self, *args, **options)

    monkeypatch.setattr(Saves, "begin", signalled)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_signal_during_a_save_prevents_further_steps(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    signal_as_a_save_starts(monkeypatch)
    assert run(every=2, asynchronous=asynchronous) == 128 + signal.SIGTERM
    assert saved_steps(tmp_path) == [2]


@pytest.mark.parametrize("durable", [pytest.param([], marks=RARE), [2]], ids=["as a save starts", "after a save"])
def test_a_save_that_a_signal_ends_has_a_deadline(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, durable: list[int]
) -> None:
    released = threading.Event()
    on(monkeypatch, lambda step: step in durable or released.wait(30))
    clock, sent = time.perf_counter, list[signal.Signals]()

    def stopping() -> float:
        """In step 3 or later, as soon as the save after step 2 was seen to be durable."""
        if saved_steps(tmp_path) == [2] and not sent:
            sent.append(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return clock()

    if durable:
        monkeypatch.setattr("megapipe.training.loop.steps.time.perf_counter", stopping)
    else:
        signal_as_a_save_starts(monkeypatch)
    with pytest.raises(CheckpointError, match=r"after step \d+ was abandoned: .*signal_deadline_seconds"):
        run(steps=1000, every=2, signal_deadline_seconds=0.2)
    assert saved_steps(tmp_path) == durable
    released.set()


@pytest.mark.parametrize(
    ("asynchronous", "schedule", "wanted"),
    [(True, "1f1b", [True]), pytest.param(True, "2bw", [True], marks=RARE), (False, "1f1b", [])],
)
def test_memory_of_copies_is_there_before_the_first_save(
    run: Run, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, schedule: str, wanted: list[bool]
) -> None:
    places, prepare = Snapshot.places, Snapshot.prepare
    prepared, taken = [], []

    def watched_prepare(self: Snapshot, contents: Sequence[Content]) -> None:
        prepared.append(contents)
        prepare(self, contents)

    def watched_places(self: Snapshot, contents: Sequence[Content]) -> list[Content]:
        self.settle()
        taken.append(self.num_bytes >= sum(content.tensor.num_bytes for content in contents) > 0)
        return places(self, contents)

    monkeypatch.setattr(Snapshot, "prepare", watched_prepare)
    monkeypatch.setattr(Snapshot, "places", watched_places)
    assert run(every=3, asynchronous=asynchronous, groups={"schedule": {"name": schedule}}) == 0
    assert taken == wanted, "the last save copies nothing, since nothing changes its state"
    assert len(prepared) == bool(wanted), "once"


def test_a_signal_during_an_evaluation_gives_that_up(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums, batches = steps.batch_sums, []

    def signalled(result: StepResult, token_counts: Any) -> torch.Tensor:
        batches.append(result)
        if len(batches) == 2:
            signal.raise_signal(signal.SIGTERM)
        return sums(result, token_counts)

    monkeypatch.setattr(steps, "batch_sums", signalled)
    groups: dict[str, Any] = {"data": {"split": "50,50,0"}, "evaluation": {"every": 3, "samples": 12}}
    assert run(every=1000, groups=groups) == 128 + signal.SIGTERM
    assert len(batches) == 3, "of six: the answer to the second comes after the third"
    assert saved_steps(tmp_path) == [3]
    assert '"event": "evaluation"' not in (tmp_path / "metrics.jsonl").read_text()
