"""Torch reference backends against float64, gradcheck and the numpy reference of the dropout bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional

from megapipe.kernels.reference import (
    attention_probabilities,
    cross_entropy,
    dropout,
    layer_norm,
    rms_norm,
    rotary,
    swiglu,
)
from megapipe.random.dropout import dropout_bits, keep_threshold

LOW = [torch.float32, torch.bfloat16]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("width", [7, 64, 1000])
def test_layer_norm_against_double(dtype: torch.dtype, width: int) -> None:
    x, weight, bias, dy = (t.to(dtype) for t in (draw(3, 5, width) + 2, draw(width), draw(width), draw(3, 5, width)))
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = functional.layer_norm(exact[0], (width,), *exact[1:], eps=1e-5)
    expected.backward(dy.double())
    y, mean, rstd = layer_norm.forward(x, weight, bias, 1e-5)
    dx = layer_norm.input_gradient(dy, x, mean, rstd, weight)
    dweight, dbias = layer_norm.weight_gradient(dy, x, mean, rstd, weight)
    compare([y, dx, dweight, dbias], [expected, *(t.grad for t in exact)], dtype)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("width", [7, 64, 1000])
def test_rms_norm_against_double(dtype: torch.dtype, width: int) -> None:
    x, weight, dy = (t.to(dtype) for t in (draw(3, 5, width) + 2, draw(width), draw(3, 5, width)))
    exact = [t.double().requires_grad_() for t in (x, weight)]
    expected = functional.rms_norm(exact[0], (width,), exact[1], eps=1e-5)
    expected.backward(dy.double())
    y, rstd = rms_norm.forward(x, weight, 1e-5)
    dx = rms_norm.input_gradient(dy, x, rstd, weight)
    (dweight,) = rms_norm.weight_gradient(dy, x, rstd, weight)
    compare([y, dx, dweight], [expected, *(t.grad for t in exact)], dtype)


def compare(found: list[Tensor], expected: list[Tensor | None], dtype: torch.dtype) -> None:
    """In the input's dtype, and within a few roundings of the largest element."""
    for ours, exact in zip(found, expected, strict=True):
        assert exact is not None
        assert ours.dtype == dtype
        scale = max(exact.abs().max().item(), 1.0)
        assert (ours.double() - exact).abs().max() <= 8 * epsilon(dtype) * scale


def test_swiglu() -> None:
    x = draw(2, 3, 8).requires_grad_()
    gate, up = x.chunk(2, -1)
    assert torch.equal(swiglu.apply(x), functional.silu(gate) * up)
    assert gradcheck(swiglu.apply, x)


def test_rotary_turns_pairs_and_back() -> None:
    x = draw(2, 5, 3, 8).requires_grad_()
    angles = draw(5, 4)
    cosine, sine = angles.cos(), angles.sin()
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    assert torch.allclose(rotary.apply(x, cosine, sine), torch.cat([pairs.real, pairs.imag], -1))
    assert gradcheck(lambda t: rotary.apply(t, cosine, sine), x)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_probabilities(window: int | None, heads: int) -> None:
    length, width = 6, 4
    query, key = draw(2, heads, length, width), draw(2, length, width, seed=1)
    found = attention_probabilities.apply(query.flatten(1, 2), key, 0.3, window).view(2, heads, length, length)
    for row in range(length):
        first = 0 if window is None else max(0, row + 1 - window)
        scores = 0.3 * torch.einsum("nhd,nkd->nhk", query[:, :, row], key[:, first : row + 1])
        assert torch.allclose(found[:, :, row, first : row + 1], scores.softmax(-1))
        assert not found[:, :, row, :first].any()
        assert not found[:, :, row, row + 1 :].any()
    leaves = [query.flatten(1, 2).requires_grad_(), key.requires_grad_()]
    assert gradcheck(lambda q, k: attention_probabilities.apply(q, k, 0.3, window), leaves)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    ordinals=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
    site=st.integers(0, 2**32 - 1),
    first=st.integers(0, 2**31 - 40),
    probability=st.floats(0.0, 0.999),
)
def test_dropout_masks_are_the_numpy_reference_s(
    seed: int, ordinals: list[int], site: int, first: int, probability: float
) -> None:
    channels = np.arange(first, first + 33)
    expected = dropout_bits(seed, ordinals, site, np.arange(9), channels) >= keep_threshold(probability)
    keys = dropout.token_keys(seed, torch.tensor(ordinals), dropout.site_word(site), 9).unsqueeze(-1)
    found = dropout.keep_mask(keys, torch.from_numpy(channels).to(torch.int32), probability)
    assert np.array_equal(found.numpy(), expected)


def test_dropout_scales_what_it_keeps() -> None:
    x = torch.ones(2, 50, 40, requires_grad=True)
    keys = dropout.token_keys(1, torch.tensor([0, 1]), dropout.site_word(2), 50).unsqueeze(-1)
    y = dropout.apply(x, keys, torch.arange(40, dtype=torch.int32), 0.25)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((y == 0).double().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / x.numel())
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_halves_without_an_exchange(dtype: torch.dtype) -> None:
    logits = (draw(7, 33) * 5).to(dtype)
    targets = torch.arange(7) * 4
    exact = logits.double().clone().requires_grad_()
    losses = functional.cross_entropy(exact, targets, reduction="none")
    losses.sum().backward()
    softmax = torch.empty_like(logits)
    everything = torch.ones(7, dtype=torch.bool)
    log_sum_exp, target = cross_entropy.row_statistics(logits, targets, everything, softmax)
    cross_entropy.logit_gradient(softmax, targets, everything, None)
    assert (log_sum_exp - target - losses).abs().max() <= (1e-12 if dtype == torch.float64 else 1e-5)
    assert (softmax.double() - exact.grad).abs().max() <= 2 * epsilon(dtype)


def test_cross_entropy_of_far_logits_stays_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    targets = torch.tensor([1, 0])
    log_sum_exp, target = cross_entropy.row_statistics(logits, targets, torch.ones(2, dtype=torch.bool), None)
    assert torch.allclose(log_sum_exp - target, torch.tensor([2e4, math.log(3)]), atol=2e-3)
