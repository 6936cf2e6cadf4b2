"""When things happen: on the host, on a device, and on another host."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from megapipe.parallel.groups import Group

ROUNDS: Final = 32
"""Barriers that an estimate of two hosts' clocks takes; the first one, which starts connections, does not count."""


class Clock(Protocol):
    """Marks moments as they pass; their times are read later."""

    def mark(self) -> Any:
        """This moment."""

    def nanoseconds(self, mark: Any) -> int:
        """When a mark was made, by time.perf_counter_ns."""


class HostClock:
    """Moments of the host: what a rank does on a CPU."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def nanoseconds(self, mark: int) -> int:
        return mark


class DeviceClock:
    """Moments of the current stream of a GPU: when the device comes to them, not when the host launched them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.mark()
        torch.cuda.synchronize(device)
        self._origin_nanoseconds = time.perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def nanoseconds(self, mark: torch.cuda.Event) -> int:
        mark.synchronize()
        return self._origin_nanoseconds + round(self._origin.elapsed_time(mark) * 1e6)


@dataclass(frozen=True)
class ClockOffset:
    """How far this rank's clock is ahead of rank 0's, in nanoseconds, give or take `error`.

    leads_host: this is the first rank on its host.
    """

    nanoseconds: int
    error: int
    leads_host: bool


def this_host() -> str:
    """A name that ranks share where they share time.perf_counter_ns: the host, since it was started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def clock_offset(
    world: Group, host: str | None = None, clock: Callable[[], int] = time.perf_counter_ns
) -> ClockOffset:
    """Compare the hosts' clocks. A collective call over all ranks; none of them may have other work of the group open.

    Ranks of one host read one clock. Between hosts all ranks leave barriers together: the median difference of when
    the first rank of each host did is their offset, and half of what the middle half of them spans is the error.
    """
    host = this_host() if host is None else host
    hosts = world.all_gather_object(host)
    leader = hosts.index(host)
    leads = leader == world.rank
    if len(set(hosts)) == 1:
        return ClockOffset(0, 0, leads)
    left = []
    for _ in range(ROUNDS + 1):
        world.barrier()
        left.append(clock())
    everyone = world.all_gather_object(left[1:])
    differences = [mine - first for mine, first in zip(everyone[leader], everyone[0], strict=True)]
    lower, middle, upper = statistics.quantiles(differences, n=4)
    return ClockOffset(round(middle), round((upper - lower) / 2), leads)
