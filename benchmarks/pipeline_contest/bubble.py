"""Measure the claim of 2bw: the time of a micro-batch in a pipeline that stays full, divided by that on a single
rank."""

import statistics
import time
from dataclasses import dataclass, replace

import torch

from megapipe.config.parallel import MeshShape, Partition
from megapipe.engine.transfers import LinkPool
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from pipeline_contest.ours import Feed, sleeping
from pipeline_contest.setting import Setting


@dataclass(frozen=True)
class Bubble:
    """Milliseconds per micro-batch, medians over the repeats.

    milliseconds: forward of a stage. pipeline: in the pipeline, on its slowest rank. alone: on a single rank.
    pipeline_awake, alone_awake: the same without the time that a rank overslept.

    pipeline_processor, alone_processor: all processor time of the thread, on the rank with the most in the pipeline,
    and on a single rank. Computation waits for it, so no pipeline is faster than `bound` allows, on any number of
    cores.
    """

    num_ranks: int
    num_microbatches: int
    milliseconds: float
    pipeline: float
    alone: float
    pipeline_awake: float
    alone_awake: float
    pipeline_processor: float
    alone_processor: float

    @property
    def ratio(self) -> float:
        return self.pipeline / self.alone

    @property
    def bound(self) -> float:
        """Ratio if ranks slept exactly, never waited, and each had its own core."""
        slept = 3 * self.milliseconds
        return (slept + self.pipeline_processor) / (slept + self.alone_processor)


def measure_bubble(setting: Setting, pool: LinkPool, batches: int = 8, repeats: int = 3) -> Bubble:
    """Measure 2bw and a single rank. A collective call.

    The first two steps fill the pipeline and are not counted. batches: number of counted steps.
    """
    world = setting.mesh.world
    together = sleeping(setting, build("2bw", setting.num_ranks, setting.num_microbatches), pool)
    single_setting = replace(setting, mesh=Mesh(MeshShape({}), 0, torch.device("cpu"), _no_group))
    alone = sleeping(single_setting, build("1f1b", 1, setting.num_microbatches), pool) if setting.rank == 0 else None
    rows = []
    for _ in range(repeats):
        world.barrier()
        together.feed()
        together.feed()
        mine = _feed(setting, together, batches)
        together.drain()
        everyone = world.all_gather_object(mine)
        slowest, busiest = max(everyone), max(each[2] for each in everyone)
        single = world.all_gather_object(_feed(setting, alone, batches) if alone is not None else None)[0]
        rows.append((slowest[0], single[0], slowest[0] - slowest[1], single[0] - single[1], busiest, single[2]))
    scale = 1e3 / (batches * setting.num_microbatches)
    medians = (statistics.median(column) * scale for column in zip(*rows, strict=True))
    return Bubble(setting.num_ranks, setting.num_microbatches, setting.seconds * 1e3, *medians)


def _feed(setting: Setting, feed: Feed, batches: int) -> tuple[float, float, float]:
    """Run `batches` steps; return their seconds, overslept seconds, and processor seconds."""
    setting.meter.reset()
    start, processor = time.perf_counter(), time.thread_time()
    for _ in range(batches):
        feed.feed()
    return time.perf_counter() - start, setting.meter.late, time.thread_time() - processor


def _no_group(name: str, partition: Partition) -> None:
    raise ValueError(f"one rank alone has no {name} group {partition}")
