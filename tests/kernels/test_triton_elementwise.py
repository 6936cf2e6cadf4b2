"""Activations, rotary positions and dropout in Triton, and properties of their references."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from megapipe.kernels import triton_backend
from megapipe.kernels.reference import dropout as reference_dropout
from megapipe.random.bits import dropout_bits, keep_threshold
from tests.kernels.cases import DEVICE, DTYPES, LAYOUTS, draw, each_backend, implementation, needs_triton
from tests.kernels.elementwise_checks import (
    ACTIVATIONS,
    DROPOUT,
    PROBABILITY,
    ROTARY,
    angles,
    case,
    check_exactness,
    check_mask,
    check_same_results,
    results,
    token_keys,
)

SHAPES = [
    *((kind, shape) for kind in ACTIVATIONS for shape in [(30, 5, 7), (2, 3, 1000), (1, 4100), (700, 1)]),
    *(
        (kind, shape)
        for kind in ROTARY
        for shape in [(2, 7, 3, 64), (1, 1, 1, 128), (2, 5, 4, 80), (1, 30, 2, 2), (3, 4, 5, 6)]
    ),
    *((kind, shape) for kind in DROPOUT for shape in [(2, 30, 7), (2, 3, 1000), (1, 1, 4100), (1, 300, 1)]),
]
SMALL = [
    *((kind, (3, 72)) for kind in ACTIVATIONS),
    *((kind, (2, 5, 4, 16)) for kind in ROTARY),
    *((kind, (2, 3, 40)) for kind in DROPOUT),
]

EMPTY = [*((kind, (0, *shape[1:])) for kind, shape in SMALL), (ROTARY[0], (2, 0, 4, 16))]


@needs_triton
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "shape"), SHAPES, ids=str)
def test_errors_are_at_most_twice_torchs(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_exactness(case(kind, shape, dtype, DEVICE))


def exchanged(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x


def joint(x: Tensor) -> Tensor:
    """Heads that are the last ones of a larger tensor."""
    return torch.cat([torch.full_like(x, 9.0), x], dim=-2)[..., x.shape[-2] :, :] if x.dim() > 1 else x


@needs_triton
@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", [*LAYOUTS, exchanged, joint])
@pytest.mark.parametrize(("kind", "shape"), SMALL, ids=str)
def test_layout_in_memory_changes_no_bit(
    kind: str, shape: tuple[int, ...], layout: Callable[[Tensor], Tensor]
) -> None:
    chosen = case(kind, shape, torch.bfloat16, DEVICE)
    check_same_results(chosen, chosen.function, [layout(x) for x in chosen.inputs], layout)


@needs_triton
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "shape"), SMALL, ids=str)
def test_compiled_graphs_have_the_bits_of_eager_calls(kind: str, shape: tuple[int, ...]) -> None:
    chosen = case(kind, shape, torch.float32, DEVICE)
    check_same_results(chosen, torch.compile(chosen.function, fullgraph=True, backend="aot_eager"), chosen.inputs)


@needs_triton
@pytest.mark.parametrize(("kind", "shape"), EMPTY, ids=str)
def test_no_rows(kind: str, shape: tuple[int, ...]) -> None:
    chosen = case(kind, shape, torch.float32, DEVICE)
    y, *gradients = results(chosen.function, chosen.inputs, torch.empty(shape, device=DEVICE))
    assert y.shape == shape
    assert [gradient.shape for gradient in gradients] == [x.shape for x in chosen.inputs]
    assert not any(gradient.any() for gradient in gradients)


@needs_triton
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_numbers_are_nan_and_infinite_where_float64_is(kind: str, dtype: torch.dtype) -> None:
    """The comparison is with float64 because torch's erf of infinity is NaN on the CPU."""
    numbers = [0.0, -0.0, 1e-30, -1e-30, 30.0, -30.0, 1e4, -1e4, torch.inf, torch.nan]
    chosen = case(kind, (1, len(numbers)), dtype, DEVICE)
    inputs = [torch.tensor([numbers * (2 if kind == "swiglu" else 1)], dtype=dtype, device=DEVICE)]
    inputs += [torch.full_like(bias, 0.5) for bias in chosen.inputs[1:]]
    dy = torch.ones(1, len(numbers), dtype=dtype, device=DEVICE)
    exact = results(chosen.reference, [x.double() for x in inputs], dy.double())
    for ours, truth in zip(results(chosen.function, inputs, dy), exact, strict=True):
        relative = 2e-2 if ours.itemsize == 2 else 1e-5
        torch.testing.assert_close(ours, truth.to(ours.dtype), rtol=relative, atol=1e-6, equal_nan=True)


@each_backend
def test_rotation_keeps_a_nan_in_its_pair(backend: str) -> None:
    x = draw(1, 3, 2, 8, dtype=torch.float32, device=DEVICE)
    x[0, 1, 1, 0] = torch.nan
    rotated = implementation("rotary", backend).apply(x, *angles(3, 4, DEVICE))
    assert rotated.isnan().nonzero().tolist() == [[0, 1, 1, 0], [0, 1, 1, 4]]


@needs_triton
def test_an_odd_head_is_refused() -> None:
    from megapipe.kernels.triton_backend.attention import rotary_refusal

    assert "no pairs" in rotary_refusal("cuda", torch.float32, 7)
    assert rotary_refusal("cuda", torch.float32, 8) is None


@each_backend
def test_a_dropped_nan_reaches_the_result(backend: str) -> None:
    keys, x = token_keys(1, 2, DEVICE), torch.full((1, 2, 16), torch.nan, device=DEVICE)
    op = implementation("bias_dropout_residual", backend)
    assert op.apply(x, None, torch.ones_like(x), keys, PROBABILITY).isnan().all()


@needs_triton
@pytest.mark.parametrize("texts", [1, 2])
def test_heads_drop_their_own_channels(texts: int) -> None:
    """Attention weights are [b, heads, s, s]; another axis does not matter."""
    heads, length, first_head = 3, 17, 5
    channels = torch.arange(heads * length, dtype=torch.int32, device=DEVICE) + first_head * length
    keys, x = token_keys(texts, length, DEVICE)[:, None, :, None], draw(texts, heads, length, length).to(DEVICE)
    op = implementation("dropout", "triton")
    check_mask(op, x.float(), keys, channels.view(heads, 1, length), PROBABILITY)
    wider = x.float().unsqueeze(1).expand(-1, 2, -1, -1, -1)
    check_mask(op, wider, keys.unsqueeze(1), channels.view(heads, 1, length), PROBABILITY)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**64 - 1),
    ordinals=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
    site=st.integers(0, 2**32 - 1),
    first=st.integers(0, 2**31 - 40),
    probability=st.floats(0.0, 0.999),
)
def test_dropout_masks_are_those_of_numpy(
    seed: int, ordinals: list[int], site: int, first: int, probability: float
) -> None:
    channels = np.arange(first, first + 33)
    expected = dropout_bits(seed, ordinals, site, np.arange(9), channels) >= keep_threshold(probability)
    tokens = reference_dropout.token_keys(seed, torch.tensor(ordinals), reference_dropout.site_word(site), 9)
    keys, numbers = tokens.unsqueeze(-1).to(DEVICE), torch.from_numpy(channels).to(DEVICE, torch.int32)
    kept = reference_dropout.keep_mask(keys, numbers, probability)
    assert np.array_equal(kept.cpu().numpy(), expected)
    if triton_backend.installed():
        op = implementation("dropout", "triton")
        check_mask(op, torch.ones(len(ordinals), 9, 33, device=DEVICE), keys, numbers, probability)


def test_dropout_scales_what_it_keeps() -> None:
    x = torch.ones(2, 50, 40, requires_grad=True)
    keys = token_keys(2, 50, "cpu").unsqueeze(-1)
    y = reference_dropout.dropout(x, keys, torch.arange(40, dtype=torch.int32), 0.25)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((y == 0).double().mean() - 0.25) < 4 * (0.25 * 0.75 / x.numel()) ** 0.5
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize(("kind", "shape"), [*((k, (3, 4)) for k in ACTIVATIONS), *((k, (2, 3, 4)) for k in DROPOUT)])
def test_references_have_the_gradient_of_finite_differences(kind: str, shape: tuple[int, ...]) -> None:
    chosen = case(kind, shape, torch.float64, "cpu", "reference")
    assert gradcheck(chosen.reference, [x.requires_grad_() for x in chosen.inputs])


def test_fused_dropout_is_the_sum_of_its_parts() -> None:
    x, residual = draw(2, 3, 8), draw(2, 3, 8, seed=1)
    keys = token_keys(2, 3, "cpu")
    dropped = reference_dropout.dropout(x, keys.unsqueeze(-1), torch.arange(8, dtype=torch.int32), PROBABILITY)
    fused = reference_dropout.bias_dropout_residual(x, None, residual, keys, PROBABILITY)
    assert torch.equal(fused, residual + dropped)
