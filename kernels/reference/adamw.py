"""AdamW on flat buffers (Loshchilov and Hutter 2019, 1711.05101, algorithm 2), in torch's elementwise operations.

The bits do not depend on where a buffer is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_DECAY = 2.0**-8
"""A bf16 moment whose decay 1 - beta is smaller rounds back to where it was, and never shrinks."""


@dataclass(frozen=True)
class Coefficients:
    """The numbers of one step. step counts updates from 1; weight_decay is decoupled.

    Raises ValueError when step is below 1.
    """

    step: int
    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"AdamW's step is {self.step}; it counts updates from 1")

    @property
    def beta1(self) -> float:
        """Decay of the first moment."""
        return self.betas[0]

    @property
    def beta2(self) -> float:
        """Decay of the second moment."""
        return self.betas[1]

    @property
    def decay(self) -> float:
        """What every weight is multiplied by."""
        return 1 - self.learning_rate * self.weight_decay

    @property
    def step_size(self) -> float:
        """Learning rate over the first moment's bias."""
        return self.learning_rate / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """Root of the second moment's bias."""
        return (1 - self.beta2**self.step) ** 0.5


def check_buffers(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    parameter: Tensor | None,
    gradient_scale: Tensor | None,
    skip: Tensor | None,
    masters: Sequence[torch.dtype] = (torch.float32,),
) -> None:
    """Raise ValueError, naming the tensor, unless shapes and dtypes are those that `step` describes.

    masters: dtypes that the master may have.
    """
    flat: dict[str, tuple[Tensor | None, Sequence[torch.dtype]]] = {
        "master": (master, masters),
        "gradient": (gradient, (master.dtype,)),
        "first": (first, (master.dtype, torch.bfloat16)),
        "second": (second, (first.dtype,)),
        "parameter": (parameter, (torch.bfloat16,)),
    }
    for name, (tensor, dtypes) in flat.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes or tensor.shape != (master.numel(),) or not tensor.is_contiguous():
            raise ValueError(
                f"AdamW's {name} is {tensor.dtype} {list(tensor.shape)}; it must be a flat, contiguous view of "
                f"{master.numel()} elements in {' or '.join(map(str, dtypes))}"
            )
    for name, scalar in {"gradient_scale": gradient_scale, "skip": skip}.items():
        if scalar is not None and (scalar.dtype != torch.float32 or scalar.numel() != 1):
            raise ValueError(f"AdamW's {name} is {scalar.dtype} {list(scalar.shape)}; it must be one float32 number")


def check_moments(coefficients: Coefficients, dtype: torch.dtype) -> None:
    """Raise ValueError where moments of this dtype could not decay (`SMALLEST_DECAY`)."""
    if dtype == torch.bfloat16 and 1 - max(coefficients.betas) < SMALLEST_DECAY:
        raise ValueError(
            f"betas are {coefficients.betas}, and moments in bfloat16 decay only by 1/256 or more per step: a beta "
            "must be at most 0.996; lower it, or keep the moments in float32"
        )


@torch.no_grad()
def step(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    coefficients: Coefficients,
    *,
    parameter: Tensor | None = None,
    gradient_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Update the master and both moments in place. All buffers are flat, contiguous and equally long.

    master, gradient: fp32 (here fp64 too); other backends may leave the scaled gradient in its buffer. first, second:
    moments, both in the master's dtype or both in bf16, rounded to nearest after their use.
    parameter: bf16, overwritten by the rounded master. gradient_scale: one fp32 number that multiplies every gradient
    first (clipping, 1 / loss scale). skip: one fp32 number; where it is not 0 nothing changes.
    Raises ValueError when a buffer is not so, or bf16 moments could not decay (`check_moments`).
    """
    check_buffers(master, gradient, first, second, parameter, gradient_scale, skip, (torch.float32, torch.float64))
    check_moments(coefficients, first.dtype)
    if skip is not None and skip.item():
        return
    if gradient_scale is not None:
        gradient = gradient * gradient_scale.reshape(())
    wide_first, wide_second = first.to(master.dtype), second.to(master.dtype)
    if coefficients.weight_decay:
        master.mul_(coefficients.decay)
    wide_first.lerp_(gradient, 1 - coefficients.beta1)
    wide_second.mul_(coefficients.beta2).addcmul_(gradient, gradient, value=1 - coefficients.beta2)
    denominator = (wide_second.sqrt() / coefficients.root_correction).add_(coefficients.epsilon)
    master.addcdiv_(wide_first, denominator, value=-coefficients.step_size)
    if first.dtype != master.dtype:
        first.copy_(wide_first)
        second.copy_(wide_second)
    if parameter is not None:
        parameter.copy_(master)
