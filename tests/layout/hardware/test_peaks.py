"""Peaks of GPUs by the names that their drivers give them."""

import pytest

from megapipe.layout.hardware.roofline import peak_flops


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("NVIDIA H100 PCIe", 756e12, 51.2e12),
        ("NVIDIA H100 NVL", 835.5e12, 60e12),
        ("NVIDIA H200", 989.4e12, 66.9e12),
        ("NVIDIA H20", 148e12, 44e12),
        ("NVIDIA GH200 480GB", 989.4e12, 66.9e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12),
        ("NVIDIA A10G", None, None),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GB200", 2500e12, 80e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("Tesla V100-SXM2-16GB", None, None),
    ],
)
def test_a_name_finds_its_own_part_or_none(name: str, bf16: float | None, fp32: float | None) -> None:
    assert peak_flops(name, "bf16") == pytest.approx(bf16)
    assert peak_flops(name, "fp32") == pytest.approx(fp32)
