"""The watchdog: when silence is a hang, and that a rank that cannot run Python is named, dumped and ended."""

import ctypes
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megapipe.config.run import WatchdogConfig
from megapipe.engine.program import Instruction
from megapipe.schedules.actions import Action, Kind
from megapipe.training.resilience import watchdog_process
from megapipe.training.resilience.signals import ExitCode
from megapipe.training.resilience.watchdog import Heartbeat, Watchdog
from megapipe.training.resilience.watchdog_process import SIZE, Pace, Settings, place, watch
from tests.support.ranks import RankError, run_ranks

SECONDS = 0.3


def seen(heartbeat: Heartbeat) -> bytes:
    return heartbeat.memory[:SIZE]


def test_words_reach_the_watcher() -> None:
    heartbeat = Heartbeat()
    assert place(seen(heartbeat)) == "start-up"
    ran: list[object] = []
    instruction = heartbeat.recording(Instruction(ran.append, Action(Kind.FORWARD, 1), 0, 0), "FORWARD stage 1")
    heartbeat.step(7, "loading")
    assert place(seen(heartbeat)) == "step 7: loading"
    instruction.run("a state")  # type: ignore[arg-type]
    assert ran == ["a state"]
    assert place(seen(heartbeat)) == "step 7: FORWARD stage 1"
    heartbeat.outside("é" * SIZE)
    assert place(seen(heartbeat)).startswith("é" * 50)


def test_silence_since_the_last_change_is_judged_by_pace() -> None:
    heartbeat, pace = Heartbeat(), Pace(floor=10.0, factor=4.0, pause=100.0)
    now = 0.0
    assert pace.silence(seen(heartbeat), now) == 0.0
    assert pace.limit == 100.0
    for step in range(6):
        heartbeat.step(step, "")
        for _ in range(5):  # five looks a step, a second apart
            pace.silence(seen(heartbeat), now)
            now += 1.0
    assert pace.limit == pytest.approx(4.0 * 5.0)
    assert pace.silence(seen(heartbeat), now) == pytest.approx(5.0)
    assert pace.silence(seen(heartbeat), now + 4.0) == pytest.approx(9.0)
    assert pace.silence(seen(heartbeat), now + 1000.0) == 0.0, "it looked the other way, stopped with the job"
    heartbeat.outside("saving")
    assert pace.silence(seen(heartbeat), now + 1001.0) == 0.0
    assert pace.limit == 100.0


@pytest.mark.parametrize(("seconds", "steps_a_look", "floor", "limit"), [(0.1, 1, 10.0, 10.0), (1.0, 10, 0.1, 0.4)])
def test_fast_steps_use_the_floor_and_count_each(
    seconds: float, steps_a_look: int, floor: float, limit: float
) -> None:
    """Else ranks whose looks fall otherwise would judge the same steps by different limits."""
    heartbeat, pace = Heartbeat(), Pace(floor=floor, factor=4.0, pause=100.0)
    for look in range(6):
        heartbeat.step(steps_a_look * look, "")
        pace.silence(seen(heartbeat), seconds * look)
    assert pace.limit == pytest.approx(limit)


def hang(rank: int, directory: Path, how: str) -> None:
    """Two quick steps, and then a third one that never ends."""
    config = WatchdogConfig(floor_seconds=SECONDS, factor=1.0, pause_seconds=20.0)
    with Watchdog(config, rank, directory) as heartbeat:
        for step in range(3):
            heartbeat.step(step, "BACKWARD stage 1")
            time.sleep(0.1)
        if how == "holds the interpreter lock":
            while True:  # a signal ends a sleep
                ctypes.PyDLL(None).sleep(30)
        elif how == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rank == 0:
            dist.all_reduce(torch.zeros(1))
        else:
            dist.barrier(dist.new_group([0, 1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "ranks", "status", "word"),
    [
        ("holds the interpreter lock", 1, ExitCode.STALLED, "in hang"),
        ("is stopped", 1, -signal.SIGKILL, ""),
        ("waits in another collective", 2, ExitCode.STALLED, "in hang"),
    ],
)
def test_ranks_that_cannot_run_python_are_dumped_and_ended(
    tmp_path: Path, how: str, ranks: int, status: int, word: str
) -> None:
    with pytest.raises(RankError, match=rf"rank \d died with exit code {status}"):
        run_ranks(ranks, hang, tmp_path, how)
    # Of two ranks that wait for each other either may be the first to be ended.
    assert any(word in stacks.read_text() for stacks in (tmp_path / "stacks").iterdir())


@pytest.mark.parametrize("removed", [False, True], ids=["kept", "removed"])
def test_a_rank_that_ends_leaves_no_stacks_file(tmp_path: Path, removed: bool) -> None:
    with Watchdog(WatchdogConfig(floor_seconds=60.0), 0, tmp_path) as heartbeat:
        heartbeat.step(0, "FORWARD")
        assert [path.name for path in (tmp_path / "stacks").iterdir()] == [f"rank-0-pid-{os.getpid()}.txt"]
        if removed:
            shutil.rmtree(tmp_path / "stacks")
    assert list(tmp_path.iterdir()) == []


class PlannedTime:
    """A clock of seconds, which replaces `time`: rank 0 starts a step every other second, for an hour."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat, self.now = heartbeat, 0

    def monotonic(self) -> float:
        return float(self.now)

    def sleep(self, seconds: float) -> None:
        assert seconds == 1.0, "between two looks"
        self.now += 1
        if self.now % 2 == 0 and self.now < 3600:
            self.heartbeat.step(self.now // 2, "FORWARD")


def test_ranks_that_make_progress_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat()
    ended: list[tuple[str, float]] = []
    monkeypatch.setattr(watchdog_process, "time", PlannedTime(heartbeat))
    monkeypatch.setattr(watchdog_process, "end", lambda _, memory, silence: ended.append((place(memory), silence)))
    ours = Settings(0, os.getppid(), 10.0, 4.0, 20.0, "", signal.SIGUSR2, ExitCode.STALLED)
    watch(ours, lambda: seen(heartbeat))
    assert ended == [("step 1799: FORWARD", 11.0)]
