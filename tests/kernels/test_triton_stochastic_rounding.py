"""Stochastic rounding in Triton has the bits of the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.kernels.reference import stochastic_rounding as reference
from megapipe.kernels.reference.stochastic_rounding import Elements
from tests.kernels.cases import DEVICE, assert_same_bits, draw, needs_triton


@needs_triton
@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**34), st.integers(1, 700), st.integers(0, 700), st.integers(0, 999))
def test_the_bits_of_the_reference(key: int, first: int, run: int, gap: int, skipped: int) -> None:
    from megapipe.kernels.triton_backend import stochastic_rounding

    source = draw(1500, dtype=torch.float32, device=DEVICE)
    source[700:] *= 2.0**-64
    source[1000:] *= 2.0**-64  # and so below the normal numbers
    source[3:6] = torch.tensor([torch.inf, -torch.inf, 0.0])
    elements = Elements(first, run, run + gap if skipped % 2 else run, skipped)
    found, expected = (torch.zeros(1500, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    stochastic_rounding.round_to(found, source, key, elements)
    reference.round_to(expected, source, key, elements)
    assert_same_bits(found, expected)


@needs_triton
def test_a_nan_stays_and_an_empty_buffer_is_no_error() -> None:
    from megapipe.kernels.triton_backend import stochastic_rounding

    for module in (reference, stochastic_rounding):
        target = torch.zeros(3, dtype=torch.bfloat16, device=DEVICE)
        module.round_to(target, torch.tensor([1.0, torch.nan, -2.0], device=DEVICE), 1, Elements(0, 1, 1))
        assert target.isnan().tolist() == [False, True, False]
        module.round_to(target[:0], torch.zeros(0, device=DEVICE), 1, Elements(0, 1, 1))
        with pytest.raises(ValueError, match=r"target is torch\.float32"):
            module.round_to(torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE), 1, Elements(0, 1, 1))
