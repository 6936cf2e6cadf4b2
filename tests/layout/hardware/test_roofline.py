"""Peaks of GPUs by name, times of kernels against the roofline's closed form, and the fit of efficiencies."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.layout.hardware.description import Device, Efficiency
from megapipe.layout.hardware.roofline import (
    Product,
    fit_efficiency,
    matrix_product_time,
    memory_bound_time,
    peak_flops,
)

DEVICE = Device("a", {"bf16": 312e12, "fp32": 19.5e12}, 80e9, 2e12)


def product_efficiency(device: Device, rows: int, inner: int, columns: int) -> float:
    """The fraction of the device's peak that a product reaches."""
    seconds = matrix_product_time(device, rows, inner, columns, "bf16").seconds
    return 2.0 * rows * inner * columns / seconds / device.peak("bf16")


def test_ideal_products_take_the_slower_of_arithmetic_and_traffic() -> None:
    large = matrix_product_time(DEVICE, 4096, 8192, 2048, "bf16", batch=3)
    assert large.compute == pytest.approx(3 * 2 * 4096 * 8192 * 2048 / 312e12)
    assert large.memory == pytest.approx(3 * 2 * (4096 * 8192 + 8192 * 2048 + 4096 * 2048) / 2e12)
    assert large.seconds == large.compute > large.memory
    row = matrix_product_time(DEVICE, 1, 8192, 8192, "bf16", out_bytes=4)
    assert row.memory == pytest.approx((2 * (8192 + 8192 * 8192) + 4 * 8192) / 2e12)
    assert row.seconds == row.memory > row.compute
    assert memory_bound_time(DEVICE, 6e9).seconds == pytest.approx(3e-3)


def test_the_ridge_is_where_the_roofline_paper_has_it() -> None:
    """Square products turn from memory to arithmetic at n / 3 FLOP a byte = peak over bandwidth, here 156."""
    below, above = (matrix_product_time(DEVICE, n, n, n, "bf16") for n in (467, 469))
    assert below.memory > below.compute
    assert above.compute > above.memory


def test_efficiency_follows_hockneys_law_in_each_dimension() -> None:
    device = replace(DEVICE, efficiency=Efficiency(0.8, 256.0, 0.0))
    assert product_efficiency(device, 256, 10**9, 10**9) == pytest.approx(0.4)
    assert product_efficiency(device, 512, 1024, 10**9) == pytest.approx(0.8 * 512 / 768 * 1024 / 1280)
    slow = replace(DEVICE, efficiency=Efficiency(0.8, 0.0, 1e-3))
    assert matrix_product_time(slow, 64, 64, 64, "bf16").seconds == pytest.approx(1e-3, rel=1e-3)
    assert memory_bound_time(slow, 0).seconds == pytest.approx(1e-3)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 20000)] * 3),
    longer=st.integers(1, 5000),
    which=st.integers(0, 2),
    efficiency=st.builds(Efficiency, st.floats(0.05, 1), st.floats(0, 2000), st.floats(0, 1e-3)),
)
def test_more_work_is_never_faster_but_never_less_efficient(
    sizes: tuple[int, int, int], longer: int, which: int, efficiency: Efficiency
) -> None:
    device = replace(DEVICE, efficiency=efficiency)
    more = tuple(size + longer * (index == which) for index, size in enumerate(sizes))
    before, after = (matrix_product_time(device, *each, "bf16").seconds for each in (sizes, more))
    assert after >= before
    reached, then = (product_efficiency(device, *each) for each in (sizes, more))
    assert reached * (1 - 1e-9) <= then <= efficiency.ceiling * (1 + 1e-9)


@pytest.mark.parametrize("truth", [Efficiency(0.83, 190.0, 4e-6), Efficiency(0.55, 700.0, 0.0), Efficiency()])
def test_the_fit_finds_the_parameters_that_made_its_rows(truth: Efficiency) -> None:
    device = replace(DEVICE, efficiency=truth)
    shapes = [
        (rows, inner, columns) for rows in (128, 2048, 8192) for inner in (256, 4096) for columns in (512, 16384)
    ]
    rows = [Product(*shape, matrix_product_time(device, *shape, "bf16").seconds) for shape in shapes]
    rows.append(Product(128, 64, 128, matrix_product_time(device, 128, 64, 128, "bf16", batch=96).seconds, batch=96))
    fitted = replace(DEVICE, efficiency=fit_efficiency(DEVICE, "bf16", rows))
    for shape in [(1024, 1024, 1024), (4096, 12288, 4096), (300, 5000, 70)]:  # shapes that the fit has not seen
        expected = matrix_product_time(device, *shape, "bf16").seconds
        assert matrix_product_time(fitted, *shape, "bf16").seconds == pytest.approx(expected, rel=0.01)


def test_wrong_products_are_refused() -> None:
    with pytest.raises(ValueError, match="inner is 0"):
        matrix_product_time(DEVICE, 1, 0, 1, "bf16")
    with pytest.raises(ConfigError, match="no peak for 'fp8'"):
        matrix_product_time(DEVICE, 1, 1, 1, "fp8")
    with pytest.raises(ConfigError, match="2 products were measured; the three parameters need at least 3"):
        fit_efficiency(DEVICE, "bf16", [Product(1, 1, 1, 1.0)] * 2)
    with pytest.raises(ConfigError, match="took 0 seconds or less"):
        fit_efficiency(DEVICE, "bf16", [Product(1, 1, 1, 0.0)] * 3)


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
