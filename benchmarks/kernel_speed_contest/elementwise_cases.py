"""Activations, positions and dropout."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.kernels.registry import Implementation

from .case import HIDDEN, QUICK, TINY, Aim, Case, Draw, Entry, Size, Traffic

DROPOUT = 0.1
HEAD = 128
ALPHA, LIMIT = 1.702, 7.0  # as in gpt-oss


def _rows(size: Size, draw: Draw) -> list[Tensor]:
    return [draw.normal(size.rows, size.width)]


def _rows_and_bias(size: Size, draw: Draw) -> list[Tensor]:
    return [draw.normal(size.rows, size.width), draw.normal(size.width)]


def _gelu(op: Implementation) -> Entry:
    return Entry(lambda x: op.apply(x, "tanh"))


def _bias_gelu(op: Implementation) -> Entry:
    return Entry(lambda x, bias: op.apply(x, bias, "tanh"))


def _plain(op: Implementation) -> Entry:
    return Entry(op.apply)


def _torch_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _torch_geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def _torch_reglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.relu(gate) * up


def _swiglu_clamped(op: Implementation) -> Entry:
    return Entry(lambda gate_up: op.apply(gate_up, ALPHA, LIMIT))


def _torch_swiglu_clamped(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(ALPHA * gate))


def _apart(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [half.detach().contiguous().requires_grad_() for half in inputs[0].chunk(2, dim=-1)]


def _liger_swiglu() -> Entry:
    from liger_kernel.transformers.functional import liger_swiglu

    return Entry(liger_swiglu, prepare=_apart)


def _rotary_inputs(size: Size, draw: Draw) -> list[Tensor]:
    channels = min(HEAD, size.width)
    angles = [draw.normal(size.rows, channels // 2, dtype=torch.float32, leaf=False) for _ in range(2)]
    return [draw.normal(1, size.rows, size.width // channels, channels), *angles]


def _rotary(op: Implementation) -> Entry:
    return Entry(op.apply)


def _torch_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def _keys(size: Size, draw: Draw) -> Tensor:
    return draw.below(1 << 30, size.rows, dtype=torch.int32)


def _dropout_inputs(size: Size, draw: Draw) -> list[Tensor]:
    channels = torch.arange(size.width, dtype=torch.int32, device=draw.device)
    return [draw.normal(size.rows, size.width), _keys(size, draw).unsqueeze(-1), channels]


def _dropout(op: Implementation) -> Entry:
    return Entry(lambda x, keys, channels: op.apply(x, keys, channels, DROPOUT))


def _residual_inputs(size: Size, draw: Draw) -> list[Tensor]:
    x, residual = draw.normal(size.rows, size.width), draw.normal(size.rows, size.width)
    return [x, draw.normal(size.width), residual, _keys(size, draw)]


def _dropout_residual(op: Implementation) -> Entry:
    return Entry(lambda x, bias, residual, keys: op.apply(x, bias, residual, keys, DROPOUT))


CASES = [
    Case(
        "swiglu",
        "",
        HIDDEN,
        QUICK,
        TINY,
        lambda size, draw: [draw.normal(size.rows, 2 * size.width)],
        Traffic(3, 5).work,  # reads gate and up, writes the result; reads its gradient, gate and up, writes two
        _plain,
        Entry(_torch_swiglu),
        _liger_swiglu,
        aim=Aim(0.90, 0.85),
    ),
    Case(
        "swiglu_clamped",
        "",
        HIDDEN,
        QUICK,
        TINY,
        lambda size, draw: [draw.normal(size.rows, 2 * size.width)],
        Traffic(3, 5).work,
        _swiglu_clamped,
        Entry(_torch_swiglu_clamped),
    ),
    Case(
        "geglu",
        "",
        HIDDEN,
        QUICK,
        TINY,
        lambda size, draw: [draw.normal(size.rows, 2 * size.width)],
        Traffic(3, 5).work,
        _gelu,
        Entry(_torch_geglu),
    ),
    Case(
        "reglu",
        "",
        HIDDEN,
        QUICK,
        TINY,
        lambda size, draw: [draw.normal(size.rows, 2 * size.width)],
        Traffic(3, 5).work,
        lambda op: Entry(lambda x: op.apply(x, "relu")),
        Entry(_torch_reglu),
    ),
    *(
        Case(name, "", HIDDEN, QUICK, TINY, _rows, Traffic(2, 3).work, _plain, Entry(function))
        for name, function in (
            ("relu", functional.relu),
            ("relu_squared", lambda x: functional.relu(x).square()),
            ("silu", functional.silu),
        )
    ),
    Case(
        "gelu",
        "",
        HIDDEN,
        QUICK,
        TINY,
        _rows,
        Traffic(2, 3).work,
        _gelu,
        Entry(lambda x: functional.gelu(x, approximate="tanh")),
    ),
    Case(
        "bias_gelu",
        "",
        HIDDEN,
        QUICK,
        TINY,
        _rows_and_bias,
        Traffic(2, 3).work,
        _bias_gelu,
        Entry(lambda x, bias: functional.gelu(x + bias, approximate="tanh")),
    ),
    Case("rotary", "", HIDDEN, QUICK, TINY, _rotary_inputs, Traffic(2, 2).work, _rotary, Entry(_torch_rotary)),
    Case(
        "dropout",
        "",
        HIDDEN,
        QUICK,
        TINY,
        _dropout_inputs,
        Traffic(2, 2).work,
        _dropout,
        Entry(lambda x, keys, channels: functional.dropout(x, DROPOUT)),
    ),
    Case(
        "bias_dropout_residual",
        "",
        HIDDEN,
        QUICK,
        TINY,
        _residual_inputs,
        Traffic(3, 2).work,  # the gradient of the residual is that of the result
        _dropout_residual,
        Entry(lambda x, bias, residual, keys: residual + functional.dropout(x + bias, DROPOUT)),
    ),
]
