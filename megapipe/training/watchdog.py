"""A rank's heartbeat: what it is about stands in shared memory, and a process of its own watches it.

A rank can hang where no Python runs: stopped, in a collective that its peers never enter, in a call that keeps the
interpreter lock. So the watcher is another process, and what the rank does for it are signal handlers in C: one writes
the stacks of all threads (faulthandler), the other is `_exit` itself.
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

from megapipe.config.reliability import WatchdogConfig
from megapipe.engine.program import Instruction
from megapipe.engine.step import StepState
from megapipe.training import watchdog_process
from megapipe.training.exit_codes import ExitCode
from megapipe.training.watchdog_process import BEATS, BEGUN, OUTSIDE, PLACE, SIZE, STEP, Settings

STACKS = "stacks"
"""Folder of what ranks wrote when they hung, within the run's."""


class Heartbeat:
    """What a rank is about, in memory that its watcher shares, if it has one.

    A few hundred nanoseconds an action: its words are ready before the run.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("megapipe heartbeat") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, SIZE)
        self.memory = mmap.mmap(self.descriptor, SIZE)
        self._beats = 0
        self._begun = 0
        self.outside("start-up")

    def step(self, number: int, words: str) -> None:
        """A step of that number, from 0, begins."""
        self._beat()
        self.memory[PLACE] = _padded(words)
        self.memory[STEP] = number.to_bytes(8, "little")
        self._begun += 1
        self.memory[BEGUN] = self._begun.to_bytes(8, "little")

    def outside(self, words: str) -> None:
        """Something that is not a step begins: `evaluation`, `saving`."""
        self._beat()
        self.memory[STEP] = OUTSIDE
        self.memory[PLACE] = _padded(words)

    def told(self, instruction: Instruction, words: str) -> Instruction:
        """The same instruction, which says where it is before it runs."""
        memory, run, place = self.memory, instruction.run, _padded(words)

        def run_told(step: StepState) -> None:
            memory[PLACE] = place
            run(step)

        return replace(instruction, run=run_told)

    def _beat(self) -> None:
        self._beats += 1
        self.memory[BEATS] = self._beats.to_bytes(8, "little")


class Watchdog:
    """Context manager around all that a rank does: starts its watcher, and ends it.

    Nothing is watched where the configuration says so, or where the system is not Linux.
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
                with contextlib.suppress(OSError):  # another rank's stacks are there, or someone removed the folder
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
        # Isolated: files beside the program must not be taken for modules of the standard library.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", program, str(descriptor), json.dumps(asdict(settings))],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )


def _exit_at(number: int) -> None:
    """Have a signal end this process by `_exit`, with the signal's number as status.

    The C library's `signal` and not Python's: a handler in Python would wait for the interpreter lock.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal(number, ctypes.cast(library._exit, ctypes.c_void_p))


def _padded(words: str) -> bytes:
    size = PLACE.stop - PLACE.start
    return words.encode()[:size].ljust(size, b"\0")
