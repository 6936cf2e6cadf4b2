"""The process that watches the heartbeat of a rank. `watchdog.Watchdog` runs this file by its path in an isolated
interpreter, so it imports only the standard library.

It shares only a page of memory with the rank, so it also works while the rank is stopped, waits in C++ code or never
releases the interpreter lock.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BEATS = slice(0, 8)
"""Number that changes with every recorded activity."""
STEP = slice(8, 16)
"""Number of the step, from 0; all bits are 1 outside of steps."""
STARTED_STEPS = slice(16, 24)
"""Number of steps that have started in this process."""
PLACE = slice(24, 224)
"""Current activity of the rank, in UTF-8, padded with zeros."""
SIZE = 224
OUTSIDE = b"\xff" * 8

_STEPS_KEPT = 50
_GRACE_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Settings:
    """Arguments from the rank, as JSON. stacks: file to which the rank's handler of `dump_signal` writes."""

    rank: int
    pid: int
    floor_seconds: float
    factor: float
    pause_seconds: float
    stacks: str
    dump_signal: int
    end_signal: int


class Pace:
    """Decides whether a rank has made no progress for too long. Times are in seconds, on any clock."""

    def __init__(self, floor: float, factor: float, pause: float) -> None:
        self._floor, self._factor, self._pause = floor, factor, pause
        self._seen = b""
        self._changed = 0.0
        self._step_start: float | None = None
        self._last_look = 0.0
        self._durations: deque[float] = deque(maxlen=_STEPS_KEPT)

    def silence(self, memory: bytes, now: float) -> float:
        """Compare the memory with its content at the last call, and return the seconds since it changed."""
        if memory[STEP] != self._seen[STEP]:
            inside = memory[STEP] != OUTSIDE and self._seen[STEP] not in (OUTSIDE, b"")
            if inside and self._step_start is not None:
                steps = _number(memory) - _number(self._seen)  # several, if steps are short
                self._durations.append((now - self._step_start) / max(1, steps))
            self._step_start = now
        # A watcher that was itself stopped, for example with the whole job, has not seen what changed in that time.
        if memory != self._seen or now - self._last_look > self._floor / 2:
            self._seen, self._changed = memory, now
        self._last_look = now
        return now - self._changed

    @property
    def limit(self) -> float:
        """Seconds without a change after which the rank counts as hanging in its current activity."""
        first = int.from_bytes(self._seen[STARTED_STEPS], "little") < 2
        if first or self._seen[STEP] == OUTSIDE:
            return max(self._pause, self._floor)
        median = statistics.median(self._durations) if self._durations else 0.0
        return max(self._floor, self._factor * median)


def place(memory: bytes) -> str:
    """Return the current activity of the rank in words."""
    words = memory[PLACE].rstrip(b"\0").decode(errors="replace")
    return words if memory[STEP] == OUTSIDE else f"step {_number(memory)}: {words}"


def _number(memory: bytes) -> int:
    return int.from_bytes(memory[STEP], "little")


def watch(settings: Settings, memory: Callable[[], bytes]) -> None:
    """Watch until the rank has ended; end it if it hangs."""
    pace = Pace(settings.floor_seconds, settings.factor, settings.pause_seconds)
    pace.silence(memory(), time.monotonic())
    interval = min(1.0, settings.floor_seconds / 10)
    while True:
        time.sleep(interval)
        if os.getppid() != settings.pid:
            return
        silence = pace.silence(memory(), time.monotonic())
        if silence > pace.limit:
            end(settings, memory(), silence)
            return


def end(settings: Settings, memory: bytes, silence: float) -> None:
    """Print where the rank hangs, let it write its stacks, and end it."""
    state = _state(settings.pid)
    _send(settings.pid, settings.dump_signal)
    file = Path(settings.stacks)
    time.sleep(1.0)  # the handler writes immediately, unless the process is stopped
    stacks = file.read_text(errors="replace") if file.exists() else ""
    line = (
        f"watchdog: rank {settings.rank} made no progress for {silence:.1f} s in {place(memory)}; process "
        f"{settings.pid} is {state}; the job ends with exit status {settings.end_signal}"
    )
    record_reason(line)
    print(
        line,
        f"stacks of rank {settings.rank}, also in {file}:\n{stacks}" if stacks else "the rank wrote no stacks",
        sep="\n",
        file=sys.stderr,
        flush=True,
    )
    # For the other watchers: the launcher ends all ranks when the first one ends.
    time.sleep(_GRACE_SECONDS)
    _send(settings.pid, settings.end_signal)
    for _ in range(20):
        if _state(settings.pid) in ("gone", "dead"):
            return
        time.sleep(0.1)
    _send(settings.pid, signal.SIGKILL)


def record_reason(words: str) -> None:
    """Write the reason that torchrun prints in its summary (`Root Cause`), if torchrun started this rank.

    The file has the format of ErrorHandler in torch.distributed.elastic (torch 2.13).
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        reason = {"message": {"message": words, "extraInfo": {"timestamp": str(int(time.time()))}}}
        # A full disk must not hide the reason from the screen.
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(reason))


_STATES = {
    "R": "computing",
    "S": "waiting",
    "D": "waiting for a device or a disk",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"
    return _STATES.get(letter, letter)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> None:
    """Watch a rank. Arguments: the descriptor of the shared memory, and the settings as JSON."""
    settings = Settings(**json.loads(sys.argv[2]))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The rank handles the signals of a terminal or a launcher; this process ends when the rank ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with mmap.mmap(int(sys.argv[1]), SIZE, prot=mmap.PROT_READ) as shared:
        watch(settings, lambda: shared[:SIZE])


if __name__ == "__main__":
    main()
