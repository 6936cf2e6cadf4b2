"""What a device can do: rates of matrix products and of its memory, and how much memory it has."""

import os
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from megapipe.layout.hardware.roofline import Product
from megapipe.training.assemble import DTYPES

PRODUCTS = ((64, 64, 64), (256, 256, 256), (256, 256, 1024), (1024, 256, 256), (1024, 256, 1024), (512, 512, 512))
"""Rows, inner, columns on a CPU; on a GPU each eight times that."""
LARGE_PRODUCT = 1024
GPU_SCALE = 8
COPIED = 2**26
"""Bytes of a copy that is timed: beyond most caches."""
REPEATS = 9


def measured_products(precision: str, device: torch.device) -> list[Product]:
    """Median times of matrix products of several sizes."""
    scale = GPU_SCALE if device.type == "cuda" else 1
    sizes = [*PRODUCTS, (LARGE_PRODUCT,) * 3]
    return [_product([size * scale for size in each], DTYPES[precision], device) for each in sizes]


def measured_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy inside the device's memory reads and writes together."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * COPIED / _seconds(lambda: target.copy_(source), device)


def memory_bytes(device: torch.device, ranks: int) -> int:
    """Of the device; ranks on the processors of one machine share what it has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks


def device_name(device: torch.device) -> str:
    """Of a GPU its own; of a CPU `core`, since a rank computes on one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "core"


def _product(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Product:
    rows, inner, columns = sizes
    # Random, because a GPU draws less power on constant matrices and then runs at a higher clock.
    generator = torch.Generator(device).manual_seed(0)
    left: Tensor = torch.randn(rows, inner, generator=generator, device=device).to(dtype)
    right: Tensor = torch.randn(inner, columns, generator=generator, device=device).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    return Product(rows, inner, columns, _seconds(lambda: torch.mm(left, right, out=out), device))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of several runs behind a warm-up."""
    times = []
    for _ in range(REPEATS + 2):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
