"""Squared norms of flat gradients: the reference, and Triton."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megapipe.kernels.reference import gradient_norm as reference
from megapipe.parallel.norms import squared_norm
from tests.kernels.cases import DEVICE, DTYPES, draw, misaligned, needs_triton

SIZES = [0, 1, 1000, 65_536, 65_537, 140_000]


def triton_norm() -> ModuleType:
    from megapipe.kernels.triton_backend import gradient_norm

    return gradient_norm


def exact(values: Tensor) -> float:
    return math.fsum(value * value for value in values.double().tolist())


@pytest.mark.parametrize("size", SIZES)
def test_the_reference_has_the_bits_of_the_canonical_norm(size: int) -> None:
    values = draw(size, dtype=torch.float32)
    found = reference.squared_norm(values)
    assert torch.equal(found, squared_norm(values))
    assert found.item() == pytest.approx(exact(values), rel=1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_exact_to_fp64(size: int, dtype: torch.dtype) -> None:
    values = draw(size, dtype=dtype, device=DEVICE)
    found = triton_norm().squared_norm(values)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert found.item() == pytest.approx(exact(values), rel=1e-14)
    assert torch.equal(found, triton_norm().squared_norm(values))
    assert torch.equal(found, triton_norm().squared_norm(misaligned(values)))


@needs_triton
def test_finite_only_if_every_element_is() -> None:
    values = torch.full((65_600,), torch.finfo(torch.float32).max, device=DEVICE)
    assert triton_norm().squared_norm(values).isfinite()
    for place, poison in ((0, torch.nan), (40_000, torch.inf), (65_599, -torch.inf)):
        poisoned = torch.zeros_like(values)
        poisoned[place] = poison
        assert not triton_norm().squared_norm(poisoned).isfinite()
        assert not reference.squared_norm(poisoned).isfinite()
