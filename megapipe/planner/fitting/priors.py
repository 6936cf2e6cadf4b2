"""Prior knowledge of a machine's shares, before any row of training speed: published rates of single kernels.

Five rows of a table do not determine three shares: without the smallest model, the others hardly depend on memory's
share. So each share starts from published rates of single kernels and collectives, none of them a row of training
speed: its logarithm is taken to be normally distributed around that of their geometric mean. Fitting then is ridge
regression in logarithms (Hoerl and Kennard 1970, doi 10.1080/00401706.1970.10488634).

A device's `half_size` and `launch` come from published rates of matrix products alone, because rows of training speed
hardly depend on how much slower a small product is. All are cuBLAS, of square matrices: size against TFLOP/s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.layout.hardware.description import Device, Efficiency
from megapipe.layout.hardware.files import load_hardware
from megapipe.layout.hardware.roofline import Product, fit_efficiency
from megapipe.planner.cost.layer_times import UNFUSED_LOSS_BYTES

Floats = npt.NDArray[np.float64]

WIDTH = 0.3
"""One standard deviation of a share's logarithm, for all shares and machines: as the rates of `MEMORY` scatter."""
ROW_ERROR = 0.03
"""One standard deviation of a row's error that no share explains: as large as published rows' errors come out."""


@dataclass(frozen=True)
class Rate:
    """A published rate. reached, nominal: in one unit, such as bytes per second; source: of the first."""

    what: str
    reached: float
    nominal: float
    source: str

    @property
    def share(self) -> float:
        """Return the reached share of the nominal rate."""
        return self.reached / self.nominal


A100_40_BANDWIDTH, A100_80_BANDWIDTH, H100_BANDWIDTH = 1555e9, 2039e9, 3.35e12
"""Bytes per second of the makers' data sheets (SXM)."""
_APEX = "github.com/NVIDIA/apex, pull request 1037, on a GA100 (taken to be the A100 of 40 GB)"
_QUACK = "github.com/Dao-AILab/quack, media/2025-07-10-membound-sol.md"
_LIGER = "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, megatron-unfused, vocabulary 131072"
_LOSS_LOGITS, _LOSS_SECONDS = 8192 * 131072, 21.25e-3
"""Its row `backward` of June 2026, which the benchmark's script times together with the forward: 2048 by 4 tokens,
in bf16, on an H100 of 80 GB."""
MEMORY: Mapping[str, tuple[Rate, ...]] = {
    "a100-80": (
        Rate("reads", 1.80e12, A100_80_BANDWIDTH, "forums.developer.nvidia.com, thread 339083"),
        Rate("layer norm, forward", 895.8e9, A100_40_BANDWIDTH, _APEX),
        Rate("layer norm, backward", 572.2e9, A100_40_BANDWIDTH, _APEX),
        Rate("layer norm, forward, rewritten", 1258.0e9, A100_40_BANDWIDTH, _APEX),
        Rate("layer norm, backward, rewritten", 1163.4e9, A100_40_BANDWIDTH, _APEX),
    ),
    "h100": (
        Rate("softmax over 131072, written by hand", 3.01e12, H100_BANDWIDTH, _QUACK),
        Rate("softmax over 262144, compiled", 1.89e12, H100_BANDWIDTH, _QUACK),
        Rate(
            "layer norm, forward, compiled", 1600e9, H100_BANDWIDTH, "github.com/pytorch/pytorch, pull request 168335"
        ),
        Rate(
            "layer norm, forward, compiled, tuned",
            2000e9,
            H100_BANDWIDTH,
            "github.com/pytorch/pytorch, pull request 168335",
        ),
        Rate("Megatron-LM's loss", _LOSS_LOGITS * UNFUSED_LOSS_BYTES / _LOSS_SECONDS, H100_BANDWIDTH, _LIGER),
    ),
}
"""Kernels that only read and write, as training has them; by preset."""
LINKS: Mapping[str, tuple[Rate, ...]] = {
    "a100-80": (
        Rate("all-reduce of 8 in a node", 232.5e9, 300e9, "github.com/NVIDIA/nccl, issue 1048"),
        Rate("all-reduce of DGX A100 nodes", 192e9, 200e9, "github.com/NVIDIA/nccl, issue 812, NVIDIA's figure"),
    ),
    "h100": (
        Rate("a ring of 8 in a node", 370e9, 450e9, "github.com/NVIDIA/nccl-tests, issue 212, NVIDIA's figure"),
        Rate("an adapter, 46 to 48", 47e9, 50e9, "github.com/NVIDIA/nccl-tests, issue 290, NVIDIA's figure"),
    ),
}
"""Large messages of NCCL's own benchmark, nothing else running; by preset."""
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


@dataclass(frozen=True)
class Belief:
    """A share before rows are seen. mean: its likeliest value; origin: where it comes from, in a few words."""

    mean: float
    origin: str


@dataclass(frozen=True)
class Prior:
    """Prior knowledge of all shares: `beliefs` by parameter's name, in the order of the parameters; see `WIDTH`."""

    beliefs: Mapping[str, Belief]
    width: float = WIDTH

    def errors(self, point: Floats) -> Floats:
        """Return the distances of a point [parameters] from the means, in the unit of a row's error."""
        means = np.array([belief.mean for belief in self.beliefs.values()])
        distances: Floats = np.log(point / means) * (ROW_ERROR / self.width)
        return distances

    def as_json(self) -> dict[str, Any]:
        """Return everything, machine-readable."""
        means = {name: {"mean": belief.mean, "origin": belief.origin} for name, belief in self.beliefs.items()}
        return {"width": self.width, "row_error": ROW_ERROR, "shares": means}


def prior_of(name: str) -> Prior:
    """Return the prior of a preset that rows were published for (`MEMORY`)."""
    return Prior(
        {
            "ceiling": _products(name),
            "memory": _middle(MEMORY[name], "kernels that read and write"),
            "links": _middle(LINKS[name], "collectives alone"),
        }
    )


def _middle(rates: Sequence[Rate], what: str) -> Belief:
    mean = exp(fsum(log(rate.share) for rate in rates) / len(rates))
    return Belief(mean, f"{len(rates)} published {what}")


def _products(name: str) -> Belief:
    """Return the rate that an infinitely large product would reach, by those that `half_size` comes from."""
    device = load_hardware(name).groups[0].device
    if name == "a100-80":
        return Belief(law_of(device, "fp16", A100_FP16).ceiling, f"{len(A100_FP16)} published products")
    ceiling = ceiling_of(device, "bf16", H100_BF16, device.efficiency.launch)
    return Belief(ceiling, f"{len(H100_BF16)} published products")


def law_of(device: Device, dtype: str, rates: Mapping[int, float]) -> Efficiency:
    """Return ceiling, half_size and launch of products that were measured one at a time. rates: TFLOP/s by size."""
    products = [Product(size, size, size, _seconds(size, rate)) for size, rate in rates.items()]
    return fit_efficiency(device, dtype, products)


def half_size_of(rates: Mapping[int, float], launch: float) -> float:
    """Return the half_size of products of about three sizes, whose launch is known. rates: TFLOP/s by size."""
    slope, endless = _third_roots(rates, launch)
    return slope / endless


def ceiling_of(device: Device, dtype: str, rates: Mapping[int, float], launch: float) -> float:
    """Return the ceiling of the same products: the share of the peak that an infinitely large one would reach."""
    _, endless = _third_roots(rates, launch)
    return endless**-3 / device.peak(dtype)


def _third_roots(rates: Mapping[int, float], launch: float) -> tuple[float, float]:
    """Return slope and start of the line of least squares through the third roots of seconds over FLOPs against
    1 / size. By the law of `Efficiency`, the start is that of an infinitely large product, and the slope `half_size`
    times it."""
    sizes = np.array(list(rates), dtype=np.float64)
    seconds = np.array([_seconds(size, rate) for size, rate in rates.items()]) - launch
    slope, start = np.polyfit(1.0 / sizes, (seconds / (2.0 * sizes**3)) ** (1.0 / 3.0), 1)
    return float(slope), float(start)


def _seconds(size: int, rate: float) -> float:
    return 2.0 * size**3 / (rate * 1e12)
