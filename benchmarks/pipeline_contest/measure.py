"""Timing one step of every contestant from a common start, in turns."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megapipe.parallel.groups import Group
from pipeline_contest.setting import Step
from pipeline_contest.sleeping import Meter

_LEAD_SECONDS = 0.02


@dataclass(frozen=True)
class Sample:
    """One step on all ranks. seconds: from the common start to the end of the last rank. late: what a rank overslept,
    mean over ranks. processor: processor seconds of a rank's thread outside of stage callables, by rank."""

    seconds: float
    late: float
    processor: tuple[float, ...]


def timed(world: Group, meter: Meter, step: Callable[[], object]) -> Sample:
    """Run a step. A collective call; the clock is one for all processes of a host (CLOCK_MONOTONIC)."""
    start = torch.tensor([time.perf_counter() + _LEAD_SECONDS], dtype=torch.float64)
    world.barrier()
    world.broadcast(start, 0)
    begin = start.item()
    time.sleep(max(0.0, begin - time.perf_counter()))
    meter.reset()
    processor = time.thread_time()
    step()
    end = time.perf_counter()
    processor = time.thread_time() - processor - meter.processor
    ends, lates, processors = zip(*world.all_gather_object((end, meter.late, processor)), strict=True)
    return Sample(max(ends) - begin, sum(lates) / len(lates), tuple(processors))


def in_turns(
    world: Group, meter: Meter, steps: Mapping[str, Step], repeats: int, warmups: int = 2
) -> dict[str, list[Sample]]:
    """`repeats` samples of every contestant, taking turns, every other round in reverse, after as many warm-ups."""
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    for turn in range(warmups + repeats):
        names = list(steps) if turn % 2 else list(steps)[::-1]
        for name in names:
            sample = timed(world, meter, steps[name])
            if turn >= warmups:
                samples[name].append(sample)
    return samples
