"""A race in which all contestants take turns: megapipe in one world of processes, torch in another."""

import copy
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import joined

from megapipe.config.parallel import MeshShape
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.training.device import keep_freed_memory
from megapipe.training.loop.replica import Replica

from .ours import LAYERED_STAGES, STAGES, megapipe, plain_copy
from .peers import alone, ddp, fsdp
from .setting import SIZES, Setting, Step

Build = Callable[[Mesh, Setting], dict[str, Step]]

WARM_UP = 2
TOLERANCE = 1e-4
"""Largest relative difference between the contestants' losses of a step."""
OURS = "megapipe"
ALONE = "no replicas"
"""End of the names of contestants that compute one rank's part of the batch: a step without communication."""


@dataclass(frozen=True)
class Figure:
    """Seconds of a step on the slower rank: median and quartiles over the steps.

    loss: loss of the last step, over all ranks.
    """

    name: str
    seconds: float
    lower_quartile: float
    upper_quartile: float
    loss: float


def race(size: str, replicas: int, repeats: int) -> list[Figure]:
    """Start the ranks, run, and return every contestant's figure."""
    with tempfile.TemporaryDirectory() as folder:
        worlds = [World(build, replicas, Path(folder) / str(number), size) for number, build in enumerate(WORLDS)]
        try:
            steps = in_turns(worlds, repeats)
        finally:
            for world in worlds:
                world.end()
    check_losses(steps)
    return [_figure(name, values) for name, values in steps.items()]


class World:
    """The processes of some contestants, as their users would start them. Changes that a contestant makes to its
    process, for example to memory allocation, do not affect contestants in another world.

    build: creates the contestants of a rank. store: file with which the ranks find each other.
    """

    def __init__(self, build: Build, replicas: int, store: Path, size: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(replicas):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_rank, args=(build, rank, replicas, str(store), size, child_end))
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._ranks.append(process)
        self.names: list[str] = self._answers()[0]

    def step(self, name: str) -> tuple[float, float]:
        """Run a step of one contestant; return the seconds of the slower rank, and the loss over all ranks."""
        for pipe in self._pipes:
            pipe.send(name)
        answers = self._answers()
        return max(seconds for seconds, _ in answers), statistics.mean(loss for _, loss in answers)

    def end(self) -> None:
        """Ask the ranks to end, and kill those that do not."""
        for pipe in self._pipes:  # all of them first: each rank waits for the others before it ends
            with suppress(BrokenPipeError):
                pipe.send(None)
        for rank in self._ranks:
            rank.join(timeout=60.0)
            rank.kill()

    def _answers(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            raise RuntimeError("a rank ended early; its error is printed above") from None


def our_contestants(mesh: Mesh, setting: Setting) -> dict[str, Step]:
    """Return this rank's steps of megapipe by name, for every stage of ZeRO, as the trainer runs them."""
    keep_freed_memory()
    steps = {f"{OURS}, {ALONE}": _by_itself(setting, mesh.rank)[0]}
    for stage in STAGES:
        steps[f"{OURS}, ZeRO {stage}" if stage else OURS] = megapipe(mesh, setting, mesh.rank, stage)[0]
    for stage in LAYERED_STAGES:
        steps[f"{OURS}, ZeRO {stage}, layered"] = megapipe(mesh, setting, mesh.rank, stage, layered=True)[0]
    return steps


def peers(mesh: Mesh, setting: Setting) -> dict[str, Step]:
    """Return this rank's steps of torch's data parallelism by name. All start from megapipe's weights."""
    rank, replicas = mesh.rank, mesh.world_size
    plain = plain_copy(_by_itself(setting, rank)[1], setting)
    return {
        "DDP": ddp(copy.deepcopy(plain), setting, rank),
        "FSDP2": fsdp(copy.deepcopy(plain), setting, rank, True, replicas),
        "FSDP2, weights kept": fsdp(copy.deepcopy(plain), setting, rank, False, replicas),
        f"plain torch, {ALONE}": alone(plain, setting, rank),
    }


WORLDS: tuple[Build, ...] = (our_contestants, peers)


def _by_itself(setting: Setting, rank: int) -> tuple[Step, Replica]:
    """Return megapipe's step and replica for one rank's part of the batch, without communication."""
    return megapipe(Mesh(MeshShape({}), 0, torch.device("cpu"), lambda name, partition: None), setting, rank)


def num_parameters(size: str) -> int:
    """Return the number of parameters of the model. size: key of SIZES."""
    from plain_gpt import PlainGpt

    return sum(parameter.numel() for parameter in PlainGpt(SIZES[size].shape).parameters())


def in_turns(worlds: Sequence[World], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return, for each contestant, (seconds of the slower rank, loss over all ranks) of every step.

    The contestants change their order from round to round. Rounds of warm-up are left out.
    """
    world_of = {name: world for world in worlds for name in world.names}
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in world_of}
    names = list(world_of)
    for round_ in range(WARM_UP + repeats):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            measured = world_of[name].step(name)
            if round_ >= WARM_UP:
                steps[name].append(measured)
    return steps


def check_losses(figures: Mapping[str, list[tuple[float, float]]]) -> None:
    """Raise RuntimeError if the losses of contestants with replicas differ."""
    curves = {name: [loss for _, loss in steps] for name, steps in figures.items() if not name.endswith(ALONE)}
    expected = curves[OURS]
    for name, curve in curves.items():
        for step, (loss, expected_loss) in enumerate(zip(curve, expected, strict=True)):
            if abs(loss - expected_loss) > TOLERANCE * expected_loss:
                raise RuntimeError(f"{name} is at loss {loss:.6f} in step {step}, and {OURS} at {expected_loss:.6f}")


def _rank(build: Build, rank: int, replicas: int, store: str, size: str, pipe: Connection) -> None:
    with joined(rank, replicas, store):
        steps = build(connected_mesh(MeshShape({"data": replicas}), torch.device("cpu")), SIZES[size])
        pipe.send(list(steps))
        while (name := pipe.recv()) is not None:
            dist.barrier()
            start = time.perf_counter()
            loss = steps[name]()
            pipe.send((time.perf_counter() - start, loss))


def _figure(name: str, values: list[tuple[float, float]]) -> Figure:
    seconds = [each for each, _ in values]
    quarters = statistics.quantiles(seconds, n=4)
    return Figure(name, statistics.median(seconds), quarters[0], quarters[2], values[-1][1])
