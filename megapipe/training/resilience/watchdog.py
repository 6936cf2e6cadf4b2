"""The heartbeat of a rank: its current activity is in shared memory, and a separate process watches it.

A rank can hang where no Python code runs: stopped, in a collective that its peers never enter, or in a call that keeps
the interpreter lock. Therefore the watcher is another process, and the rank's part is two signal handlers in C: one
writes the stacks of all threads (faulthandler), the other is `_exit` itself.
"""

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from megapipe.config.run import WatchdogConfig
from megapipe.engine.program import Instruction
from megapipe.engine.step import StepState, action_words
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.actions import BACKWARDS, Action, Kind
from megapipe.schedules.schedule import Schedule
from megapipe.training.resilience import watchdog_process
from megapipe.training.resilience.signals import ExitCode
from megapipe.training.resilience.watchdog_process import BEATS, OUTSIDE, PLACE, SIZE, STARTED_STEPS, STEP, Settings

_FROM_PREVIOUS_STAGE = (Kind.FORWARD, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT)
_FROM_NEXT_STAGE = (*BACKWARDS, Kind.RECV_GRADIENT, Kind.SEND_ACTIVATION)
_AMONG_REPLICAS = (Kind.REDUCE_GRADIENTS, Kind.GATHER_WEIGHTS)
_AMONG_ALL = (Kind.REDUCE_TIED, Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS, Kind.UPDATE)


def described_action(action: Action, schedule: Schedule, mesh: Mesh) -> str:
    """Return an action of this rank in words, with the ranks that it may wait for: all of up to 16, else their number
    and range. Example: `FORWARD stage 1 microbatch 3 (may wait for rank 0)`."""
    ranks = _awaited_ranks(action, schedule, mesh)
    if not ranks:
        return action_words(action)
    described = f"rank {', '.join(map(str, ranks))}"
    if len(ranks) > 16:
        described = f"any of {len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"
    return f"{action_words(action)} (may wait for {described})"


def _awaited_ranks(action: Action, schedule: Schedule, mesh: Mesh) -> list[int]:
    """Return the global ranks that an action may wait for, ascending."""
    ranks: set[int] = set()
    if action.kind in (*_FROM_PREVIOUS_STAGE, *_FROM_NEXT_STAGE):
        step = schedule.previous_stage if action.kind in _FROM_PREVIOUS_STAGE else schedule.next_stage
        neighbour = step(action.stage, action.microbatch)
        if neighbour is not None:
            ranks.add(mesh.group("pipeline").ranks[schedule.rank_of(neighbour)])
        ranks.update(mesh.group("tensor").ranks, mesh.group("context").ranks)
    elif action.kind in _AMONG_REPLICAS:
        ranks.update(mesh.group("data", "context").ranks)
    elif action.kind in _AMONG_ALL:
        ranks.update(mesh.world.ranks)
    return sorted(ranks - {mesh.rank})


STACKS = "stacks"
"""Folder in the run's folder with the stacks of ranks that hung."""


class Heartbeat:
    """The current activity of a rank, in memory that it shares with its watcher, if there is one.

    An update takes a few hundred nanoseconds per action, because the text of each action is encoded before the run.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("megapipe heartbeat") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, SIZE)
        self.memory = mmap.mmap(self.descriptor, SIZE)
        self._beats = 0
        self._started_steps = 0
        self.outside("start-up")

    def step(self, number: int, words: str) -> None:
        """Record that step `number` (from 0) starts."""
        self._beat()
        self.memory[PLACE] = _padded(words)
        self.memory[STEP] = number.to_bytes(8, "little")
        self._started_steps += 1
        self.memory[STARTED_STEPS] = self._started_steps.to_bytes(8, "little")

    def outside(self, words: str) -> None:
        """Record the start of an activity outside of steps, such as `evaluation` or `saving`."""
        self._beat()
        self.memory[STEP] = OUTSIDE
        self.memory[PLACE] = _padded(words)

    def recording(self, instruction: Instruction, words: str) -> Instruction:
        """Return `instruction`, extended to record its action before it runs."""
        memory, run, place = self.memory, instruction.run, _padded(words)

        def run_and_record(step: StepState) -> None:
            memory[PLACE] = place
            run(step)

        return replace(instruction, run=run_and_record)

    def _beat(self) -> None:
        self._beats += 1
        self.memory[BEATS] = self._beats.to_bytes(8, "little")


class Watchdog:
    """Context manager that starts the watcher of a rank, and ends it.

    There is no watcher if the configuration turns it off, or if the system is not Linux.
    """

    def __init__(self, config: WatchdogConfig, rank: int, directory: Path) -> None:
        """directory: the run's folder."""
        self.heartbeat = Heartbeat()
        self._config = config
        self._rank = rank
        # The name contains the process id, so that two starts, or equal ranks on two hosts, never share a file.
        self._file = directory / STACKS / f"rank-{rank}-pid-{os.getpid()}.txt"
        self._stacks: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Heartbeat:
        if self._config.enabled and sys.platform == "linux":
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = self._file.open("w")
            faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True)
            _exit_at(ExitCode.STALLED)
            self._process = self._start()
        return self.heartbeat

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            faulthandler.unregister(signal.SIGUSR2)
        if self.heartbeat.descriptor >= 0:
            os.close(self.heartbeat.descriptor)
        if self._stacks is not None:
            empty = os.fstat(self._stacks.fileno()).st_size == 0
            self._stacks.close()
            if empty:
                # Another rank's stacks are there, or someone removed the folder.
                with contextlib.suppress(OSError):
                    self._file.unlink()
                    self._file.parent.rmdir()

    def _start(self) -> subprocess.Popen[bytes]:
        config, descriptor = self._config, self.heartbeat.descriptor
        settings = Settings(
            rank=self._rank,
            pid=os.getpid(),
            floor_seconds=config.floor_seconds,
            factor=config.factor,
            pause_seconds=config.pause_seconds,
            stacks=str(self._file),
            dump_signal=signal.SIGUSR2,
            end_signal=ExitCode.STALLED,
        )
        program = str(Path(watchdog_process.__file__))
        # The interpreter is isolated, so that files next to the program do not hide modules of the standard library.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", program, str(descriptor), json.dumps(asdict(settings))],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )


def _exit_at(number: int) -> None:
    """Let a signal end this process through `_exit`, with the signal's number as its status.

    This calls the C library's `signal`, because a handler in Python would wait for the interpreter lock.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal(number, ctypes.cast(library._exit, ctypes.c_void_p))


def _padded(words: str) -> bytes:
    size = PLACE.stop - PLACE.start
    return words.encode()[:size].ljust(size, b"\0")
