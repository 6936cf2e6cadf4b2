"""Time steps from a common start on all ranks; contestants take turns."""

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
    """One step on all ranks.

    seconds: time from the common start to the end of the last rank. late: overslept seconds, mean over ranks.
    processor: processor seconds of each rank's thread outside of stage callables.
    """

    seconds: float
    late: float
    processor: tuple[float, ...]


def timed(world: Group, meter: Meter, step: Callable[[], object]) -> Sample:
    """Run a step and return its sample. A collective call. All processes of a host read the same clock
    (CLOCK_MONOTONIC)."""
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
    """Return `repeats` samples of every contestant, after `warmups` rounds of warm-up.

    The contestants take turns; every second round has the reverse order.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    for turn in range(warmups + repeats):
        names = list(steps) if turn % 2 else list(steps)[::-1]
        for name in names:
            sample = timed(world, meter, steps[name])
            if turn >= warmups:
                samples[name].append(sample)
    return samples
