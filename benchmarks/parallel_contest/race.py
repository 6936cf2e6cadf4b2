"""All contestants in one world of processes, taking turns."""

import copy
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gloo_ranks import in_ranks

from megapipe.config.mesh_shape import MeshShape
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh

from .ours import LAYERED_STAGES, STAGES, megapipe, plain_copy
from .peers import alone, ddp, fsdp
from .setting import SIZES, Setting, Step

WARM_UP = 2
TOLERANCE = 1e-4
"""How far contestants' losses of one step may be apart, relative."""
OURS = "megapipe"
ALONE = "no replicas"
"""Ends the names of contestants that compute a rank's share alone: what is left without communication."""


@dataclass(frozen=True)
class Figure:
    """Seconds of a step, the slower rank's: median, and what a quarter of the steps stayed below and above.

    loss: of the last step, over all ranks.
    """

    name: str
    seconds: float
    lower_quartile: float
    upper_quartile: float
    loss: float


def race(size: str, replicas: int, repeats: int) -> list[Figure]:
    """Start the ranks, run, and return every contestant's figure."""
    return in_ranks(replicas, _measured, replicas, size, repeats)


def contestants(mesh: Mesh, setting: Setting) -> dict[str, Step]:
    """Name -> this rank's step. All start from the same weights."""
    rank, replicas = mesh.rank, mesh.world_size
    by_itself = Mesh(MeshShape({}), 0, torch.device("cpu"), lambda name, partition: None)
    steps: dict[str, Step] = {}
    steps[f"{OURS}, {ALONE}"], whole = megapipe(by_itself, setting, rank)
    plain = plain_copy(whole, setting)
    for stage in STAGES:
        steps[f"{OURS}, ZeRO {stage}" if stage else OURS] = megapipe(mesh, setting, rank, stage)[0]
    for stage in LAYERED_STAGES:
        steps[f"{OURS}, ZeRO {stage}, layered"] = megapipe(mesh, setting, rank, stage, layered=True)[0]
    steps["DDP"] = ddp(copy.deepcopy(plain), setting, rank)
    steps["FSDP2"] = fsdp(copy.deepcopy(plain), setting, rank, True, replicas)
    steps["FSDP2, weights kept"] = fsdp(copy.deepcopy(plain), setting, rank, False, replicas)
    steps[f"plain torch, {ALONE}"] = alone(plain, setting, rank)
    return steps


def num_parameters(size: str) -> int:
    """Of the model that is trained."""
    from plain_gpt import PlainGpt

    return sum(parameter.numel() for parameter in PlainGpt(SIZES[size].shape).parameters())


def in_turns(steps: Mapping[str, Step], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds of the slower rank, loss over all ranks) by contestant; the order turns from round to round, and rounds
    of warm-up are left out."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    for round_ in range(WARM_UP + repeats):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            loss = steps[name]()
            seconds = time.perf_counter() - start
            both = torch.tensor([[seconds, loss]], dtype=torch.float64)
            everyone = [torch.zeros_like(both) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, both)
            ranks = torch.cat(everyone)
            if round_ >= WARM_UP:
                found[name].append((float(ranks[:, 0].max()), float(ranks[:, 1].mean())))
    return found


def check_losses(figures: Mapping[str, list[tuple[float, float]]]) -> None:
    """Raise RuntimeError where contestants with replicas do not train alike."""
    curves = {name: [loss for _, loss in steps] for name, steps in figures.items() if not name.endswith(ALONE)}
    expected = curves[OURS]
    for name, curve in curves.items():
        for step, (loss, wanted) in enumerate(zip(curve, expected, strict=True)):
            if abs(loss - wanted) > TOLERANCE * wanted:
                raise RuntimeError(f"{name} is at loss {loss:.6f} in step {step}, and {OURS} at {wanted:.6f}")


def _measured(rank: int, replicas: int, size: str, repeats: int) -> list[Figure]:
    mesh = connected_mesh(MeshShape({"data": replicas}), torch.device("cpu"))
    steps = contestants(mesh, SIZES[size])
    found = in_turns(steps, repeats)
    check_losses(found)
    return [_figure(name, values) for name, values in found.items()]


def _figure(name: str, values: list[tuple[float, float]]) -> Figure:
    seconds = [each for each, _ in values]
    quarters = statistics.quantiles(seconds, n=4)
    return Figure(name, statistics.median(seconds), quarters[0], quarters[2], values[-1][1])
