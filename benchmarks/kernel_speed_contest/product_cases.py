"""Matrix products that are added to an accumulator."""

import torch
from torch import Tensor

from megapipe.kernels.registry import Implementation

from .case import Case, Draw, Entry, Size, Work, grid

OUTPUTS = 4096


def _operands(size: Size, draw: Draw) -> list[Tensor]:
    """Return inputs of a linear layer, gradients of its outputs, and the fp32 accumulator of its weight's gradient."""
    return [
        draw.normal(size.rows, size.width, leaf=False),
        draw.normal(size.rows, OUTPUTS, leaf=False),
        draw.normal(OUTPUTS, size.width, dtype=torch.float32, leaf=False),
    ]


def _work(size: Size, itemsize: int) -> tuple[Work, None]:
    operands = size.rows * (size.width + OUTPUTS) * itemsize
    return Work(operands + 8.0 * size.width * OUTPUTS, 2.0 * size.elements * OUTPUTS), None


def _accumulate(op: Implementation) -> Entry:
    return Entry(op.apply)


def _torch_accumulate(x: Tensor, dy: Tensor, total: Tensor) -> None:
    total.add_(dy.t() @ x)


CASES = [
    Case(
        "weight_gradient",
        f"{OUTPUTS} outputs",
        grid([8192], [4096, 16384]),
        Size(8192, 4096),
        Size(8, 64),
        _operands,
        _work,
        _accumulate,
        Entry(_torch_accumulate),
    )
]
