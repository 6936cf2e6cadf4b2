"""What ranks cost each other: the same work alone and side by side, and their collectives."""

import time
from dataclasses import dataclass
from statistics import median

import torch

from megapipe.calibration.collectives import fitted, measured_collectives, measured_sends
from megapipe.calibration.layers import Cell, LayerRun
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.measured import MeasuredCollective, Transport
from megapipe.parallel.links import LinkKind
from megapipe.parallel.mesh import Mesh


@dataclass(frozen=True)
class Together:
    """Of `ranks` ranks at once. factor: how much longer a step takes than alone."""

    ranks: int
    factor: float
    collectives: tuple[MeasuredCollective, ...]


def measure_together(mesh: Mesh, config: PretrainConfig, micro_size: int, steps: int) -> Together:
    """A collective call of all ranks of a machine; each trains a model of its own."""
    run = LayerRun(config, Cell(1, 1, micro_size), mesh.device)
    run.step()
    factor = _factor(mesh, run, steps)
    over: Transport = "nccl" if mesh.device.type == "cuda" else "gloo"
    rows = [fitted(name, mesh.world_size, over, each) for name, each in measured_collectives(mesh).items()]
    if mesh.world_size == 2:
        kinds: tuple[LinkKind, ...] = ("nccl",) if over == "nccl" else _link_kinds(config)
        sends = measured_sends(mesh, kinds)
        rows += [fitted("send", 2, kind, each) for kind, each in sends.items()]  # type: ignore[arg-type]
    return Together(mesh.world_size, factor, tuple(rows))


def _factor(mesh: Mesh, run: LayerRun, steps: int) -> float:
    """Time of a step beside the others over its time while they wait, mean over the ranks, at least 1.

    Both are measured in turns, so that a change of the machine's load meets both.
    """
    alone, together = [], []
    for _ in range(steps):
        mesh.world.barrier()
        if mesh.rank == 0:
            alone.append(run.step())
        mesh.world.barrier()
        begin = time.perf_counter()
        run.step()
        run.step()  # ranks do not begin and end at the same moment: the longer they run, the less that counts
        together.append((time.perf_counter() - begin) / 2)
    found = mesh.world.all_gather_object((median(alone) if alone else None, median(together)))
    by_itself = next(each for each, _ in found if each is not None)
    return max(1.0, sum(beside for _, beside in found) / len(found) / by_itself)


def _link_kinds(config: PretrainConfig) -> tuple[LinkKind, ...]:
    """Links between processes of one host, what the run would take first."""
    return ("gloo", "shared_memory") if config.parallel.links == "gloo" else ("shared_memory", "gloo")


def has_devices(device_type: str, ranks: int) -> bool:
    """Whether so many ranks can run at once: on CPUs as many as asked for, which then share the cores."""
    return device_type == "cpu" or ranks <= torch.cuda.device_count()
