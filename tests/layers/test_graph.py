"""The short way into autograd's engine does what torch's own front does."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.layers.split import Place, accumulate, gradient_edge, gradients_of


class Doubled(torch.autograd.Function):
    """A node in Python."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def outputs_of(x: Tensor, layer: nn.Linear) -> tuple[Tensor, ...]:
    """One output by a node in C++ with two outputs, one by a node in Python, one leaf."""
    first, second = layer(torch.tanh(x)).chunk(2, dim=-1)
    return first, second, Doubled.apply(first * second), x


@pytest.mark.parametrize("as_edges", [False, True])
def test_equals_torch(as_edges: bool) -> None:
    torch.manual_seed(0)
    layer, x, unused = nn.Linear(6, 8), torch.randn(3, 6), torch.zeros(1, requires_grad=True)
    upstream = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 6)]
    first, second, third = (x.clone().requires_grad_() for _ in range(3))

    def places(leaf: Tensor) -> Sequence[Place]:
        outputs = outputs_of(leaf, layer)
        return [gradient_edge(output) for output in outputs] if as_edges else outputs

    def gradients(leaf: Tensor) -> list[Any]:
        return [leaf.grad, *(parameter.grad for parameter in layer.parameters())]

    torch.autograd.backward(outputs_of(first, layer), upstream)
    expected = gradients(first)
    layer.zero_grad()
    accumulate(places(second), upstream)
    for actual, gradient in zip(gradients(second), expected, strict=True):
        assert torch.equal(actual, gradient)
    gradient, nothing = gradients_of([third, unused], places(third), upstream)
    assert nothing is None
    assert torch.equal(gradient, expected[0])


def test_a_gradient_of_another_shape_is_refused() -> None:
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        accumulate([gradient_edge(x * 2)], [torch.zeros(4)])


@pytest.mark.parametrize("in_python", [False, True])
def test_edges_outlive_their_tensors_and_never_vice_versa(in_python: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    output = Doubled.apply(x) if in_python else x * 2
    edge, memory = gradient_edge(output), weakref.ref(output)
    del output
    gc.collect()
    assert memory() is None
    accumulate([edge], [torch.full((3,), 5.0)])
    assert x.grad is not None
    assert x.grad.tolist() == [10.0, 10.0, 10.0]
