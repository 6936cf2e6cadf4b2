"""AdamW on flat buffers in Triton: the function and arguments of `megapipe.kernels.reference.adamw`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.reference.adamw import Coefficients, check_buffers, check_moments
from megapipe.kernels.triton_backend.launch import Launch, ceiling_division
from megapipe.kernels.triton_backend.specimens import Specimen, meta

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _step_kernel(
    master,
    gradient,
    first,
    second,
    parameter,
    gradient_scale,
    skip,
    count,
    decay,
    beta2,
    take_first,
    take_second,
    step_size,
    root_correction,
    epsilon,
    BLOCK: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102 - the outer condition is the compiler's, the inner one the GPU's
        if tl.load(skip) != 0.0:
            return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    change = tl.load(gradient + offsets, mask=mask, other=0.0)
    if gradient_scale is not None:
        change = change * tl.load(gradient_scale)
    old_first = tl.load(first + offsets, mask=mask, other=0.0).to(tl.float32)
    old_second = tl.load(second + offsets, mask=mask, other=0.0).to(tl.float32)
    new_first = tl.fma(change - old_first, take_first, old_first)
    new_second = tl.fma(take_second * change, change, old_second * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(new_second), root_correction) + epsilon
    weight = tl.load(master + offsets, mask=mask, other=0.0) * decay
    weight = weight + tl.div_rn(-step_size * new_first, denominator)
    tl.store(master + offsets, weight, mask=mask)
    tl.store(first + offsets, new_first.to(first.dtype.element_ty), mask=mask)
    tl.store(second + offsets, new_second.to(second.dtype.element_ty), mask=mask)
    if parameter is not None:
        tl.store(parameter + offsets, weight.to(parameter.dtype.element_ty), mask=mask)


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
    buffers = {"master": master, "gradient": gradient, "first": first, "second": second, "parameter": parameter}
    _launch({**buffers, "gradient_scale": gradient_scale, "skip": skip}, coefficients).run()


def _launch(tensors: dict[str, Tensor | None], coefficients: Coefficients) -> Launch:
    master = tensors["master"]
    assert master is not None
    arguments = {
        **tensors,
        "count": master.numel(),
        "decay": coefficients.decay,
        "beta2": coefficients.beta2,
        "take_first": 1 - coefficients.beta1,
        "take_second": 1 - coefficients.beta2,
        "step_size": coefficients.step_size,
        "root_correction": coefficients.root_correction,
        "epsilon": coefficients.epsilon,
    }
    grid = (ceiling_division(master.numel(), _BLOCK),)
    return Launch(_step_kernel, grid, arguments, {"BLOCK": _BLOCK}, _NUM_WARPS)


def specimens() -> list[Specimen]:
    """A large layer: all in fp32, and with moments and parameters in bf16."""
    coefficients = Coefficients(step=2, learning_rate=1e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    count = 1 << 26

    def launch(moments: torch.dtype, parameter: Tensor | None) -> Launch:
        buffers = {"master": meta(count), "gradient": meta(count), "parameter": parameter}
        halves = {"first": meta(count, dtype=moments), "second": meta(count, dtype=moments)}
        return _launch({**buffers, **halves, "gradient_scale": meta(1), "skip": meta(1)}, coefficients)

    mixed = launch(torch.bfloat16, meta(count, dtype=torch.bfloat16))
    return [
        Specimen("adamw fp32", launch(torch.float32, None), loads=4, stores=3),
        Specimen("adamw bf16 moments and parameters", mixed, loads=4, stores=4),
    ]
