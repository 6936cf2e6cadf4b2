"""Published rates of matrix products, and what a device's `half_size` and `launch` are by them.

Rows of training speed hardly tell how much slower a small product is, so that both are taken from here and fitted to
nothing else. All are cuBLAS, of square matrices: size against TFLOP/s.
"""

from collections.abc import Mapping

import numpy as np

from megapipe.layout.hardware.description import Device, Efficiency
from megapipe.layout.hardware.roofline import Product, fit_efficiency

A100_FP16 = {
    512: 23.831273, 640: 39.384616, 768: 63.195428, 896: 78.051553, 1024: 99.864382, 1152: 135.726544,
    1280: 157.538463, 1408: 155.765024, 1536: 181.484314, 1664: 179.978245, 1792: 175.616000, 1920: 209.454544,
    2048: 204.600198, 2176: 201.236485, 2304: 248.831991, 2432: 222.971938, 2560: 246.375951, 2688: 219.266228,
    2816: 238.329010, 2944: 256.886772, 3072: 239.928400, 3200: 255.999988, 3328: 239.970975, 3456: 258.402470,
    3584: 265.237152, 3712: 250.369276, 3840: 250.775504, 3968: 248.521248, 4096: 264.208112,
}  # fmt: skip
"""One A100-SXM4-40GB, one call at a time: github.com/xanderdunn/fused-gelu-testing, README of early 2023, which shows
what the tutorial of triton-lang.org on matrix products prints. Its sizes 256 and 384 are left out: 9.2 and 11.3
microseconds, all launch."""
H100_BF16 = {4096: 716.0, 6144: 741.1, 8192: 797.8}
"""One H100 SXM, the mean of calls in a row: github.com/pranjalssh/fast.cu, README (the first size in its later, the
others in its earlier version)."""


def law_of(device: Device, dtype: str, rates: Mapping[int, float]) -> Efficiency:
    """ceiling, half_size and launch by products that were measured one at a time. rates: TFLOP/s by size."""
    products = [Product(size, size, size, _seconds(size, rate)) for size, rate in rates.items()]
    return fit_efficiency(device, dtype, products)


def half_size_of(rates: Mapping[int, float], launch: float) -> float:
    """half_size by products of three sizes or so, their launch being known. rates: TFLOP/s by size."""
    slope, endless = _third_roots(rates, launch)
    return slope / endless


def ceiling_of(device: Device, dtype: str, rates: Mapping[int, float], launch: float) -> float:
    """ceiling by the same products: the share of the peak that an endless one would reach."""
    _, endless = _third_roots(rates, launch)
    return endless**-3 / device.peak(dtype)


def _third_roots(rates: Mapping[int, float], launch: float) -> tuple[float, float]:
    """Slope and start of the line of least squares through the third roots of seconds over FLOPs against 1 / size.

    By the law the start is that of an endless product, and the slope `half_size` times it.
    """
    sizes = np.array(list(rates), dtype=np.float64)
    seconds = np.array([_seconds(size, rate) for size, rate in rates.items()]) - launch
    slope, start = np.polyfit(1.0 / sizes, (seconds / (2.0 * sizes**3)) ** (1.0 / 3.0), 1)
    return float(slope), float(start)


def _seconds(size: int, rate: float) -> float:
    return 2.0 * size**3 / (rate * 1e12)
