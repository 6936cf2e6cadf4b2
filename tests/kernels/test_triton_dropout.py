"""Dropout in Triton, alone and between a bias and a residual: the reference's bits, and exact values."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from megapipe.kernels.reference import bias_dropout_residual as fused_reference
from megapipe.kernels.reference import dropout as reference
from tests.kernels.apply_checks import check_compiled, check_layout, results
from tests.kernels.cases import DEVICE, DTYPES, LAYOUTS, draw, needs_triton
from tests.kernels.dropout_checks import PROBABILITY, check_fused, check_mask, fused, fused_inputs, token_keys


@pytest.fixture
def fused_op() -> ModuleType:
    from megapipe.kernels.triton_backend import bias_dropout_residual

    return bias_dropout_residual


@pytest.fixture
def dropout_op() -> ModuleType:
    from megapipe.kernels.triton_backend import dropout

    return dropout


@needs_triton
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**64 - 1),
    ordinals=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
    site=st.integers(0, 2**32 - 1),
    first=st.integers(0, 2**31 - 40),
    probability=st.floats(0.0, 0.999),
)
def test_masks_are_the_reference_s(seed: int, ordinals: list[int], site: int, first: int, probability: float) -> None:
    """Those of numpy, therefore, which tests/kernels/test_reference.py holds the reference to."""
    from megapipe.kernels.triton_backend import dropout

    keys = reference.token_keys(seed, torch.tensor(ordinals), reference.site_word(site), 9).unsqueeze(-1).to(DEVICE)
    channels = torch.arange(first, first + 33, dtype=torch.int32, device=DEVICE)
    check_mask(dropout, torch.ones(len(ordinals), 9, 33, device=DEVICE), keys, channels, probability)


@needs_triton
@pytest.mark.parametrize("texts", [1, 2])
def test_heads_have_channels_of_their_own(dropout_op: ModuleType, texts: int) -> None:
    """As attention weights [b, heads, s, s] are dropped; and with an axis more."""
    heads, length, first_head = 3, 17, 5
    channels = torch.arange(heads * length, dtype=torch.int32, device=DEVICE) + first_head * length
    keys, x = token_keys(texts, length, DEVICE)[:, None, :, None], draw(texts, heads, length, length).to(DEVICE)
    check_mask(dropout_op, x.float(), keys, channels.view(heads, 1, length), PROBABILITY)
    wider = x.float().unsqueeze(1).expand(-1, 2, -1, -1, -1)
    check_mask(dropout_op, wider, keys.unsqueeze(1), channels.view(heads, 1, length), PROBABILITY)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 30, 7), (2, 3, 1000), (1, 1, 4100), (1, 300, 1)], ids=str)
def test_no_less_exact_than_torch(
    fused_op: ModuleType, shape: tuple[int, int, int], with_bias: bool, dtype: torch.dtype
) -> None:
    check_fused(fused_op, shape, dtype, DEVICE, with_bias)


@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_in_memory(fused_op: ModuleType, layout) -> None:  # type: ignore[no-untyped-def]
    inputs = fused_inputs((2, 3, 40), torch.bfloat16, DEVICE, True)
    check_layout(fused(fused_op, token_keys(2, 3, DEVICE), True), inputs, 40, layout)


@needs_triton
def test_no_rows(fused_op: ModuleType) -> None:
    function = fused(fused_op, token_keys(2, 0, DEVICE), True)
    inputs = fused_inputs((2, 0, 8), torch.float32, DEVICE, True)
    y, dx, _, dbias = results(function, inputs, inputs[0])
    assert y.shape == dx.shape == (2, 0, 8)
    assert not dbias.any()


@needs_triton
def test_nan_reaches_the_result_even_where_it_is_dropped(fused_op: ModuleType) -> None:
    keys = token_keys(1, 2, DEVICE)
    x, residual = torch.full((1, 2, 16), torch.nan, device=DEVICE), torch.ones(1, 2, 16, device=DEVICE)
    for op in (fused_op, fused_reference):
        assert op.apply(x, None, residual, keys, PROBABILITY).isnan().all()


@needs_triton
def test_compilers_see_through(fused_op: ModuleType) -> None:
    function = fused(fused_op, token_keys(2, 3, DEVICE), True)
    check_compiled(function, fused_inputs((2, 3, 16), torch.float32, DEVICE, True), 16)


def test_the_reference_has_the_right_gradient() -> None:
    leaves = [draw(2, 3, 4).requires_grad_(), draw(2, 3, 4, seed=1).requires_grad_(), draw(4).requires_grad_()]
    assert gradcheck(fused(fused_reference, token_keys(2, 3, "cpu"), True), leaves)
    keys = token_keys(2, 3, "cpu")
    without = fused_reference.apply(leaves[0], None, leaves[1], keys, PROBABILITY)
    dropped = reference.apply(leaves[0], keys.unsqueeze(-1), torch.arange(4, dtype=torch.int32), PROBABILITY)
    assert torch.equal(without, leaves[1] + dropped)
