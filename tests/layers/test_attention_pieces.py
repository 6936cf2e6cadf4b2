"""One piece of attention, with kernels and without, against float64."""

import math

import pytest
import torch
from torch import Tensor

from megapipe.layers.attention_pieces import Seen, Weighing, piece_backward, piece_forward

SCALE = 0.3
CASES = pytest.mark.parametrize("what", ["all", "causal", "masked"])


def inputs(device: str, dtype: torch.dtype, rows: int, columns: int, width: int) -> list[Tensor]:
    """Gradient and query of four heads, key and value of two."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, rows, width)] * 2 + [(2, 2, columns, width)] * 2
    return [torch.randn(each, generator=generator).to(device, dtype) for each in shapes]


def seen_of(what: str, device: str, rows: int, columns: int) -> Seen:
    if what != "masked":
        return Seen(causal=what == "causal")
    visible = torch.rand(2, 1, rows, columns, generator=torch.Generator().manual_seed(4)) < 0.5
    visible[0, :, 1] = False  # a query that sees nothing
    return Seen(visible=visible.to(device))


def definition(tensors: list[Tensor], seen: Seen) -> list[Tensor]:
    """Mixed values, log-sum, and gradients of query, key and value."""
    gradient, *leaves = (each.double().requires_grad_() for each in tensors)
    query, key, value = leaves
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) * SCALE
    rows, columns = scores.shape[-2:]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=scores.device)
    visible = visible.tril() if seen.causal else visible
    visible = visible if seen.visible is None else seen.visible
    scores = scores.masked_fill(~visible, -math.inf)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.masked_fill(log_sum == -math.inf, 0.0)[..., None]).exp()
    mixed = weights @ value.repeat_interleave(2, dim=1)
    return [mixed.detach(), log_sum.detach(), *torch.autograd.grad(mixed, leaves, gradient)]


def check(device: str, what: str, unfused: bool, dtype: torch.dtype, size: int, width: int, tolerance: float) -> None:
    rows, columns = (size, size) if what == "causal" else (size, size - 3)
    tensors, seen = inputs(device, dtype, rows, columns, width), seen_of(what, device, rows, columns)
    how = Weighing(SCALE, unfused=unfused)
    gradient, query, key, value = tensors
    mixed, log_sum = piece_forward(query, key, value, seen, how)
    finite = log_sum.masked_fill(log_sum == -math.inf, 0.0)
    actual = [mixed, log_sum, *piece_backward(gradient, query, key, value, mixed, finite, seen, how)]
    expected = definition(tensors, seen)
    assert torch.equal(actual[1] == -math.inf, expected[1] == -math.inf)
    for one, other in zip(actual, expected, strict=True):
        one, other = (each.double().masked_fill(each == -math.inf, 0.0) for each in (one, other))
        assert (one - other).norm() <= tolerance * other.norm()


@CASES
@pytest.mark.parametrize("unfused", [False, True])
def test_pieces_on_a_cpu(what: str, unfused: bool) -> None:
    check("cpu", what, unfused, torch.float64, 9, 8, 1e-12)


@pytest.mark.gpu
@CASES
@pytest.mark.parametrize("unfused", [False, True])
def test_pieces_on_a_gpu(what: str, unfused: bool) -> None:
    check("cuda", what, unfused, torch.bfloat16, 300, 64, 2e-2)
