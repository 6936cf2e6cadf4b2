"""The short way into autograd's engine does what torch's own front does."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from megapipe.layers.split import accumulate, gradient_edge, gradients_of


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
    layer = nn.Linear(6, 8)
    x = torch.randn(3, 6)
    upstream = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 6)]
    expected_leaf = x.clone().requires_grad_()
    torch.autograd.backward(outputs_of(expected_leaf, layer), upstream)
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    outputs = outputs_of(leaf, layer)
    accumulate([gradient_edge(output) for output in outputs] if as_edges else outputs, upstream)
    assert leaf.grad is not None
    assert expected_leaf.grad is not None
    assert torch.equal(leaf.grad, expected_leaf.grad)
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)
    leaf = x.clone().requires_grad_()
    unused = torch.zeros(1, requires_grad=True)
    outputs = outputs_of(leaf, layer)
    places = [gradient_edge(output) for output in outputs] if as_edges else outputs
    actual, nothing = gradients_of([leaf, unused], places, upstream)
    assert nothing is None
    assert actual is not None
    assert torch.equal(actual, expected_leaf.grad)


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
