"""What is known of a machine's shares before any row of training speed is seen.

Five rows of a table do not fix three shares: without the smallest model, the others hardly tell memory's share. So
each share starts from published rates of single kernels and collectives, none of them a row of training speed: it is
taken to lie around their geometric mean, its logarithm normally distributed. Fitting then is ridge regression in
logarithms (Hoerl and Kennard 1970, doi 10.1080/00401706.1970.10488634): rows move a share as far as they tell it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Any

import numpy as np

from megapipe.layout.hardware.reader import load_hardware
from megapipe.planner.cost.kernels import UNFUSED_LOSS_BYTES
from megapipe.planner.fitting.least_squares import Floats
from megapipe.planner.fitting.products import A100_FP16, H100_BF16, ceiling_of, law_of

WIDTH = 0.3
"""One standard deviation of a share's logarithm, for all shares and machines: as the rates of `MEMORY` scatter."""
ROW_ERROR = 0.03
"""One standard deviation of a row's error that no share explains: as large as published rows' errors come out."""


@dataclass(frozen=True)
class Rate:
    """A published rate. reached, nominal: in one unit, such as bytes per second; source: where the first stands."""

    what: str
    reached: float
    nominal: float
    source: str

    @property
    def share(self) -> float:
        """Reached of nominal."""
        return self.reached / self.nominal


A100_40_BANDWIDTH, A100_80_BANDWIDTH, H100_BANDWIDTH = 1555e9, 2039e9, 3.35e12
"""Bytes per second of the makers' data sheets (SXM)."""
_APEX = "github.com/NVIDIA/apex, pull request 1037, on a GA100 (taken to be the A100 of 40 GB)"
_QUACK = "github.com/Dao-AILab/quack, media/2025-07-10-membound-sol.md"
_LIGER = "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, megatron-unfused, vocabulary 131072"
_LOSS_LOGITS, _LOSS_SECONDS = 8192 * 131072, 21.25e-3
"""Of its row `backward` of June 2026, which the benchmark's script times together with the forward: 2048 by 4 tokens,
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
"""Large messages of NCCL's own benchmark, nothing beside them; by preset."""


@dataclass(frozen=True)
class Belief:
    """A share before rows are seen. mean: its likeliest value; origin: what it comes from, in a few words."""

    mean: float
    origin: str


@dataclass(frozen=True)
class Prior:
    """What is known of all shares: `beliefs` by parameter's name, in the order of the parameters; see `WIDTH`."""

    beliefs: Mapping[str, Belief]
    width: float = WIDTH

    def errors(self, point: Floats) -> Floats:
        """How far a point [parameters] lies from the means, in the unit of a row's error, so that both add up."""
        means = np.array([belief.mean for belief in self.beliefs.values()])
        distances: Floats = np.log(point / means) * (ROW_ERROR / self.width)
        return distances

    def as_json(self) -> dict[str, Any]:
        """Machine-readable."""
        means = {name: {"mean": belief.mean, "origin": belief.origin} for name, belief in self.beliefs.items()}
        return {"width": self.width, "row_error": ROW_ERROR, "shares": means}


def prior_of(name: str) -> Prior:
    """Of a preset that rows were published for (`MEMORY`)."""
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
    """The rate that an endless product would reach, by those that `half_size` comes from."""
    device = load_hardware(name).groups[0].device
    if name == "a100-80":
        return Belief(law_of(device, "fp16", A100_FP16).ceiling, f"{len(A100_FP16)} published products")
    ceiling = ceiling_of(device, "bf16", H100_BF16, device.efficiency.launch)
    return Belief(ceiling, f"{len(H100_BF16)} published products")
