"""Requirements of masked softmax backends, on any device."""

import torch
from torch import Tensor

from megapipe.kernels.reference import attention as reference_attention
from megapipe.kernels.registry import Implementation
from tests.kernels.cases import Layout, as_is, assert_as_exact_as_torch, assert_same_bits, draw, implementation

SCALE = 0.125

MASKS = ["none", "padding", "general", "hidden"]

SHAPES = [(2, 3, 5, 7), (1, 1, 1, 1), (2, 2, 3, 64), (1, 2, 40, 33), (1, 1, 2, 5000)]
"""Odd lengths, one key, one vector, several programs, one row a program."""

LONG = (1, 2, 1, 20001)
"""Rows that are read in chunks."""


def mask_of(kind: str, shape: tuple[int, ...], device: str) -> Tensor | None:
    """padding: [b, 1, 1, k]. general: [1, heads, q, k]. hidden: [q, 1], where every other row sees nothing."""
    batch, heads, queries, keys = shape
    if kind == "none":
        return None
    if kind == "padding":
        lengths = 1 + torch.arange(batch).view(batch, 1, 1, 1) * 3 + keys // 2
        return (torch.arange(keys) < lengths).to(device)
    if kind == "hidden":
        return (torch.arange(queries) % 2 == 1).unsqueeze(1).to(device)
    return (draw(1, heads, queries, keys, seed=9) > -0.5).to(device)


def torchs(scores: Tensor, hidden: Tensor) -> Tensor:
    """The same softmax in torch, without this op."""
    return torch.softmax((scores * SCALE).masked_fill(hidden, -torch.inf), -1).masked_fill(hidden, 0)


def check_against_double(
    module: Implementation,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    mask: str = "none",
    causal: bool = False,
    window: int | None = None,
    layout: Layout = as_is,
    spread: float = 8.0,
) -> None:
    """Weights and gradient of the scores."""
    scores = layout(draw(*shape, dtype=dtype, device=device) * spread)
    dy = layout(draw(*shape, seed=1, dtype=dtype, device=device))
    visible = mask_of(mask, shape, device)
    # The reference's masks are right: its own tests compare them with loops.
    hidden = reference_attention.softmax_forward(torch.ones_like(scores), visible, 1.0, causal, window) == 0
    low, exact = scores.detach().clone().requires_grad_(), scores.double().requires_grad_()
    expected = [torchs(leaf, hidden) for leaf in (low, exact)]
    y = module.forward(scores, visible, SCALE, causal, window)
    assert_as_exact_as_torch(y, *expected)
    assert not y[hidden].any()
    gradients = [
        torch.autograd.grad(result, leaf, dy.to(result.dtype))[0]
        for result, leaf in zip(expected, (low, exact), strict=True)
    ]
    # From torch's weights, so that the errors of the two directions do not add up.
    assert_as_exact_as_torch(module.input_gradient(dy, expected[0].detach(), SCALE), *gradients)


def check_rules(
    module: Implementation, shape: tuple[int, ...], dtype: torch.dtype, device: str, keys: int = 24
) -> None:
    """Check two runs of scores with this shape, special numbers among `keys` keys, empty scores, and autograd."""
    check_two_runs(module, shape, dtype, device)
    check_special_values(module, keys, device)
    check_empty(module, device)
    check_autograd(module, device)


def check_two_runs(module: Implementation, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """The same bits twice."""
    scores = draw(*shape, dtype=dtype, device=device)
    mask = mask_of("general", shape, device)
    first, second = (module.forward(scores, mask, SCALE, True, None) for _ in range(2))
    assert_same_bits(first, second)
    assert_same_bits(*(module.input_gradient(scores, first, SCALE) for _ in range(2)))


def check_special_values(module: Implementation, keys: int, device: str) -> None:
    """NaN and infinities act in their row alone, hidden ones nowhere; rows that see nothing, or nothing finite: 0."""
    scores = draw(1, 1, 6, keys, dtype=torch.float32, device=device)
    mask = torch.ones(6, keys, dtype=torch.bool, device=device)
    mask[0, 1:] = False
    mask[1] = False
    mask[2, 3] = False
    clean = module.forward(scores, mask, 1.0, False, None)
    poisoned = scores.clone()
    poisoned[0, 0, 0, 0] = torch.nan
    poisoned[0, 0, 1] = torch.nan
    poisoned[0, 0, 2, 3] = torch.inf
    poisoned[0, 0, 3, 5] = torch.inf
    poisoned[0, 0, 4] = -torch.inf
    y = module.forward(poisoned, mask, 1.0, False, None)[0, 0]
    assert y[0, 0].isnan()
    assert not y[1].any()
    assert_same_bits(y[2], clean[0, 0, 2])
    assert y[3, 5].isnan()
    assert not y[4].any()
    assert_same_bits(y[5], clean[0, 0, 5])


def check_empty(module: Implementation, device: str) -> None:
    """No batch, no queries, no keys."""
    for shape in [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)]:
        scores = torch.empty(shape, device=device)
        y = module.forward(scores, None, SCALE, True, None)
        assert module.input_gradient(y, y, SCALE).shape == y.shape == shape


def check_autograd(module: Implementation, device: str) -> None:
    """The forward is differentiable, and gives what the backward gives."""
    scores = draw(1, 2, 5, 7, dtype=torch.float32, device=device).requires_grad_()
    dy = draw(1, 2, 5, 7, seed=1, dtype=torch.float32, device=device)
    y = module.forward(scores, None, SCALE, True, 3)
    (actual,) = torch.autograd.grad(y, scores, dy)
    assert_same_bits(actual, module.input_gradient(dy, y.detach(), SCALE))


def check_attention_probabilities(module: Implementation, dtype: torch.dtype, window: int | None, device: str) -> None:
    """Against the reference, which does the product and the masks in one step: weights and both gradients."""
    query, key = draw(2, 3 * 6, 4, dtype=dtype, device=device), draw(2, 6, 4, seed=1, dtype=dtype, device=device)
    exact = reference_attention.attention_probabilities(query.double(), key.double(), 0.3, window)
    actual = module.apply(query, key, 0.3, window)
    assert_as_exact_as_torch(actual, reference_attention.attention_probabilities(query, key, 0.3, window), exact)
    leaves = [tensor.float().requires_grad_() for tensor in (query, key)]
    dy = draw(*actual.shape, seed=2, dtype=torch.float32, device=device)
    ours, theirs = (
        torch.autograd.grad(entry.apply(*leaves, 0.3, window), leaves, dy)
        for entry in (module, implementation("attention_probabilities", "reference"))
    )
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
