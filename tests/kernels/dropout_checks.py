"""Checks of dropout backends: the reference's mask, and values and gradients no less exact than torch's."""

from types import ModuleType

import torch
from torch import Tensor

from megapipe.kernels.reference import bias_dropout_residual as fused_reference
from megapipe.kernels.reference import dropout as reference
from tests.kernels.apply_checks import Function, check_exactness
from tests.kernels.cases import draw

PROBABILITY = 0.3


def token_keys(texts: int, num_tokens: int, device: str) -> Tensor:
    """int32 [b, s]."""
    return reference.token_keys(7, torch.arange(texts), reference.site_word(2), num_tokens).to(device)


def fused(op: ModuleType, keys: Tensor, with_bias: bool) -> Function:
    """bias_dropout_residual as a function of its float tensors."""
    if with_bias:
        return lambda x, residual, bias: op.apply(x, bias, residual, keys, PROBABILITY)
    return lambda x, residual: op.apply(x, None, residual, keys, PROBABILITY)


def fused_inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str, with_bias: bool) -> list[Tensor]:
    """x [b, s, h], residual [b, s, h] and, if asked for, bias [h]."""
    shapes = [shape, shape, shape[-1:]] if with_bias else [shape, shape]
    return [draw(*sizes, seed=seed, dtype=dtype, device=device) for seed, sizes in enumerate(shapes)]


def check_fused(op: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype, device: str, with_bias: bool) -> None:
    """x [b, s, h]: the same elements are dropped as in the reference, or its error would be of order 1."""
    keys = token_keys(*shape[:2], device)
    ours, theirs = (fused(each, keys, with_bias) for each in (op, fused_reference))
    check_exactness(ours, theirs, fused_inputs(shape, dtype, device, with_bias), shape[-1])


def check_mask(op: ModuleType, x: Tensor, keys: Tensor, channels: Tensor, probability: float) -> None:
    """Zeros exactly where the reference has them, forward and backward; the same values elsewhere."""
    found, expected = [], []
    for backend, results in ((op, found), (reference, expected)):
        leaf = x.clone().requires_grad_()
        y = backend.apply(leaf, keys, channels, probability)
        results.extend([y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y))])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours == 0, theirs == 0)
        torch.testing.assert_close(ours, theirs)
