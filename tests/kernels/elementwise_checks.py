"""Checks of ops with one differentiable function: activations, rotary positions, dropout with a residual."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.kernels.reference import dropout as reference_dropout
from megapipe.kernels.registry import Implementation
from tests.kernels.cases import assert_as_exact_as_torch, assert_same_bits, draw, implementation

Function = Callable[..., Tensor]
ACTIVATIONS = ["gelu none", "gelu tanh", "bias_gelu none", "bias_gelu tanh", "swiglu"]
ROTARY = ["rotary"]
DROPOUT = ["dropout", "dropout with bias"]
PROBABILITY = 0.3


@dataclass(frozen=True)
class Case:
    """An op of one backend, the reference, and float inputs. width: of the result's rows."""

    function: Function
    reference: Function
    inputs: list[Tensor]
    width: int

    def gradient(self, seed: int = 9) -> Tensor:
        x = self.inputs[0]
        return draw(*x.shape[:-1], self.width, seed=seed, dtype=x.dtype, device=x.device.type)


def case(kind: str, shape: Sequence[int], dtype: torch.dtype, device: str, backend: str = "triton") -> Case:
    """Return an op whose result has this shape: [b, s, heads, d] of rotary, [b, s, h] of dropout."""
    name, _, form = kind.partition(" ")
    op = {"dropout": "bias_dropout_residual"}.get(name, name)
    sizes = {"swiglu": [[*shape[:-1], 2 * shape[-1]]], "bias_gelu": [shape, shape[-1:]]}.get(name, [shape])
    if name == "dropout":
        sizes = [shape, shape, shape[-1:]] if form else [shape, shape]
    ours, theirs = (_function(implementation(op, each), name, form, shape, device) for each in (backend, "reference"))
    drawn = [draw(*each, seed=seed, dtype=dtype, device=device) for seed, each in enumerate(sizes)]
    return Case(ours, theirs, drawn, shape[-1])


def _function(op: Implementation, name: str, form: str, shape: Sequence[int], device: str) -> Function:
    if name == "swiglu":
        return op.apply
    if name.endswith("gelu"):
        return lambda *inputs: op.apply(*inputs, form)
    if name == "rotary":
        cosine, sine = angles(shape[1], shape[3] // 2, device)
        return lambda x: op.apply(x, *_as_wide(x, cosine, sine))
    keys = token_keys(shape[0], shape[1], device)
    return lambda x, residual, bias=None: op.apply(x, bias, residual, keys, PROBABILITY)


def angles(num_tokens: int, pairs: int, device: str) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [s, d/2] in fp32, the same angles for every dtype of x."""
    turns = draw(num_tokens, pairs, seed=5, device=device) * 3
    return turns.cos().float(), turns.sin().float()


def _as_wide(x: Tensor, *tables: Tensor) -> list[Tensor]:
    return [table.to(torch.float64 if x.dtype == torch.float64 else torch.float32) for table in tables]


def token_keys(texts: int, num_tokens: int, device: str) -> Tensor:
    """Return dropout's keys of tokens: int32 [b, s]."""
    return reference_dropout.token_keys(7, torch.arange(texts), reference_dropout.site_word(2), num_tokens).to(device)


def results(function: Function, inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """Return the value of a function and the gradients of its inputs, all of which are float tensors."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.view(y.shape))]


def check_exactness(chosen: Case) -> None:
    """Compare errors with twice torch's own, in values and gradients, and the bits of two runs.

    A dropout that dropped other elements than the reference would have an error of order 1.
    """
    dy = chosen.gradient()
    ours = results(chosen.function, chosen.inputs, dy)
    torchs = results(chosen.reference, chosen.inputs, dy)
    exact = results(chosen.reference, [x.double() for x in chosen.inputs], dy.double())
    for one, other, truth in zip(ours, torchs, exact, strict=True):
        assert_as_exact_as_torch(one, other, truth)
    check_same_results(chosen, chosen.function, chosen.inputs)


def check_same_results(
    chosen: Case, function: Function, inputs: Sequence[Tensor], layout: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Compare the bits of another run: of a compiled function, or with inputs and gradient laid out otherwise."""
    dy = chosen.gradient()
    others = results(function, inputs, layout(dy) if layout else dy)
    for first, second in zip(results(chosen.function, chosen.inputs, dy), others, strict=True):
        assert_same_bits(first, second)


def check_mask(op: Implementation, x: Tensor, keys: Tensor, channels: Tensor, probability: float) -> None:
    """Compare dropout's zeros with the reference's, forward and backward, and the values elsewhere."""
    runs = [
        results(lambda x, op=each: op.apply(x, keys, channels, probability), [x], torch.ones_like(x))
        for each in (op, implementation("dropout", "reference"))
    ]
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours == 0, theirs == 0)
        torch.testing.assert_close(ours, theirs)
