"""Shared by tests of kernels: draws, awkward layouts, and the rule for how exact a kernel must be.

A kernel's checks are functions of a device and a shape, and live in a module without test functions, such as
`norm_checks`. tests/kernels runs them on small shapes, interpreted where there is no GPU; tests/gpu/test_kernels.py
runs them on large shapes on a GPU.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megapipe.kernels import triton_backend
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Implementation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where tests/kernels runs kernels: on a GPU, or else in the interpreter."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

needs_triton = pytest.mark.skipif(not triton_backend.installed(), reason="triton is not installed")
each_backend = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_triton)])


def implementation(op: str, backend: str) -> Implementation:
    """An op's functions by a backend, imported now."""
    (entry,) = (each for each in OPS.ops if each.name == op)
    return entry.implementation(next(each for each in entry.backends if each.name == backend))


def triton(op: str) -> Implementation:
    """An op's functions in Triton; the test is skipped without it."""
    pytest.importorskip("triton")
    return implementation(op, "triton")


def draw(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu", shift: float = 0.0
) -> Tensor:
    """Normal numbers, the same on every device."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (numbers + shift).to(device, dtype)


def misaligned(x: Tensor) -> Tensor:
    """The same numbers one element after an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def strided(x: Tensor) -> Tensor:
    """The same numbers with a gap after each."""
    return torch.stack([x, x], dim=-1)[..., 0]


def as_is(x: Tensor) -> Tensor:
    """The tensor itself."""
    return x


Layout = Callable[[Tensor], Tensor]

LAYOUTS = [misaligned, strided]


def assert_as_exact_as_torch(actual: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """In torch's dtype and shape, with at most twice the largest error that torch makes.

    exact: in float64. Half a unit in the last place of the largest number is always allowed. The interpreter truncates
    where GPUs round to bf16, so a unit of each number is allowed there.
    """
    assert actual.dtype == torchs.dtype
    assert actual.shape == torchs.shape == exact.shape
    if not exact.numel():
        return
    unit = torch.finfo(actual.dtype).eps
    allowed = 2 * (torchs.double() - exact).abs().max() + unit / 2 * exact.abs().max()
    error = (actual.double() - exact).abs()
    if actual.device.type == "cpu" and actual.dtype == torch.bfloat16:
        error -= unit * exact.abs()
    assert error.max() <= allowed, f"error {error.max().item():.3g}, allowed {allowed.item():.3g}"


def assert_same_bits(first: Tensor, second: Tensor) -> None:
    """Equal bit for bit; NaNs at the same places."""
    assert torch.equal(first.isnan(), second.isnan())
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
