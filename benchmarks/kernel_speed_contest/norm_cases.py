"""Norms, and norms fused with the addition before them."""

from typing import Any

from torch import Tensor
from torch.nn import functional

from megapipe.kernels.registry import Implementation

from .case import HIDDEN, QUICK, TINY, Aim, Case, Draw, Entry, Size, Traffic

EPSILON = 1e-5
AIM = Aim(0.90, 0.85)


def _inputs(size: Size, draw: Draw, num_rows_inputs: int, num_parameters: int) -> list[Tensor]:
    rows = [draw.normal(size.rows, size.width) for _ in range(num_rows_inputs)]
    return rows + [draw.normal(size.width) for _ in range(num_parameters)]


def _ours(op: Implementation) -> Entry:
    return Entry(lambda x, *parameters: op.forward(x, *parameters, EPSILON)[0])


def _ours_after_sum(op: Implementation) -> Entry:
    return Entry(lambda x, residual, *parameters: op.add_forward(x, residual, *parameters, EPSILON)[:2])


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)


def _without_bias(x: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, None, EPSILON)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, EPSILON)


def _unit_offset(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], 1 + weight, EPSILON)


def _after_sum(norm: Any) -> Entry:
    def forward(x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, *parameters), total

    return Entry(forward)


def _liger_layer_norm() -> Entry:
    from liger_kernel.transformers.functional import liger_layer_norm

    return Entry(lambda x, weight, bias: liger_layer_norm(x, weight, bias, EPSILON))


def _liger_rms_norm() -> Entry:
    from liger_kernel.transformers.functional import liger_rms_norm

    return Entry(lambda x, weight: liger_rms_norm(x, weight, EPSILON, in_place=False))


def _liger_sum_rms_norm() -> Entry:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    def forward(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPSILON, 0.0, "llama", False)

    return Entry(forward)


def _case(op: str, norm: Any, num_parameters: int, after_sum: bool, liger: Any) -> Case:
    # After a sum, the forward reads x and the residual and writes two results; the backward reads the two gradients
    # and the sum, and writes one gradient.
    return Case(
        op,
        "after a sum" if after_sum else "",
        HIDDEN,
        QUICK,
        TINY,
        lambda size, draw: _inputs(size, draw, 1 + after_sum, num_parameters),
        (Traffic(4, 4) if after_sum else Traffic(2, 3)).work,
        _ours_after_sum if after_sum else _ours,
        _after_sum(norm) if after_sum else Entry(norm),
        liger,
        aim=AIM,
    )


CASES = [
    _case("layer_norm", _layer_norm, 2, False, _liger_layer_norm),
    _case("layer_norm", _layer_norm, 2, True, None),
    _case("layer_norm_without_bias", _without_bias, 1, False, None),
    _case("rms_norm", _rms_norm, 1, False, _liger_rms_norm),
    _case("rms_norm", _rms_norm, 1, True, _liger_sum_rms_norm),
    _case("rms_norm_unit_offset", _unit_offset, 1, False, None),
]
