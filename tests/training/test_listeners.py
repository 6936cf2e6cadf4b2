"""Listeners that fail in any way, or never return, do not affect training; the others receive everything."""

import errno
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.training.observe import listeners
from megapipe.training.observe.listeners import TERMINAL, Listeners
from megapipe.training.observe.records import (
    LineFile,
    Listener,
    StepRecord,
    leave_output,
    print_error,
    print_line,
    write_line,
)
from tests.training.records import step_record

ERRORS = [OSError(errno.ENOSPC, "No space left on device"), BrokenPipeError(), SystemExit(1), KeyError("library")]


class Kept(Listener):
    """Stores what it receives."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.lines: list[str] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record.step)

    def say(self, line: str) -> None:
        self.lines.append(line)


class Failing(Kept):
    """Raises at some steps; step -1 means when it is opened."""

    def __init__(self, fails: Callable[[int], bool], error: BaseException) -> None:
        super().__init__()
        self._fails = fails
        self._error = error
        if fails(-1):
            raise error

    def step(self, record: StepRecord) -> None:
        if self._fails(record.step):
            raise self._error
        super().step(record)


@settings(deadline=None, max_examples=30)
@given(
    st.sets(st.integers(-1, 12)),
    st.sets(st.integers(1, 12)),
    st.sampled_from(ERRORS),
    st.sampled_from(["files", TERMINAL, "tracker"]),
)
def test_failed_listeners_are_off_until_the_next_save(
    fails: set[int], saves: set[int], error: BaseException, lane: str
) -> None:
    other, opened = Kept(), []

    def open_failing() -> Listener:
        opened.append(Failing(fails.__contains__, error))
        return opened[-1]

    with Listeners() as heard:
        heard.add("files", "other", lambda: other)
        heard.add(lane, "failing", open_failing)
        for step in range(1, 13):
            if step in saves:
                heard.retry()
            heard.step(step_record(step))
    received, off = [], False
    for step in range(1, 13):
        off = (off and step not in saves) or step in fails or -1 in fails
        received += [] if off else [step]
    assert other.steps == list(range(1, 13))
    assert [step for each in opened for step in each.steps] == received
    warnings = [line for line in other.lines if "failing failed and is turned off until the next save" in line]
    assert bool(warnings) == bool(fails & {-1, *range(1, 13)})
    recovered = [line for line in other.lines if line == "note: failing works again"]
    assert len(warnings) - len(recovered) in (0, 1), "one warning for each time that it stops working"


def test_a_listener_that_never_returns_does_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "LONGEST_QUEUE", 20)
    released, other = threading.Event(), Kept()

    class Stuck(Listener):
        def step(self, record: StepRecord) -> None:
            released.wait(60)

    heard = Listeners()
    heard.add("files", "other", lambda: other)
    heard.add("tracker", "stuck", Stuck)
    start = time.monotonic()
    for step in range(1, 101):
        heard.step(step_record(step))
        while heard._lanes["files"]._calls.qsize() > 10:  # even a fast step leaves the other listeners time to write
            time.sleep(0.001)
    heard.close(seconds=0.5)
    assert time.monotonic() - start < 30
    assert other.steps == list(range(1, 101))
    assert sum("tracker is blocked, and the records from here on are lost" in line for line in other.lines) == 1
    assert sum("tracker did not finish within 0.5 s" in line for line in other.lines) == 1
    released.set()


def test_listeners_that_never_open_delay_the_end_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "OPEN_SECONDS", 0.2)
    released, other = threading.Event(), Kept()

    def open_stuck() -> Listener:
        released.wait(60)
        return Listener()

    heard = Listeners()
    heard.add("files", "other", lambda: other)
    heard.add("tracker", "stuck", open_stuck)
    heard.step(step_record(1))
    started = time.monotonic()
    heard.close()
    assert time.monotonic() - started < listeners.CLOSE_SECONDS / 2
    assert other.lines == ["warning: tracker had not started when the run ended; its records may be lost"]
    assert listeners.any_abandoned()
    released.set()


class Slow(Kept):
    def step(self, record: StepRecord) -> None:
        time.sleep(0.1)
        super().step(record)


def test_a_listener_that_opens_late_still_gets_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "OPEN_SECONDS", 0.2)
    opening, late = threading.Event(), Slow()

    def open_late() -> Listener:
        opening.wait(60)
        return late

    with Listeners() as heard:
        heard.add("tracker", "late", open_late)
        for number in range(1, 6):
            heard.step(step_record(number))
        opening.set()
    assert late.steps == [1, 2, 3, 4, 5], "0.5 s of records, after the 0.2 s for opening"


PROGRAM = """
import atexit, sys, threading
atexit.register(threading.Event().wait)  # as Weights & Biases waits for its server
from megapipe.config.run import PretrainConfig
from megapipe.cli import train
from megapipe.training import pretrain
from megapipe.training.observe import listeners

def stuck(config, environment, start, choose_recompute):
    listeners.OPEN_SECONDS = 0.2
    with listeners.Listeners() as heard:
        heard.add("tracker", "stuck", threading.Event().wait)
        heard.step(None)
    if sys.argv[1] == "--training.steps=2":
        raise ValueError("no luck")
    return 143

pretrain.pretrain = stuck
raise SystemExit(train.run_program(PretrainConfig, sys.argv[1:]))
"""


@pytest.mark.parametrize(("steps", "status"), [(1, 143), pytest.param(2, 1, marks=pytest.mark.exhaustive)])
def test_a_program_ends_although_a_tracker_hangs(steps: int, status: int) -> None:
    command = [sys.executable, "-c", PROGRAM, f"--training.steps={steps}", "--data.prefix=corpus"]
    assert subprocess.run(command, timeout=60, capture_output=True).returncode == status


class Dead(io.TextIOWrapper):
    """A stream without a reader."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        super().__init__(os.fdopen(writing, "wb"), encoding="ascii")


def test_no_line_raises_where_both_outputs_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Dead())
    monkeypatch.setattr(sys, "stderr", Dead())
    for _ in range(3):
        print_line("unread")
        print_error("nor this")
    with pytest.raises(BrokenPipeError):
        write_line("a listener must know")
    leave_output()
    for stream in (sys.stdout, sys.stderr):
        stream.close()  # would raise if unwritten data were left


def test_a_line_survives_a_narrow_encoding() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write_line("loss ≤ 3", stream)
    assert stream.buffer.getvalue() == b"loss \\u2264 3\n"  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.text(st.characters(exclude_characters="\n\r"), max_size=20), st.booleans())))
@settings(deadline=None)
def test_lines_are_written_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, bool]]
) -> None:
    """A disk becomes full in the middle of some lines; the file starts with an incomplete line of a killed process."""
    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    path.write_bytes(b"half")
    file, write = LineFile(path), os.write
    with pytest.MonkeyPatch.context() as patched:
        for line, full in lines:
            left = [len(line.encode()) // 2]

            def writing(descriptor: int, content: bytes, left: list[int] = left, full: bool = full) -> int:
                if full and not left:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(descriptor, content[: left.pop()] if full else content)

            patched.setattr(os, "write", writing)
            if full:
                with pytest.raises(OSError, match="No space"):
                    file.write(line)
            else:
                file.write(line)
    file.close()
    written = [line for line, full in lines if not full]
    assert path.read_bytes() == b"half" + b"".join(b"\n" + line.encode() for line in written) + b"\n" * bool(written)
