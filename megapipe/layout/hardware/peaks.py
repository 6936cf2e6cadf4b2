"""Peak arithmetic rates of known GPUs: the denominator of MFU."""

import re
from typing import NamedTuple

from megapipe.spec.dtypes import Precision


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
