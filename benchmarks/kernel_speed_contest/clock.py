"""Time of calls on a device, and the highest measured speed of the device."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .case import Work

CYCLES_PER_SECOND = 2.0e9
"""Higher than the clock of any GPU, so that a sleep in cycles lasts at least as long as intended."""

LONGEST_SLEEP = 0.2
CACHES = 4
MOST_COPIES = 32
COPY_BYTES = 1 << 30
PRODUCT_SIZE = 8192
REPEATS = 9


class Clock:
    """Measures the time of calls on the device, without the host's time for launching them.

    The host enqueues all calls of a round while the device sleeps. Results are kept until the round is over, so that
    no call finds its output's memory in the cache.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sleep: dict[int, float] = {}

    def copies(self, num_bytes: float) -> int:
        """Return how many sets of inputs a round needs, so that none of a set is still in the cache when it is used
        again."""
        if self.device.type != "cuda":
            return 2
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(MOST_COPIES, max(1, math.ceil(CACHES * cache / num_bytes)))

    def warm_up(self, calls: Sequence[Callable[[], object]], key: int) -> None:
        """Compile what is compiled on the first call, and measure how long the host takes to enqueue a round."""
        calls[0]()
        self._synchronize()
        start = time.perf_counter()
        kept = [call() for call in calls]
        self._sleep[key] = min(2 * (time.perf_counter() - start), LONGEST_SLEEP)
        self._synchronize()
        del kept

    def seconds(self, calls: Sequence[Callable[[], object]], key: int) -> float:
        """Return the mean seconds of a call in one round. key: the key with which the calls were warmed up."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            kept = [call() for call in calls]
            return (time.perf_counter() - start) / len(kept)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(int(self._sleep[key] * CYCLES_PER_SECOND))
        begin.record()
        kept = [call() for call in calls]
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / len(kept)

    def alone(self, call: Callable[[], object]) -> float:
        """Return the seconds of a single call, the median over rounds."""
        self.warm_up([call], -1)
        return statistics.median(self.seconds([call], -1) for _ in range(REPEATS))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Ceiling:
    """Measured speeds of the device.

    copy: bytes/s of torch's copy, read plus written. product: FLOP/s of a matrix product.
    """

    copy: float
    product: float

    def seconds(self, work: Work) -> float:
        """Return the least time for some work at these speeds."""
        return max(work.bytes / self.copy, work.flops / self.product)

    def __str__(self) -> str:
        return f"copy {self.copy / 1e9:,.4g} GB/s, bf16 product {self.product / 1e12:,.3g} TFLOP/s"


def measured_ceiling(clock: Clock) -> Ceiling:
    """Measure a copy of 1 GiB and a product of two bf16 matrices of 8192 x 8192; on a CPU, both are much smaller."""
    large = clock.device.type == "cuda"
    count, size = (COPY_BYTES, PRODUCT_SIZE) if large else (1 << 20, 128)
    source = torch.ones(count, dtype=torch.uint8, device=clock.device)
    goal = torch.empty_like(source)
    copy = 2 * count / clock.alone(lambda: goal.copy_(source))
    factor = torch.randn(size, size, dtype=torch.bfloat16, device=clock.device)
    return Ceiling(copy, 2.0 * size**3 / clock.alone(lambda: factor @ factor))
