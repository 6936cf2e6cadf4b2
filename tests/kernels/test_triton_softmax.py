"""Triton's masked softmax, and attention weights by it."""

import pytest
import torch

from tests.kernels import softmax_checks
from tests.kernels.cases import DEVICE, DTYPES, LAYOUTS, Layout, draw, implementation
from tests.kernels.softmax_checks import LONG, MASKS, SCALE, SHAPES, mask_of

pytest.importorskip("triton")

SOFTMAX = implementation("softmax", "triton")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_double(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    softmax_checks.check_against_double(SOFTMAX, shape, dtype, DEVICE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 2, 40, 33), LONG], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_masks(shape: tuple[int, ...], mask: str, causal: bool, window: int | None) -> None:
    softmax_checks.check_against_double(SOFTMAX, shape, torch.float32, DEVICE, mask, causal, window)


@pytest.mark.parametrize(("shape", "window"), [(LONG, 5000), ((1, 2, 9, 4), None)], ids=str)
def test_windows_that_start_late_and_few_keys(shape: tuple[int, ...], window: int | None) -> None:
    softmax_checks.check_against_double(SOFTMAX, shape, torch.float32, DEVICE, "general", True, window)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_awkward_layouts(layout: Layout, mask: str) -> None:
    softmax_checks.check_against_double(SOFTMAX, (2, 2, 3, 48), torch.float32, DEVICE, mask, True, layout=layout)


@pytest.mark.parametrize("spread", [1e-6, 1e4])
def test_extreme_values(spread: float) -> None:
    softmax_checks.check_against_double(SOFTMAX, (1, 2, 8, 100), torch.float32, DEVICE, spread=spread)


@pytest.mark.parametrize(("shape", "keys"), [((2, 2, 9, 64), 24), (LONG, LONG[-1])], ids=str)
def test_rules(shape: tuple[int, ...], keys: int) -> None:
    softmax_checks.check_rules(SOFTMAX, shape, torch.float32, DEVICE, keys)


def test_operators_keep_torchs_rules() -> None:
    """Schema, fake results, registered gradients and tracing, as `torch.library.opcheck` sees them."""
    scores = draw(1, 2, 4, 8, dtype=torch.float32, device=DEVICE)
    mask = mask_of("general", (1, 2, 4, 8), DEVICE)
    arguments = (scores.clone().requires_grad_(), mask, SCALE, True, 3)
    torch.library.opcheck(torch.ops.megapipe.softmax_triton.default, arguments)
    torch.library.opcheck(torch.ops.megapipe.softmax_triton_input_gradient.default, (scores, scores, SCALE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_probabilities(dtype: torch.dtype, window: int | None) -> None:
    op = implementation("attention_probabilities", "triton")
    softmax_checks.check_attention_probabilities(op, dtype, window, DEVICE)
