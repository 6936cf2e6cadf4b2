"""GELU, bias and GELU, and SwiGLU in Triton."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from megapipe.kernels.reference import bias_gelu
from tests.kernels.activation_cases import KINDS, case
from tests.kernels.apply_checks import check_compiled, check_exactness, check_layout, check_like_double, results
from tests.kernels.cases import DEVICE, DTYPES, LAYOUTS, draw, needs_triton

pytestmark = needs_triton

SHAPES = [(30, 5, 7), (2, 3, 1000), (1, 4100), (700, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_less_exact_than_torch(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    function, reference, inputs = case(kind, DEVICE, shape[:-1], shape[-1], dtype)
    check_exactness(function, reference, inputs, shape[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_in_memory(kind: str, layout: Callable[[Tensor], Tensor]) -> None:
    function, _, inputs = case(kind, DEVICE, (3,), 72, torch.bfloat16)
    check_layout(function, inputs, 72, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: str) -> None:
    function, _, inputs = case(kind, DEVICE, (0,), 8, torch.float32)
    y, *gradients = results(function, inputs, inputs[0].new_empty(0, 8))
    assert y.shape == (0, 8)
    assert [gradient.shape for gradient in gradients] == [x.shape for x in inputs]
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_beyond_the_ordinary(kind: str, dtype: torch.dtype) -> None:
    numbers = [0.0, -0.0, 1e-30, -1e-30, 30.0, -30.0, 1e4, -1e4, torch.inf, torch.nan]
    function, reference, inputs = case(kind, DEVICE, (1,), len(numbers), dtype)
    inputs[0] = torch.tensor([numbers * (2 if kind == "swiglu" else 1)], dtype=dtype, device=DEVICE)
    if kind.startswith("bias"):
        inputs[1].fill_(0.5)
    check_like_double(function, reference, inputs, len(numbers))


def test_the_reference_has_the_right_gradient() -> None:
    leaves = [draw(3, 4).requires_grad_(), draw(4, seed=1).requires_grad_()]
    for approximate in ("none", "tanh"):
        assert gradcheck(lambda x, bias, kind=approximate: bias_gelu.apply(x, bias, kind), leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_compilers_see_through(kind: str) -> None:
    """One graph, forward and backward, with the bits of the eager kernel."""
    function, _, inputs = case(kind, DEVICE, (2, 3), 8, torch.float32)
    check_compiled(function, inputs, 8)
