"""AdamW on flat buffers by apex: the function and arguments of `megapipe.kernels.reference.adamw`.

Of apex's Adam kernels this takes the one that was made for CUDA graphs: step, learning rate, gradient scale and skip
flag are on the device, so that nothing waits for the host. It overwrites the gradient with the scaled one. It knows
only fp32 moments of an fp32 master: bf16 moments are widened before it and rounded after it, in temporary buffers.
"""

import torch
from torch import Tensor

from megapipe.kernels.apex_backend.signatures import ADAM, why_unsupported
from megapipe.kernels.reference.adamw import Coefficients, check_buffers, check_moments

_CHUNK = 65_536
_LONGEST = 2**30
"""Elements of one tensor of a list; apex counts them in 32 bits."""
_DECOUPLED_DECAY, _CORRECT_BIAS = 1, 1


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why the backend cannot take a master of this dtype."""
    if dtype != torch.float32:
        return f"takes a float32 master, not {str(dtype).removeprefix('torch.')}"
    return why_unsupported([ADAM])


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
    """Update the master and both moments in place, as the reference does; nothing waits for the host."""
    check_buffers(master, gradient, first, second, parameter, gradient_scale, skip)
    check_moments(coefficients, first.dtype)
    if not master.numel():
        return
    moments = [first.float(), second.float()]
    skipped = master.new_zeros(1, dtype=torch.int32) if skip is None else (skip != 0).int().reshape(1)
    ADAM(
        _CHUNK,
        skipped,
        [list(tensor.split(_LONGEST)) for tensor in (gradient, master, *moments)],
        master.new_full((1,), coefficients.learning_rate),
        coefficients.beta1,
        coefficients.beta2,
        coefficients.epsilon,
        master.new_full((1,), coefficients.step, dtype=torch.int32),
        _DECOUPLED_DECAY,
        _CORRECT_BIAS,
        coefficients.weight_decay,
        master.new_ones(1) if gradient_scale is None else gradient_scale.reshape(1),
    )
    if first.dtype != torch.float32:
        first.copy_(moments[0])
        second.copy_(moments[1])
    if parameter is not None:
        rounded = master.to(parameter.dtype)
        parameter.copy_(rounded if skip is None else torch.where(skipped != 0, parameter, rounded))
