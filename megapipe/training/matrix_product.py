"""How fast this device multiplies matrices, measured in a blink: for `precision: auto` and MFU without a table."""

import time

import torch

SIZES = {"cpu": 512, "cuda": 4096}
"""Rows and columns: as large as a micro-batch's products are, and over in milliseconds without bf16 instructions."""
REPEATS = 8


def product_size(device: torch.device) -> int:
    """Rows and columns of the matrices that `product_seconds` multiplies on this kind of device."""
    return SIZES[device.type]


def product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of one product of two square matrices of `product_size`, the best of several after a warm-up."""
    size = product_size(device)
    # Random, because a GPU draws less power on constant matrices and then runs at a higher clock.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, dtype=dtype, device=device) for _ in range(2))
    times = []
    for _ in range(1 + REPEATS):
        _wait_for(device)
        start = time.perf_counter()
        left @ right
        _wait_for(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def product_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of that product: multiplications and additions counted apart."""
    return 2.0 * product_size(device) ** 3 / product_seconds(dtype, device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
