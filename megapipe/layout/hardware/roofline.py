"""Times of kernels by the roofline model: arithmetic and memory traffic overlap, and the slower one counts.

Williams, Waterman and Patterson 2009 (doi 10.1145/1498765.1498785). The rate of a matrix product depends on its sizes
by the law of `Efficiency`, as if each dimension were longer by `half_size`; the three parameters of a device come from
its own measured products (`fit_efficiency`).

`peak_flops` has the peak arithmetic rates of known GPUs: the denominator of MFU.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megapipe.config import ConfigError
from megapipe.layout.hardware.description import DTYPE_BYTES, Device, Efficiency
from megapipe.spec.ops import Precision


@dataclass(frozen=True)
class KernelTime:
    """Seconds of one kernel: for arithmetic, for memory traffic, and for its launch."""

    compute: float
    memory: float
    launch: float

    @property
    def seconds(self) -> float:
        """The slower of arithmetic and traffic, plus the launch."""
        return max(self.compute, self.memory) + self.launch


class Product(NamedTuple):
    """A measured matrix product [rows, inner] by [inner, columns], `batch` of them in one kernel, and its seconds."""

    rows: int
    inner: int
    columns: int
    seconds: float
    batch: int = 1


def matrix_product_time(
    device: Device, rows: int, inner: int, columns: int, dtype: str, batch: int = 1, out_bytes: int | None = None
) -> KernelTime:
    """Return the time of `batch` products of [rows, inner] by [inner, columns] in one kernel.

    out_bytes: bytes of an element of the result, by default as for the inputs; 4 if sums stay in fp32.

    Raises:
        ConfigError: the device has no peak for `dtype`. ValueError: a size below 1.
    """
    for name, size in {"rows": rows, "inner": inner, "columns": columns, "batch": batch}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, but sizes of a product must be at least 1; leave empty products out")
    efficiency = device.efficiency
    padded = (rows + efficiency.half_size) * (inner + efficiency.half_size) * (columns + efficiency.half_size)
    peak, size = device.peak(dtype), DTYPE_BYTES[dtype]
    moved = size * (rows * inner + inner * columns) + (size if out_bytes is None else out_bytes) * rows * columns
    return KernelTime(
        2.0 * batch * padded / (peak * efficiency.ceiling),
        batch * moved / device.reached_bandwidth,
        efficiency.launch,
    )


def memory_bound_time(device: Device, num_bytes: float) -> KernelTime:
    """Return the time of a kernel that is limited by memory traffic, such as a norm, activation or optimizer update.

    num_bytes: that it reads and writes, in total.
    """
    return KernelTime(0.0, num_bytes / device.reached_bandwidth, device.efficiency.launch)


def fit_efficiency(device: Device, dtype: str, products: Sequence[Product]) -> Efficiency:
    """Return the efficiency with which predictions are nearest to measured products.

    It minimizes the squared logarithms of predicted over measured seconds, so that small and large products have the
    same weight. The maximum of arithmetic and traffic makes the error non-convex, so the search is global.

    Raises:
        ConfigError: fewer than 3 products, or times that are not above 0.
    """
    if len(products) < 3:
        raise ConfigError(f"{len(products)} products were measured; the three parameters need at least 3 sizes")
    if any(product.seconds <= 0 for product in products):
        raise ConfigError("a measured product took 0 seconds or less; measure it again with more repetitions")

    from scipy.optimize import differential_evolution  # takes a quarter of a second

    sizes = np.array([(each.rows, each.inner, each.columns) for each in products], dtype=np.float64)[..., None]
    batches, seconds = (np.array([[getattr(each, name)] for each in products]) for name in ("batch", "seconds"))
    memory = np.array([[matrix_product_time(device, *each[:3], dtype, each.batch).memory] for each in products])

    def errors(points: np.ndarray) -> np.ndarray:
        """Return the sum of squares for each of [3, points]."""
        ceiling, half_size, launch = points
        compute = 2.0 * batches * (sizes + half_size).prod(axis=1) / (device.peak(dtype) * ceiling)
        squares: np.ndarray = (np.log((np.maximum(compute, memory) + launch) / seconds) ** 2).sum(axis=0)
        return squares

    bounds = [(0.01, 1.0), (0.0, sizes.max()), (0.0, seconds.min())]
    best = differential_evolution(
        errors, bounds, vectorized=True, updating="deferred", polish=False, popsize=20, maxiter=400, tol=1e-8, rng=0
    ).x
    return replace(device.efficiency, **dict(zip(("ceiling", "half_size", "launch"), map(float, best), strict=True)))


class Peak(NamedTuple):
    """TFLOP/s of dense matrix products, no sparsity."""

    bf16: float
    """bf16 or fp16 inputs, fp32 accumulation, on tensor cores."""
    fp32: float
    """fp32 throughout, without TF32."""


PEAKS = {
    "GB300": Peak(2500.0, 80.0),
    "GB200": Peak(2500.0, 80.0),
    "B300": Peak(2250.0, 75.0),
    "B200": Peak(2250.0, 75.0),
    "GH200": Peak(989.4, 66.9),
    "H200 NVL": Peak(835.5, 60.0),
    "H200": Peak(989.4, 66.9),
    "H100 NVL": Peak(835.5, 60.0),
    "H100 PCIe": Peak(756.0, 51.2),
    "H100": Peak(989.4, 66.9),
    "H800": Peak(989.4, 66.9),
    "H20": Peak(148.0, 44.0),
    "A100": Peak(312.0, 19.5),
    "A800": Peak(312.0, 19.5),
    "A40": Peak(149.7, 37.4),
    "A30": Peak(165.0, 10.3),
    "A10": Peak(125.0, 31.2),
    "L40S": Peak(362.0, 91.6),
    "L40": Peak(181.0, 90.5),
    "L4": Peak(121.0, 30.3),
    "RTX 6000 Ada": Peak(364.2, 91.1),
    "RTX A6000": Peak(154.8, 38.7),
    "RTX 4090": Peak(165.2, 82.6),
    "RTX 3090": Peak(71.0, 35.6),
}
"""By words of the driver's device name, the more specific names first. From NVIDIA's data sheets; the SXM part if the
name does not say."""


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the FLOP/s of dense matrix products of a GPU by its driver's name; None if it is unknown."""
    if "Laptop" in device_name:  # another chip under the same number
        return None
    for words, peak in PEAKS.items():
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(words)}(?![A-Za-z0-9])", device_name):
            return (peak.fp32 if precision == "fp32" else peak.bf16) * 1e12
    return None
