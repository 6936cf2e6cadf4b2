"""pretrain_gpt.py with a fault that the environment describes: a program for tests to start under torchrun.

MEGAPIPE_FAULT holds the JSON of a `Fault`; without it this is pretrain_gpt.py.
"""

import importlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapipe.checkpoint import background
from megapipe.cli.main import end_after
from megapipe.cli.train import run_program
from megapipe.config.run import PretrainConfig
from megapipe.engine.engine import Engine
from megapipe.engine.step import StepInput
from megapipe.parallel.groups import DistributedGroup
from megapipe.training import pretrain
from megapipe.training.loop.batches import BatchLoader
from megapipe.training.loop.loader import StepBatch
from megapipe.training.loop.replica import Replica
from megapipe.training.loop.steps import Evaluator
from megapipe.training.resilience.guards import Guards

VARIABLE = "MEGAPIPE_FAULT"
MARK = "the fault is here"
"""Printed where the fault strikes, for tests that do something then."""

LATE_SECONDS = 6.0


@dataclass(frozen=True)
class Fault:
    """place: one of PLACES. rank: which one has it, None for all. what: number of a signal that it sends to itself,
    or -1 to sleep for long. step: in which step, from 0; after which step, where weights are changed; from
    which sample on, where batches are."""

    place: str
    rank: int | None = 1
    what: int = -1
    step: int = 0

    def strike(self) -> None:
        """Sleep, or send the signal."""
        print(MARK, flush=True)
        if self.what < 0:
            time.sleep(1000)
        else:
            os.kill(os.getpid(), self.what)


def wrap(owner: Any, name: str, before: Callable[..., None]) -> None:
    """Call `before` before every call of a function."""
    function = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        before(*arguments, **options)
        return function(*arguments, **options)

    setattr(owner, name, wrapped)


def once(fault: Fault) -> Callable[..., None]:
    """Strike at the first call alone."""
    left = [fault]
    return lambda *_, **__: left.pop().strike() if left else None


def in_collective(fault: Fault) -> None:
    """Sleep within a sum over the world, in a step."""
    step = [-1]
    wrap(Engine, "feed", lambda engine, given: step.__setitem__(0, given.step))
    wrap(DistributedGroup, "all_reduce", lambda *_, **__: fault.strike() if step[0] == fault.step else None)


def flipped_bit(fault: Fault) -> None:
    """Flip the lowest bit of one weight before the comparison of replicas."""

    def flip(guards: Guards, replica: Replica, step: int) -> None:
        if step == fault.step:
            print(MARK, flush=True)
            replica.states()[0].master.view(torch.int32)[0] ^= 1

    wrap(Guards, "compare", flip)


def spoil_batches(first: int, stop: float, patch: pytest.MonkeyPatch) -> None:
    """Fill batches that start from sample `first` and before `stop` with the rarest token: their loss jumps up."""
    load = BatchLoader.load

    def loaded(loader: BatchLoader, consumed: int) -> StepBatch:
        batch = load(loader, consumed)
        if consumed == first:
            print(MARK, flush=True)
        for context in batch.contexts if first <= consumed < stop else ():
            if context.labels is not None:
                context.labels.fill_(60)
        return batch

    patch.setattr(BatchLoader, "load", loaded)


def in_compile(fault: Fault) -> None:
    """As torch.compile hands its first graph to the compiler."""
    from torch._inductor import compile_fx  # takes a second

    wrap(compile_fx, "compile_fx", once(fault))


def late_start(fault: Fault) -> None:
    """Long before anything else."""
    print(MARK, flush=True)
    time.sleep(LATE_SECONDS)


def during_training(fault: Fault) -> None:
    """Strike while a save is written during the next step, which waits for the fault."""
    saves, fed, struck = threading.Event(), threading.Event(), threading.Event()

    def feed(engine: Engine, given: StepInput) -> None:
        if saves.is_set() and not struck.is_set():
            fed.set()
            struck.wait()

    def write(*_: Any, **__: Any) -> None:
        if not struck.is_set():
            fed.wait()
            fault.strike()
            struck.set()

    wrap(background.BackgroundSaver, "start", lambda *_, **__: saves.set())
    wrap(background, "write_rank_file", write)
    wrap(Engine, "feed", feed)


PLACES: dict[str, Callable[[Fault], None]] = {
    "start": late_start,
    "process groups": lambda fault: wrap(dist, "init_process_group", once(fault)),
    "model": lambda fault: wrap(pretrain, "Replica", once(fault)),
    "compile": in_compile,
    "evaluation": lambda fault: wrap(Evaluator, "run", once(fault)),
    "save": lambda fault: wrap(
        importlib.import_module("megapipe.checkpoint.save_and_load"), "write_rank_file", once(fault)
    ),
    "save during training": during_training,
    "step": lambda fault: wrap(Engine, "feed", lambda _, given: fault.strike() if given.step == fault.step else None),
    "collective": in_collective,
    "weights": flipped_bit,
    "batches": lambda fault: spoil_batches(fault.step, math.inf, pytest.MonkeyPatch()),
}

if __name__ == "__main__":
    if VARIABLE in os.environ:
        fault = Fault(**json.loads(os.environ[VARIABLE]))
        if fault.rank is None or fault.rank == int(os.environ.get("RANK", "0")):
            PLACES[fault.place](fault)
    end_after(lambda: run_program(PretrainConfig, sys.argv[1:]))
