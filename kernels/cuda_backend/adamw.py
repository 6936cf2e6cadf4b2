"""AdamW on flat buffers in CUDA C++: the function and arguments of `megapipe.kernels.reference.adamw`."""

import torch
from torch import Tensor

from megapipe.kernels.cuda_backend import library
from megapipe.kernels.reference.adamw import Coefficients, check_buffers, check_moments


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """The master, by which a backend is picked, is fp32."""
    return None if dtype == torch.float32 else f"takes a float32 master, not {str(dtype).removeprefix('torch.')}"


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
    """Update the master and both moments in place, as the reference does; nothing waits for the host."""
    check_buffers(master, gradient, first, second, parameter, gradient_scale, skip)
    check_moments(coefficients, first.dtype)
    if not master.numel():
        return
    library.current().launch(
        "adamw",
        master,
        gradient,
        first,
        second,
        parameter,
        master.numel(),
        coefficients.decay,
        coefficients.beta2,
        1 - coefficients.beta1,
        1 - coefficients.beta2,
        coefficients.step_size,
        coefficients.root_correction,
        coefficients.epsilon,
        gradient_scale,
        skip,
        int(first.dtype == torch.bfloat16),
    )
