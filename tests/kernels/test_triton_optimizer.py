"""Ops on flat buffers, references and Triton: AdamW, squared norms of gradients, stochastic rounding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapipe.kernels.reference import optimizer as reference_optimizer
from megapipe.kernels.reference.optimizer import Coefficients, Elements
from megapipe.optim.optimizer import adamw_step
from megapipe.spec.parameters import SEGMENT_ALIGNMENT
from tests.kernels import adamw_checks
from tests.kernels.cases import (
    DEVICE,
    DTYPES,
    assert_same_bits,
    draw,
    each_backend,
    implementation,
    misaligned,
    triton,
)

REFERENCE = implementation("adamw", "reference")
SIZES = [0, 1, 1000, 65_536, 65_537, 140_000]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_reference_has_the_bits_of_the_optimizers_tail(weight_decay: float) -> None:
    state = adamw_checks.buffers(SEGMENT_ALIGNMENT - 1, torch.float32, "cpu")
    scale = torch.tensor(0.5)
    coefficients = adamw_checks.coefficients(weight_decay=weight_decay)
    actual = adamw_checks.stepped(REFERENCE, state, coefficients, gradient_scale=scale)
    update = Coefficients(3, 1e-2, (0.9, 0.95), 1e-8, weight_decay)
    adamw_step(*([state[name]] for name in adamw_checks.BUFFERS), update, gradient_scale=scale)
    for name in ("master", "first", "second"):
        assert_same_bits(actual[name], state[name])


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step is 0"):
        Coefficients(0, 1e-3, (0.9, 0.95), 1e-8, 0.0)


def exact(values: Tensor) -> float:
    return math.fsum(value * value for value in values.double().tolist())


@pytest.mark.parametrize("size", SIZES)
def test_reference_norm_is_accurate(size: int) -> None:
    values = draw(size, dtype=torch.float32)
    assert reference_optimizer.gradient_norm(values).item() == pytest.approx(exact(values), rel=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_squared_norms_are_exact_in_float64(size: int, dtype: torch.dtype) -> None:
    values = draw(size, dtype=dtype, device=DEVICE)
    norm = triton("gradient_norm").apply(values)
    assert (norm.dtype, norm.shape) == (torch.float64, ())
    assert norm.item() == pytest.approx(exact(values), rel=1e-14)
    assert torch.equal(norm, triton("gradient_norm").apply(values))
    assert torch.equal(norm, triton("gradient_norm").apply(misaligned(values)))


def test_squared_norms_are_finite_if_elements_are() -> None:
    values = torch.full((65_600,), torch.finfo(torch.float32).max, device=DEVICE)
    assert triton("gradient_norm").apply(values).isfinite()
    for place, poison in ((0, torch.nan), (40_000, torch.inf), (65_599, -torch.inf)):
        poisoned = torch.zeros_like(values)
        poisoned[place] = poison
        assert not triton("gradient_norm").apply(poisoned).isfinite()
        assert not reference_optimizer.gradient_norm(poisoned).isfinite()


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**34), st.integers(1, 700), st.integers(0, 700), st.integers(0, 999))
def test_rounding_has_the_bits_of_the_reference(key: int, first: int, run: int, gap: int, skipped: int) -> None:
    source = draw(1500, dtype=torch.float32, device=DEVICE)
    source[700:] *= 2.0**-64
    source[1000:] *= 2.0**-64  # and so below the normal numbers
    source[3:6] = torch.tensor([torch.inf, -torch.inf, 0.0])
    elements = Elements(first, run, run + gap if skipped % 2 else run, skipped)
    actual, expected = (torch.zeros(1500, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    triton("stochastic_rounding").apply(actual, source, key, elements)
    reference_optimizer.stochastic_rounding(expected, source, key, elements)
    assert_same_bits(actual, expected)


@each_backend
def test_rounding_keeps_a_nan_and_takes_empty_buffers(backend: str) -> None:
    module = implementation("stochastic_rounding", backend)
    target = torch.zeros(3, dtype=torch.bfloat16, device=DEVICE)
    module.apply(target, torch.tensor([1.0, torch.nan, -2.0], device=DEVICE), 1, Elements(0, 1, 1))
    assert target.isnan().tolist() == [False, True, False]
    module.apply(target[:0], torch.zeros(0, device=DEVICE), 1, Elements(0, 1, 1))
    with pytest.raises(ValueError, match=r"target is torch\.float32"):
        module.apply(torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE), 1, Elements(0, 1, 1))
