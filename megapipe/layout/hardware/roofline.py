"""Time of kernels by the roofline: arithmetic and memory traffic run side by side, the slower one counts.

Williams, Waterman and Patterson 2009 (doi 10.1145/1498765.1498785). How a matrix product's rate falls with its sizes
is `Efficiency`'s law in each dimension, as if each were longer by `half_size`; the three parameters of a device come
from its own measured products (`fit_efficiency`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megapipe.config.errors import ConfigError
from megapipe.layout.hardware.description import Device, Efficiency

DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of an element as it lies in memory."""


@dataclass(frozen=True)
class KernelTime:
    """Seconds of one kernel, in its terms: arithmetic, memory traffic, and what any kernel takes besides."""

    compute: float
    memory: float
    launch: float

    @property
    def seconds(self) -> float:
        """The slower of arithmetic and traffic, and the launch."""
        return max(self.compute, self.memory) + self.launch

    @property
    def bound(self) -> str:
        """`compute` or `memory`, whichever takes longer."""
        return "compute" if self.compute >= self.memory else "memory"


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
    """A product of [rows, inner] by [inner, columns], `batch` of them in one kernel.

    out_bytes: of an element of the result, by default as of the inputs; 4 for sums kept in fp32.

    Raises:
        ConfigError: the device has no peak for `dtype`. ValueError: a size below 1.
    """
    for name, size in {"rows": rows, "inner": inner, "columns": columns, "batch": batch}.items():
        if size < 1:
            raise ValueError(
                f"{name} is {size}, but sizes of a matrix product must be at least 1; leave empty products out"
            )
    found = device.efficiency
    padded = (rows + found.half_size) * (inner + found.half_size) * (columns + found.half_size)
    peak, size = device.peak(dtype), DTYPE_BYTES[dtype]
    moved = size * (rows * inner + inner * columns) + (size if out_bytes is None else out_bytes) * rows * columns
    return KernelTime(
        2.0 * batch * padded / (peak * found.ceiling),
        batch * moved / device.reached_bandwidth,
        found.launch,
    )


def memory_bound_time(device: Device, num_bytes: float, kernels: int = 1) -> KernelTime:
    """Kernels that only read and write, such as norms, activations and optimizer updates.

    num_bytes: that they read and write, all together.
    """
    return KernelTime(0.0, num_bytes / device.reached_bandwidth, kernels * device.efficiency.launch)


def product_efficiency(device: Device, rows: int, inner: int, columns: int, dtype: str) -> float:
    """Share of the device's peak that a product reaches."""
    seconds = matrix_product_time(device, rows, inner, columns, dtype).seconds
    return 2.0 * rows * inner * columns / seconds / device.peak(dtype)


def fit_efficiency(device: Device, dtype: str, products: Sequence[Product]) -> Efficiency:
    """The efficiency under which the device's predictions come nearest to measured products.

    Least squares of the logarithms of predicted over measured seconds, so that a small product weighs as much as a
    large one. All three parameters are searched on grids that close in on the best point: a search of its own, because
    the slower of arithmetic and traffic bends the error, and to leave no parameter outside its bounds.

    Raises:
        ConfigError: fewer than 3 products, or times that are not above 0.
    """
    if len(products) < 3:
        raise ConfigError(
            f"{len(products)} products were measured; the three parameters need at least 3 products of different sizes"
        )
    if any(product.seconds <= 0 for product in products):
        raise ConfigError("a measured product took 0 seconds or less; measure it again with more repetitions")

    sizes = np.array([(each.rows, each.inner, each.columns) for each in products], dtype=np.float64)
    batches, seconds = (np.array([getattr(each, name) for each in products]) for name in ("batch", "seconds"))
    memory = np.array([matrix_product_time(device, *each[:3], dtype, each.batch).memory for each in products])

    def errors(points: np.ndarray) -> np.ndarray:
        """Sum of squares for each of [points, 3]."""
        ceiling, half_size, launch = (points[:, axis, None] for axis in range(3))
        padded = (sizes[None] + half_size[..., None]).prod(axis=2)
        compute = 2.0 * batches * padded / (device.peak(dtype) * ceiling)
        predicted = np.maximum(compute, memory) + launch
        squares: np.ndarray = (np.log(predicted / seconds) ** 2).sum(axis=1)
        return squares

    lows, highs = np.array([0.01, 0.0, 0.0]), np.array([1.0, sizes.max(), seconds.min()])
    # Sizes that matter lie far apart, so the first grid of half_size is a geometric one.
    halves = np.concatenate([[0.0], np.geomspace(1.0, highs[1], _FIRST_POINTS)])
    point = _best(
        errors, [np.linspace(lows[0], 1.0, _FIRST_POINTS), halves, np.linspace(0.0, highs[2], _FIRST_POINTS)]
    )
    reach = np.array([0.1, 0.5 * point[1] + 1.0, 0.1 * highs[2]])
    for _ in range(_ROUNDS):
        lower, upper = np.maximum(lows, point - reach), np.minimum(highs, point + reach)
        point = _best(errors, [np.linspace(*ends, _POINTS) for ends in zip(lower, upper, strict=True)], point)
        reach = reach * _SHRINK
    return replace(device.efficiency, **dict(zip(_FITTED, map(float, point), strict=True)))


def _best(
    errors: Callable[[np.ndarray], np.ndarray], axes: Sequence[np.ndarray], known: np.ndarray | None = None
) -> np.ndarray:
    """The point of a grid with the least error, or the one known before where none is better."""
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    points = grid if known is None else np.concatenate([known[None], grid])
    best: np.ndarray = points[errors(points).argmin()]
    return best


_FITTED = ("ceiling", "half_size", "launch")
_FIRST_POINTS = 16
_POINTS = 7
_ROUNDS = 80
_SHRINK = 0.85
"""Of the search: each round's grid reaches 0.85 of the last one's extent to either side of its best point, further
than to that grid's next points, so that it can follow a bent valley."""
