"""Requirements of norm backends, on any device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.kernels.registry import Implementation
from tests.kernels.cases import Layout, as_is, assert_as_exact_as_torch, assert_same_bits, draw

EPSILON = 1e-5
SHAPES = [(7, 33), (1, 1), (1, 1023), (3, 2, 256), (37, 96), (65, 17), (2, 3000)]
"""Shapes with odd widths, one row, several rows a program, and several groups of rows."""

LONG = [(2, 8193), (1, 16400)]
"""Rows that take the chunked backward, and the chunked forward too."""


class Norm:
    """One op of one backend, with torch's own function for comparison. Parameters: weight and, in layer_norm, bias."""

    def __init__(self, op: str, module: Implementation) -> None:
        self.op = op
        self.module = module
        self.num_parameters = 2 if op == "layer_norm" else 1
        self.num_statistics = 2 if op.startswith("layer_norm") else 1

    def __str__(self) -> str:
        return self.op

    def parameters(self, width: int, dtype: torch.dtype, device: str) -> list[Tensor]:
        return [draw(width, seed=seed, dtype=dtype, device=device, shift=1) for seed in range(self.num_parameters)]

    def torchs(self, x: Tensor, parameters: list[Tensor]) -> Tensor:
        function = functional.layer_norm if self.op.startswith("layer_norm") else functional.rms_norm
        if self.op == "rms_norm_unit_offset":
            parameters = [1 + parameters[0]]
        return function(x, x.shape[-1:], *parameters, eps=EPSILON)

    def torchs_gradients(self, x: Tensor, parameters: list[Tensor], dy: Tensor, dx: Tensor) -> list[Tensor]:
        """Return gradients of x, with dx added, and of the parameters."""
        leaves = [leaf.detach().requires_grad_() for leaf in (x, *parameters)]
        return list(torch.autograd.grad([self.torchs(leaves[0], leaves[1:]), leaves[0]], leaves, [dy, dx]))


def check_against_double(
    norm: Norm,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    layout: Layout = as_is,
    spread: float = 1.0,
    shift: float = 2.0,
) -> None:
    """Results, with and without a residual, and gradients, together and in halves."""
    x, residual, dy, dx = (
        layout(draw(*shape, seed=seed, dtype=dtype, device=device, shift=shift) * spread) for seed in range(4)
    )
    parameters = [layout(parameter) for parameter in norm.parameters(shape[-1], dtype, device)]
    y, *statistics = norm.module.forward(x, *parameters, EPSILON)
    assert_as_exact_as_torch(y, *both(norm.torchs, x, parameters))
    assert [statistic.shape for statistic in statistics] == [(*shape[:-1], 1)] * norm.num_statistics

    y, total, *of_sum = norm.module.add_forward(x, residual, *parameters, EPSILON)
    assert_as_exact_as_torch(total, x + residual, x.double() + residual.double())
    assert_as_exact_as_torch(y, *both(norm.torchs, total, parameters))
    assert_same_bits(y, norm.module.forward(total, *parameters, EPSILON)[0])
    assert len(of_sum) == norm.num_statistics

    whole = norm.module.backward(dy, x, *statistics, parameters[0], dx)
    for actual, *expected in zip(whole, *both(norm.torchs_gradients, x, parameters, dy, dx), strict=True):
        assert_as_exact_as_torch(actual, *expected)
    halves = (
        norm.module.input_gradient(dy, x, *statistics, parameters[0], dx),
        *norm.module.weight_gradient(dy, x, *statistics, parameters[0]),
    )
    for one, other in zip(whole, halves, strict=True):
        assert_same_bits(one, other)
    alone = norm.module.input_gradient(dy, x, *statistics, parameters[0])
    zeros = torch.zeros_like(dx)
    assert_same_bits(alone, norm.module.input_gradient(dy, x, *statistics, parameters[0], zeros))


def both(function: Callable[..., Any], *arguments: Tensor | list[Tensor]) -> tuple[Any, Any]:
    """The function's result on the arguments, and on the same numbers in float64."""
    wide = [part.double() if isinstance(part, Tensor) else [each.double() for each in part] for part in arguments]
    return function(*arguments), function(*wide)


def check_rules(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Check two runs of x with this shape, an empty x, special numbers, and autograd."""
    check_two_runs(norm, shape, dtype, device)
    check_empty(norm, device)
    check_not_a_number(norm, device)
    check_autograd(norm, device)


def check_two_runs(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """The same bits twice, and the same bits of a row alone."""
    x, dy = draw(*shape, dtype=dtype, device=device), draw(*shape, seed=1, dtype=dtype, device=device)
    parameters = norm.parameters(shape[-1], dtype, device)

    def run(rows: slice) -> list[Tensor]:
        y, *statistics = norm.module.forward(x[rows], *parameters, EPSILON)
        return [y, *norm.module.backward(dy[rows], x[rows], *statistics, parameters[0])]

    first, alone = run(slice(None)), run(slice(1, 2))
    for one, other in zip(first, run(slice(None)), strict=True):
        assert_same_bits(one, other)
    assert_same_bits(first[0][1:2], alone[0])
    assert_same_bits(first[1][1:2], alone[1])


def check_empty(norm: Norm, device: str) -> None:
    """No rows: results without rows, and gradients of zero."""
    x = torch.empty(0, 48, device=device)
    parameters = norm.parameters(48, torch.float32, device)
    y, *statistics = norm.module.forward(x, *parameters, EPSILON)
    dx, *gradients = norm.module.backward(y, x, *statistics, parameters[0])
    assert y.shape == dx.shape == (0, 48)
    assert all(torch.equal(gradient, torch.zeros(48, device=device)) for gradient in gradients)


def check_not_a_number(norm: Norm, device: str) -> None:
    """A NaN or an infinity reaches its own row and the gradients of the parameters, and no other row."""
    clean = draw(5, 96, dtype=torch.float32, device=device)
    parameters = norm.parameters(96, torch.float32, device)
    for poison in (torch.nan, torch.inf):
        x = clean.clone()
        x[2, 7] = poison
        y, *statistics = norm.module.forward(x, *parameters, EPSILON)
        dx, *gradients = norm.module.backward(clean, x, *statistics, parameters[0])
        expected = norm.torchs(x, parameters)
        assert torch.equal(y.isnan(), expected.isnan())
        assert y[2].isnan().any()
        others = [0, 1, 3, 4]
        assert_same_bits(y[others], norm.module.forward(clean, *parameters, EPSILON)[0][others])
        assert torch.equal(dx.isnan().any(-1).nonzero().flatten(), torch.tensor([2], device=device))
        assert gradients[0].isnan().any()


def check_autograd(norm: Norm, device: str) -> None:
    """Both forward functions are differentiable, and give what the backward gives."""
    x, residual, dy, dtotal = (draw(4, 40, seed=seed, dtype=torch.float32, device=device) for seed in range(4))
    parameters = norm.parameters(40, torch.float32, device)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, residual, *parameters)]
    _, *statistics = norm.module.forward(x, *parameters, EPSILON)
    actual = torch.autograd.grad(norm.module.forward(leaves[0], *leaves[2:], EPSILON)[0], [leaves[0], *leaves[2:]], dy)
    for one, other in zip(actual, norm.module.backward(dy, x, *statistics, parameters[0]), strict=True):
        assert_same_bits(one, other)
    _, total, *statistics = norm.module.add_forward(x, residual, *parameters, EPSILON)
    results = norm.module.add_forward(*leaves, EPSILON)
    assert not any(statistic.requires_grad for statistic in results[2:])
    actual = torch.autograd.grad(results[:2], leaves, [dy, dtotal])
    dx, *gradients = norm.module.backward(dy, total, *statistics, parameters[0], dtotal)
    for one, other in zip(actual, [dx, dx, *gradients], strict=True):
        assert_same_bits(one, other)


def check_current_stream(norm: Norm) -> None:
    """On a GPU, the kernel waits for the current stream."""
    x = draw(512, 4096, dtype=torch.float32, device="cuda")
    parameters = norm.parameters(4096, torch.float32, "cuda")
    expected = norm.module.forward(2 * x, *parameters, EPSILON)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        actual = norm.module.forward(2 * x, *parameters, EPSILON)[0]
    stream.synchronize()
    assert_same_bits(actual, expected)


def check_operator(norm: Norm, backend: str, name: str, device: str) -> None:
    """Schema, fake results, registered gradients and tracing, as `torch.library.opcheck` sees them."""
    x, dy = (draw(4, 24, seed=seed, dtype=torch.float32, device=device) for seed in range(2))
    parameters = norm.parameters(24, torch.float32, device)
    _, *statistics = norm.module.forward(x, *parameters, EPSILON)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, dy, *parameters)]
    arguments = {
        "": (leaves[0], *leaves[2:], EPSILON),
        "_add": (*leaves, EPSILON),
        "_weight_gradient": (dy, x, *statistics, parameters[0]),
    }.get(name, (dy, x, *statistics, parameters[0], dy))
    torch.library.opcheck(getattr(torch.ops.megapipe, f"{norm.op}_{backend}{name}").default, arguments)
