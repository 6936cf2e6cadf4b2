"""Operations of the optimizer on flat buffers."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megapipe.kernels.ops import OPS
from megapipe.kernels.reference.optimizer import Buffers, Coefficients, Elements
from megapipe.kernels.registry import Implementation

from .case import Case, Draw, Entry, Size, Work, grid

SIZES = grid([1], [1 << 26, 1 << 28])
QUICK, TINY = SIZES[0], Size(1, 4096)
UPDATE = Coefficients(step=3, learning_rate=1e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)


def _buffers(size: Size, draw: Draw) -> list[Tensor]:
    """Return fp32 buffers of master weights, gradient, first and second moment, and the bf16 copy of the weights."""
    wide = [draw.normal(size.width, dtype=torch.float32, leaf=False) for _ in range(4)]
    return [*wide[:3], wide[3].abs_(), wide[0].bfloat16()]


def _adamw(op: Implementation) -> Entry:
    def step(master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, parameter: Tensor) -> None:
        op.step(Buffers(master, gradient, first, second, parameter), UPDATE)

    return Entry(step)


def _with_step(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [*inputs, torch.tensor(float(UPDATE.step - 1), device=inputs[0].device)]


@torch.no_grad()
def _torch_adamw(
    master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, parameter: Tensor, step: Tensor
) -> None:
    adamw(
        [master],
        [gradient],
        [first],
        [second],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=UPDATE.beta1,
        beta2=UPDATE.beta2,
        lr=UPDATE.learning_rate,
        weight_decay=UPDATE.weight_decay,
        eps=UPDATE.epsilon,
        maximize=False,
    )
    parameter.copy_(master)


def _squared_norm(op: Implementation) -> Entry:
    return Entry(op.apply)


def _torch_squared_norm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values).square()


def _rounding(op: Implementation) -> Entry:
    def round_to(source: Tensor, target: Tensor) -> None:
        op.apply(target, source, 0x9E3779B9, Elements(0, 1, 1))

    return Entry(round_to)


def _torch_copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


CASES = [
    Case(
        "adamw",
        "fp32, bf16 copy",
        SIZES,
        QUICK,
        TINY,
        _buffers,
        lambda size, itemsize: (Work(30.0 * size.elements), None),  # reads four buffers; writes three and the copy
        _adamw,
        Entry(_torch_adamw, prepare=_with_step),
        compiled=_adamw(OPS.reference("adamw")),  # elementwise, so that the compiler can make one kernel of it
    ),
    Case(
        "stochastic_rounding",
        "fp32 to bf16",
        SIZES,
        QUICK,
        TINY,
        lambda size, draw: [draw.normal(size.width, dtype=torch.float32, leaf=False), _buffers(size, draw)[4]],
        lambda size, itemsize: (Work(6.0 * size.elements), None),
        _rounding,
        Entry(_torch_copy),  # rounds to nearest, because torch has no stochastic rounding
    ),
    Case(
        "gradient_norm",
        "fp32",
        SIZES,
        QUICK,
        TINY,
        lambda size, draw: [draw.normal(size.width, dtype=torch.float32, leaf=False)],
        lambda size, itemsize: (Work(4.0 * size.elements), None),
        _squared_norm,
        Entry(_torch_squared_norm),
    ),
]
