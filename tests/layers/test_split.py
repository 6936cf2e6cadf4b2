"""Split backward against the fused one, bit for bit."""

import gc
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.kernels.ops import OPS
from megapipe.kernels.reference import activations as reference_activations
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.split import (
    Place,
    SplitError,
    SplitTape,
    accumulate,
    gradient_edge,
    gradients_of,
    unsplit_parameters,
)
from tests.layers.bound import DROPOUT, SHAPES, bind_model, check_halves, draw, make_context, small_model

WITH_DROPOUT = {**SHAPES, "dropout": DROPOUT}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", WITH_DROPOUT)
def test_every_gradient_has_the_bits_of_the_fused_backward(shape: str, dtype: torch.dtype) -> None:
    model = small_model(**WITH_DROPOUT[shape])
    layers = bind_model(model, dtype=dtype)
    check_halves(layers, make_context(model), upstream=torch.tensor(1 / 24, dtype=layers[0].state.accumulate_dtype))


@pytest.mark.parametrize("shape", WITH_DROPOUT)
def test_what_the_weight_half_makes_again_needs_no_weights(shape: str) -> None:
    """Also for a fused kernel that adds the bias with GELU."""
    model = small_model(**WITH_DROPOUT[shape])
    block = bind_model(model)[1]
    fused = SimpleNamespace(apply=reference_activations.bias_gelu)
    block.module.mlp.kernels = SimpleNamespace(
        pick=lambda op, x: fused if op == "bias_gelu" else OPS.pick(op, x), reference=OPS.reference
    )
    x, dy = (draw(2, 12, 32, seed=seed, dtype=torch.float32) for seed in (1, 2))
    check_halves([block], make_context(model), [x], dy, recompute=("attention", "mlp", "norms"))


def test_halves_in_the_wrong_order_are_refused() -> None:
    model = small_model()
    block = bind_model(model)[1]
    context = make_context(model)
    context.tape = SplitTape()
    x = torch.randn(2, 12, 32, requires_grad=True)
    outputs = block.module(x, context=context)
    with pytest.raises(SplitError, match="backward_input"):
        context.tape.backward_weight()
    context.tape.backward_input(outputs, [torch.ones(2, 12, 32)], [x])
    with pytest.raises(SplitError, match="once"):
        context.tape.backward_input(outputs, [torch.ones(2, 12, 32)], [x])
    context.tape.backward_weight()
    with pytest.raises(SplitError):
        context.tape.backward_weight()


class Foreign(nn.Module):
    """A block inside a module that knows nothing of tapes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.plain = nn.Linear(32, 32)

    def forward(self, hidden: Tensor, context: MicrobatchContext) -> Tensor:
        return self.plain(self.block(hidden, context=context)[0])


def test_unsplittable_modules_get_gradients_in_the_input_half() -> None:
    model = small_model()
    block = bind_model(model)[1]
    whole = Foreign(block.module)
    x, plain = torch.randn(2, 12, 32, requires_grad=True), whole.plain
    whole(x, make_context(model)).sum().backward()
    expected = [x.grad, plain.weight.grad, plain.bias.grad, block.state.gradients[0].clone()]
    plain.zero_grad()
    block.state.zero_gradients()
    context = make_context(model)
    unsplit = unsplit_parameters(whole)
    assert [id(parameter) for parameter in unsplit] == [id(plain.weight), id(plain.bias)]
    context.tape = SplitTape(unsplit)
    output = whole(x, context)
    with pytest.warns(UserWarning, match="modules without a weight half"):
        (dx,) = context.tape.backward_input([output], [torch.ones_like(output)], [x])
    context.tape.backward_weight()
    gradients = [dx, plain.weight.grad, plain.bias.grad, block.state.gradients[0]]
    for ours, fused in zip(gradients, expected, strict=True):
        assert torch.equal(ours, fused)


def test_probes_take_no_memory() -> None:
    model = small_model()
    block = bind_model(model)[1]
    context = make_context(model)
    context.tape = SplitTape()
    block.module(torch.randn(2, 12, 32), context=context)
    probes = context.tape.fresh_probes()
    assert len(probes) == 6, "two norms and four linear layers"
    assert {probe.untyped_storage().nbytes() for probe in probes} == {4}


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
