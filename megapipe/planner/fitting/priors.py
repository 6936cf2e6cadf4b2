"""Priors of the shares of nominal rates that a machine reaches, from published rates of single kernels.

Five rows of a table do not determine three shares: only the row of the smallest model depends much on the share of
memory. So each share has a prior from published rates of single kernels and collectives, none of which is a row of
training speed. Its logarithm is assumed to be normally distributed around the logarithm of their geometric mean.
Fitting is then ridge regression in logarithms (Hoerl and Kennard 1970, doi 10.1080/00401706.1970.10488634).

`half_size` and `launch` of a device come only from published rates of matrix products, because rows of training speed
hardly depend on how much slower small products are. All are cuBLAS products of square matrices: TFLOP/s by size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.layout.hardware.description import Device, Efficiency, load_hardware
from megapipe.layout.hardware.roofline import Product, fit_efficiency
from megapipe.planner.cost.layer_times import UNFUSED_LOSS_BYTES

Floats = npt.NDArray[np.float64]

WIDTH = 0.3
"""Standard deviation of the logarithm of a share, for all shares and machines: about that of rates in `MEMORY`."""
ROW_ERROR = 0.03
"""Standard deviation of a row's error that no share explains: about the size of the errors of published rows."""


@dataclass(frozen=True)
class Rate:
    """A published rate. reached, nominal: in the same unit, such as bytes/s. source: where `reached` was published."""

    what: str
    reached: float
    nominal: float
    source: str

    @property
    def share(self) -> float:
        """Return the fraction of the nominal rate that was reached."""
        return self.reached / self.nominal


A100_40_BANDWIDTH, A100_80_BANDWIDTH, H100_BANDWIDTH = 1555e9, 2039e9, 3.35e12
"""Memory bandwidths in bytes per second, from the manufacturers' data sheets (SXM)."""
_APEX = "github.com/NVIDIA/apex, pull request 1037, on a GA100 (taken to be the A100 of 40 GB)"
_PYTORCH = "github.com/pytorch/pytorch, pull request 168335"
_QUACK = "github.com/Dao-AILab/quack, media/2025-07-10-membound-sol.md"
_LIGER = "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, megatron-unfused, vocabulary 131072"
_LOSS_LOGITS, _LOSS_SECONDS = 8192 * 131072, 21.25e-3
"""From the row `backward` of June 2026 in that file, which the benchmark's script times together with the forward:
2048 x 4 tokens in bf16 on an 80 GB H100."""
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
        Rate("layer norm, forward, compiled", 1600e9, H100_BANDWIDTH, _PYTORCH),
        Rate("layer norm, forward, compiled, tuned", 2000e9, H100_BANDWIDTH, _PYTORCH),
        Rate("Megatron-LM's loss", _LOSS_LOGITS * UNFUSED_LOSS_BYTES / _LOSS_SECONDS, H100_BANDWIDTH, _LIGER),
    ),
}
"""Rates of memory-bound kernels such as those of training, by preset."""
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
"""Rates of large messages in NCCL's own benchmark, with nothing else running, by preset."""
A100_FP16 = {
    512: 23.831273, 640: 39.384616, 768: 63.195428, 896: 78.051553, 1024: 99.864382, 1152: 135.726544,
    1280: 157.538463, 1408: 155.765024, 1536: 181.484314, 1664: 179.978245, 1792: 175.616000, 1920: 209.454544,
    2048: 204.600198, 2176: 201.236485, 2304: 248.831991, 2432: 222.971938, 2560: 246.375951, 2688: 219.266228,
    2816: 238.329010, 2944: 256.886772, 3072: 239.928400, 3200: 255.999988, 3328: 239.970975, 3456: 258.402470,
    3584: 265.237152, 3712: 250.369276, 3840: 250.775504, 3968: 248.521248, 4096: 264.208112,
}  # fmt: skip
"""TFLOP/s by size of one A100-SXM4-40GB, one call at a time: github.com/xanderdunn/fused-gelu-testing, README of early
2023, which shows the output of triton-lang.org's tutorial on matrix products. Its sizes 256 and 384 are left out: they
take 9.2 and 11.3 microseconds, all of it launch time."""
H100_BF16 = {4096: 716.0, 6144: 741.1, 8192: 797.8}
"""TFLOP/s by size of one H100 SXM, mean of consecutive calls: github.com/pranjalssh/fast.cu, README (the first size
from its later version, the others from its earlier version)."""


@dataclass(frozen=True)
class Belief:
    """The prior of a share. mean: its most likely value. origin: where the value comes from, in a few words."""

    mean: float
    origin: str


@dataclass(frozen=True)
class Prior:
    """Priors of all shares. beliefs: by parameter name, in the order of the parameters. width: see `WIDTH`."""

    beliefs: Mapping[str, Belief]
    width: float = WIDTH

    def errors(self, point: Floats) -> Floats:
        """Return the distances of a point [parameters] from the means, in the unit of a row's error."""
        means = np.array([belief.mean for belief in self.beliefs.values()])
        return np.log(point / means) * (ROW_ERROR / self.width)

    def as_json(self) -> dict[str, Any]:
        """Return the priors as JSON data."""
        means = {name: {"mean": belief.mean, "origin": belief.origin} for name, belief in self.beliefs.items()}
        return {"width": self.width, "row_error": ROW_ERROR, "shares": means}


def prior_of(name: str) -> Prior:
    """Return the prior of a preset, one of the keys of `MEMORY`."""
    memory = _middle(MEMORY[name], "kernels that read and write")
    return Prior({"ceiling": _products(name), "memory": memory, "links": _middle(LINKS[name], "collectives alone")})


def _middle(rates: Sequence[Rate], what: str) -> Belief:
    mean = exp(fsum(log(rate.share) for rate in rates) / len(rates))
    return Belief(mean, f"{len(rates)} published {what}")


def _products(name: str) -> Belief:
    """Return the prior of the ceiling, from the same rates of products that `half_size` comes from."""
    device = load_hardware(name).groups[0].device
    if name == "a100-80":
        return Belief(law_of(device, "fp16", A100_FP16).ceiling, f"{len(A100_FP16)} published products")
    ceiling = ceiling_of(device, "bf16", H100_BF16, device.efficiency.launch)
    return Belief(ceiling, f"{len(H100_BF16)} published products")


def law_of(device: Device, dtype: str, rates: Mapping[int, float]) -> Efficiency:
    """Fit ceiling, half_size and launch to products that were measured one at a time. rates: TFLOP/s by size."""
    products = [Product(size, size, size, _seconds(size, rate)) for size, rate in rates.items()]
    return fit_efficiency(device, dtype, products)


def half_size_of(rates: Mapping[int, float], launch: float) -> float:
    """Fit half_size to products of about three sizes. rates: TFLOP/s by size. launch: known seconds of a launch."""
    slope, intercept = _third_roots(rates, launch)
    return slope / intercept


def ceiling_of(device: Device, dtype: str, rates: Mapping[int, float], launch: float) -> float:
    """Return the share of the peak that an infinitely large product would reach. See `half_size_of` for arguments."""
    _, intercept = _third_roots(rates, launch)
    return intercept**-3 / device.peak(dtype)


def _third_roots(rates: Mapping[int, float], launch: float) -> tuple[float, float]:
    """Fit a line to the cube roots of seconds per FLOP as a function of 1 / size; return its slope and intercept.
    By the law of `Efficiency`, the intercept is that of an infinitely large product, and half_size slope / intercept.
    """
    sizes = np.array(list(rates), dtype=np.float64)
    seconds = np.array([_seconds(size, rate) for size, rate in rates.items()]) - launch
    slope, intercept = np.polyfit(1.0 / sizes, (seconds / (2.0 * sizes**3)) ** (1.0 / 3.0), 1)
    return float(slope), float(intercept)


def _seconds(size: int, rate: float) -> float:
    return 2.0 * size**3 / (rate * 1e12)
