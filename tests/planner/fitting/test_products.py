"""The presets' `half_size` and `launch` follow from published products, and the law predicts these products."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.layout.hardware.description import Device, load_hardware
from megapipe.layout.hardware.roofline import matrix_product_time
from megapipe.planner.fitting import A100_FP16, H100_BF16, ceiling_of, half_size_of, law_of


def device(name: str) -> Device:
    return load_hardware(name).groups[0].device


def test_the_a100_has_the_law_of_its_products() -> None:
    law, preset = law_of(device("a100-80"), "fp16", A100_FP16), device("a100-80").efficiency
    assert preset.half_size == pytest.approx(law.half_size, abs=1.0)
    assert preset.launch == pytest.approx(law.launch, abs=1e-7)


def test_h100_has_its_own_half_size_and_a100s_launch() -> None:
    preset = device("h100").efficiency
    assert preset.launch == device("a100-80").efficiency.launch
    assert preset.half_size == pytest.approx(half_size_of(H100_BF16, preset.launch), abs=1.0)


def test_the_law_predicts_the_products_it_was_fitted_to() -> None:
    """Within 6% on average; a constant rate, the best one, is 3 times as far off."""
    rates = np.array(list(A100_FP16.values()))
    law = law_of(device("a100-80"), "fp16", A100_FP16)
    machine = Device("a", {"fp16": 312e12}, 80e9, 2e12, law)
    predicted = [2 * n**3 / matrix_product_time(machine, n, n, n, "fp16").seconds / 1e12 for n in A100_FP16]
    off = np.abs(np.log(predicted / rates))
    constant = np.abs(np.log(rates / np.median(rates)))
    assert off.mean() < 0.06
    assert constant.mean() > 3 * off.mean()


@given(half=st.floats(1.0, 500.0), launch=st.floats(0.0, 2e-5), peak=st.floats(50.0, 900.0))
def test_fits_recover_half_size_and_ceiling_of_synthetic_products(half: float, launch: float, peak: float) -> None:
    rates = {
        size: 2e-12 * size**3 / (2.0 * (size + half) ** 3 / (peak * 1e12) + launch) for size in (2048, 4096, 8192)
    }
    assert half_size_of(rates, launch) == pytest.approx(half, rel=1e-6)
    machine = Device("a", {"bf16": 989e12}, 80e9, 3e12)
    assert ceiling_of(machine, "bf16", rates, launch) == pytest.approx(peak / 989, rel=1e-6)
