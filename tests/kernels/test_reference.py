"""References of norms and attention in float64, against torch, autograd and brute force."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from megapipe.kernels.reference import attention as reference_attention
from tests.kernels import norm_checks, softmax_checks
from tests.kernels.cases import DTYPES, draw, implementation
from tests.kernels.norm_checks import Norm

NORMS = [
    Norm(op, implementation(op, "reference"))
    for op in ("layer_norm", "layer_norm_without_bias", "rms_norm", "rms_norm_unit_offset")
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (15, 1000)], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_norms_have_errors_like_torchs(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm_checks.check_against_double(norm, shape, dtype, "cpu")


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_norms_of_sums_have_the_gradient_of_finite_differences(norm: Norm) -> None:
    leaves = [draw(3, 5, 8), draw(3, 5, 8, seed=1), *norm.parameters(8, torch.float64, "cpu")]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert gradcheck(lambda *inputs: norm.module.add_forward(*inputs, 1e-5)[:2], leaves)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_probabilities(window: int | None, heads: int) -> None:
    length, width = 6, 4
    query, key = draw(2, heads, length, width), draw(2, length, width, seed=1)
    actual = reference_attention.attention_probabilities(query.flatten(1, 2), key, 0.3, window).view(
        2, heads, length, length
    )
    for row in range(length):
        first = 0 if window is None else max(0, row + 1 - window)
        scores = 0.3 * torch.einsum("nhd,nkd->nhk", query[:, :, row], key[:, first : row + 1])
        assert torch.allclose(actual[:, :, row, first : row + 1], scores.softmax(-1))
        assert not actual[:, :, row, :first].any()
        assert not actual[:, :, row, row + 1 :].any()
    leaves = [query.flatten(1, 2).requires_grad_(), key.requires_grad_()]
    assert gradcheck(lambda q, k: reference_attention.attention_probabilities(q, k, 0.3, window), leaves)


def by_hand(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Row by row, over the keys that are seen."""
    _, _, queries, keys = scores.shape
    result = torch.zeros_like(scores)
    for batch, head, query in torch.cartesian_prod(*(torch.arange(size) for size in scores.shape[:3])).tolist():
        position = query + keys - queries
        seen = [
            key
            for key in range(keys)
            if (mask is None or mask.expand(scores.shape)[batch, head, query, key])
            and (not causal or key <= position)
            and (window is None or key > position - window)
        ]
        weights = [math.exp(scale * scores[batch, head, query, key].item()) for key in seen]
        for key, weight in zip(seen, weights, strict=True):
            result[batch, head, query, key] = weight / sum(weights)
    return result


MASKS = {
    "none": None,
    "padding": torch.arange(6).view(1, 1, 1, 6) < torch.tensor([6, 2]).view(2, 1, 1, 1),
    "general": torch.rand(2, 3, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.6,
    "everything hidden": torch.zeros(1, 1, 4, 6, dtype=torch.bool),
}


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 1), (True, 3), (True, 100)])
@pytest.mark.parametrize(("mask", "shape"), [*((mask, (2, 3, 4, 6)) for mask in MASKS), ("none", (1, 1, 5, 3))])
def test_masked_softmax(mask: str, shape: tuple[int, ...], causal: bool, window: int | None) -> None:
    """With fewer keys than queries, the first queries see nothing."""
    scores = draw(*shape).requires_grad_()
    actual = reference_attention.softmax_forward(scores, MASKS[mask], 0.3, causal, window)
    assert torch.allclose(actual, by_hand(scores.detach(), MASKS[mask], 0.3, causal, window), rtol=1e-12, atol=0)
    assert gradcheck(lambda leaf: reference_attention.softmax_forward(leaf, MASKS[mask], 0.3, causal, window), scores)
    dy = draw(*shape, seed=1)
    (expected,) = torch.autograd.grad(actual, scores, dy)
    assert torch.allclose(
        reference_attention.softmax_input_gradient(dy, actual.detach(), 0.3), expected, rtol=1e-12, atol=1e-15
    )


def test_special_scores_and_empty_ones() -> None:
    softmax = implementation("softmax", "reference")
    softmax_checks.check_special_values(softmax, 24, "cpu")
    softmax_checks.check_empty(softmax, "cpu")


def test_wrong_arguments_are_refused() -> None:
    scores = draw(1, 2, 4, 6)
    with pytest.raises(ValueError, match=r"\[2, 4, 6\], not \[batch, heads"):
        reference_attention.softmax_forward(scores[0], None, 1.0, False, None)
    with pytest.raises(ValueError, match=r"torch\.float64, not torch\.bool"):
        reference_attention.softmax_forward(scores, scores, 1.0, False, None)
    with pytest.raises(ValueError, match=r"mask of \[3, 2, 4, 6\]"):
        reference_attention.softmax_forward(scores, torch.ones(3, 2, 4, 6, dtype=torch.bool), 1.0, False, None)
    with pytest.raises(ValueError, match="window is 3 and causal False"):
        reference_attention.softmax_forward(scores, None, 1.0, False, 3)
    with pytest.raises(ValueError, match="window is 0"):
        reference_attention.softmax_forward(scores, None, 1.0, True, 0)
