"""The references' residual forms, whole backwards and masked softmax, in float64 against autograd and brute force."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from megapipe.kernels.reference import layer_norm, rms_norm, softmax
from tests.kernels.cases import draw


@pytest.mark.parametrize(("module", "num_parameters"), [(layer_norm, 2), (rms_norm, 1)])
def test_norm_of_a_sum(module: object, num_parameters: int) -> None:
    x, residual, *parameters = (
        draw(3, 5, 8),
        draw(3, 5, 8, seed=1),
        *(draw(8, seed=2 + i) for i in range(num_parameters)),
    )
    leaves = [tensor.requires_grad_() for tensor in (x, residual, *parameters)]
    assert gradcheck(lambda *inputs: module.add_forward(*inputs, 1e-5)[:2], leaves)
    y, total, *statistics = module.add_forward(*leaves, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, module.forward(total, *parameters, 1e-5)[0])
    dy, dtotal = draw(3, 5, 8, seed=5), draw(3, 5, 8, seed=6)
    expected = torch.autograd.grad([y, total], leaves, [dy, dtotal])
    with torch.no_grad():
        dx, *gradients = module.backward(dy, total, *statistics, parameters[0], dtotal)
    for found, exact in zip([dx, dx, *gradients], expected, strict=True):
        assert torch.allclose(found, exact, rtol=1e-12, atol=1e-12)


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
@pytest.mark.parametrize("mask", MASKS)
def test_masked_softmax(mask: str, causal: bool, window: int | None) -> None:
    scores = draw(2, 3, 4, 6).requires_grad_()
    found = softmax.forward(scores, MASKS[mask], 0.3, causal, window)
    assert torch.allclose(found, by_hand(scores.detach(), MASKS[mask], 0.3, causal, window), rtol=1e-12, atol=0)
    assert gradcheck(lambda leaf: softmax.forward(leaf, MASKS[mask], 0.3, causal, window), scores)
    dy = draw(2, 3, 4, 6, seed=1)
    (expected,) = torch.autograd.grad(found, scores, dy)
    assert torch.allclose(softmax.input_gradient(dy, found.detach(), 0.3), expected, rtol=1e-12, atol=1e-15)


def test_more_queries_than_keys_leave_the_first_ones_blind() -> None:
    found = softmax.forward(draw(1, 1, 5, 3), None, 1.0, True, None)
    assert not found[0, 0, :2].any()
    assert torch.allclose(found[0, 0, 2:].sum(-1), torch.ones(3, dtype=torch.float64))


def test_hidden_scores_matter_in_nothing() -> None:
    scores, mask = draw(1, 1, 2, 4), torch.tensor([True, False, True, False])
    expected = softmax.forward(scores, mask, 1.0, False, None)
    for poison in (torch.nan, torch.inf):
        poisoned = scores.masked_fill(~mask, poison)
        assert torch.equal(softmax.forward(poisoned, mask, 1.0, False, None), expected)


def test_wrong_arguments_are_told() -> None:
    scores = draw(1, 2, 4, 6)
    with pytest.raises(ValueError, match=r"\[2, 4, 6\], not \[batch, heads"):
        softmax.forward(scores[0], None, 1.0, False, None)
    with pytest.raises(ValueError, match=r"torch\.float64, not torch\.bool"):
        softmax.forward(scores, scores, 1.0, False, None)
    with pytest.raises(ValueError, match=r"mask of \[3, 2, 4, 6\]"):
        softmax.forward(scores, torch.ones(3, 2, 4, 6, dtype=torch.bool), 1.0, False, None)
    with pytest.raises(ValueError, match="window is 3 and causal False"):
        softmax.forward(scores, None, 1.0, False, 3)
    with pytest.raises(ValueError, match="window is 0"):
        softmax.forward(scores, None, 1.0, True, 0)
