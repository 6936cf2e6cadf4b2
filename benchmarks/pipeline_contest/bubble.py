"""2bw's claim, measured: time for a micro-batch in a pipeline that stays full, over that of one rank alone."""

import statistics
import time
from dataclasses import dataclass, replace

import torch

from megapipe.config.mesh_shape import MeshShape, Partition
from megapipe.engine.transfers import LinkPool
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from pipeline_contest.ours import Feed, sleeping
from pipeline_contest.setting import Setting


@dataclass(frozen=True)
class Bubble:
    """Milliseconds for a micro-batch, medians over the repeats: in the pipeline on its slowest rank, and on one rank
    alone; and both again without what a rank overslept."""

    num_ranks: int
    num_microbatches: int
    milliseconds: float
    pipeline: float
    alone: float
    pipeline_awake: float
    alone_awake: float

    @property
    def ratio(self) -> float:
        return self.pipeline / self.alone


def measure_bubble(setting: Setting, pool: LinkPool, batches: int = 8, repeats: int = 3) -> Bubble:
    """A collective call. The first two steps fill the pipeline and are not counted."""
    world = setting.mesh.world
    together = sleeping(setting, build("2bw", setting.num_ranks, setting.num_microbatches), pool)
    lonely = replace(setting, mesh=Mesh(MeshShape({}), 0, torch.device("cpu"), _no_group))
    alone = sleeping(lonely, build("1f1b", 1, setting.num_microbatches), pool) if setting.rank == 0 else None
    rows = []
    for _ in range(repeats):
        world.barrier()
        together.feed()
        together.feed()
        mine = _feed(setting, together, batches)
        together.drain()
        slowest = max(world.all_gather_object(mine))
        single = world.all_gather_object(_feed(setting, alone, batches) if alone is not None else None)[0]
        rows.append((slowest[0], single[0], slowest[0] - slowest[1], single[0] - single[1]))
    scale = 1e3 / (batches * setting.num_microbatches)
    medians = (statistics.median(column) * scale for column in zip(*rows, strict=True))
    return Bubble(setting.num_ranks, setting.num_microbatches, setting.seconds * 1e3, *medians)


def _feed(setting: Setting, feed: Feed, batches: int) -> tuple[float, float]:
    """Seconds, and seconds overslept, of some steps."""
    setting.meter.reset()
    began = time.perf_counter()
    for _ in range(batches):
        feed.feed()
    return time.perf_counter() - began, setting.meter.late


def _no_group(name: str, partition: Partition) -> None:
    raise ValueError(f"one rank alone has no {name} group {partition}")
