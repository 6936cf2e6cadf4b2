"""The benchmark's clock counts what the device does, and no more."""

import time

import pytest
import torch

from benchmarks.kernel_speed_contest.clock import Clock, measured_ceiling

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def test_the_hosts_time_does_not_count() -> None:
    x = torch.ones(1024, device=CUDA)

    def slow_to_launch() -> torch.Tensor:
        time.sleep(2e-3)
        return x + 1

    assert Clock(CUDA).alone(slow_to_launch) < 1e-3


def test_the_devices_time_counts() -> None:
    seconds = Clock(CUDA).alone(lambda: torch.cuda._sleep(20_000_000))
    assert 5e-3 < seconds < 0.1


def test_small_inputs_are_copied_until_no_cache_holds_them() -> None:
    clock = Clock(CUDA)
    cache = torch.cuda.get_device_properties(CUDA).L2_cache_size
    assert clock.copies(cache) == 4
    assert clock.copies(100 * cache) == 1
    assert clock.copies(1) == 32


def test_the_ceiling_is_that_of_a_gpu() -> None:
    ceiling = measured_ceiling(Clock(CUDA))
    assert 5e10 < ceiling.copy < 2e13
    assert 1e12 < ceiling.product < 1e16
