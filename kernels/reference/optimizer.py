"""Ops on flat buffers, in torch: AdamW (Loshchilov and Hutter 2019, 1711.05101, algorithm 2), the squared norm of a
gradient, and the sum of weight gradients.

AdamW consists of torch's elementwise operations: the bits do not depend on where a buffer is cut.

Stochastic rounding of fp32 to bf16: a number between two neighbours in bf16 becomes either, the nearer one with the
higher probability, so that the mean is the number itself: updates that are too small for bf16 still add up on average
(Gupta et al. 2015, 1502.02551, section 3.1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.kernels.reference.dropout import finalize, signed
from megapipe.random.bits import CHANNEL, TOKEN

SMALLEST_DECAY = 2.0**-8
"""Minimum decay 1 - beta of a bf16 moment: with a smaller one, it is rounded back to its old value and never
shrinks."""


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
        """The factor of every weight."""
        return 1 - self.learning_rate * self.weight_decay

    @property
    def step_size(self) -> float:
        """Learning rate over the bias correction of the first moment."""
        return self.learning_rate / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """Square root of the bias correction of the second moment."""
        return (1 - self.beta2**self.step) ** 0.5

    def of_kernels(self) -> tuple[float, ...]:
        """Return the numbers that kernels take, in their order."""
        first, second = self.betas
        return self.decay, second, 1 - first, 1 - second, self.step_size, self.root_correction, self.epsilon


class Buffers(NamedTuple):
    """The tensors of one step of AdamW. All but the last two are flat, contiguous and equally long.

    master, gradient: fp32 (in the reference fp64 too); backends other than the reference may leave the scaled gradient
    in its buffer. first, second: moments, both in the master's dtype or both in bf16, rounded to nearest after their
    use. parameter: bf16, overwritten by the rounded master. gradient_scale: one fp32 number that multiplies every
    gradient first (clipping, 1 / loss scale). skip: one fp32 number; if it is not 0, nothing changes.
    """

    master: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    parameter: Tensor | None = None
    gradient_scale: Tensor | None = None
    skip: Tensor | None = None

    def check(self, *masters: torch.dtype) -> None:
        """Raise ValueError, naming the tensor, unless shapes and dtypes are as described above.

        masters: dtypes that the master may have.
        """
        dtypes: dict[str, Sequence[torch.dtype]] = {
            "master": masters,
            "gradient": (self.master.dtype,),
            "first": (self.master.dtype, torch.bfloat16),
            "second": (self.first.dtype,),
            "parameter": (torch.bfloat16,),
        }
        size = self.master.numel()
        for name, tensor in self._asdict().items():
            if tensor is None:
                continue
            actual = f"AdamW's {name} is {tensor.dtype} {list(tensor.shape)}; it must be"
            if name not in dtypes:
                if tensor.dtype != torch.float32 or tensor.numel() != 1:
                    raise ValueError(f"{actual} one float32 number")
            elif tensor.dtype not in dtypes[name] or tensor.shape != (size,) or not tensor.is_contiguous():
                allowed = " or ".join(map(str, dtypes[name]))
                raise ValueError(f"{actual} a flat, contiguous view of {size} elements in {allowed}")


def check_moments(coefficients: Coefficients, dtype: torch.dtype) -> None:
    """Raise ValueError if moments of this dtype could not decay (`SMALLEST_DECAY`)."""
    if dtype == torch.bfloat16 and 1 - max(coefficients.betas) < SMALLEST_DECAY:
        raise ValueError(
            f"betas are {coefficients.betas}, and moments in bfloat16 decay only by 1/256 or more per step: a beta "
            "must be at most 0.996; lower it, or keep the moments in float32"
        )


@torch.no_grad()
def adamw_step(buffers: Buffers, coefficients: Coefficients) -> None:
    """Update the master and both moments in place.

    Raises ValueError if a buffer breaks the rules of `Buffers`, or bf16 moments could not decay (`check_moments`).
    """
    buffers.check(torch.float32, torch.float64)
    master, gradient, first, second, parameter, gradient_scale, skip = buffers
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


def adamw_operator(launch: Callable[[Buffers, Coefficients], None]) -> Callable[..., None]:
    """Return `adamw_step` of a backend whose master is fp32. launch: takes checked buffers that are not empty."""

    @torch.no_grad()
    def adamw_step(buffers: Buffers, coefficients: Coefficients) -> None:
        """Update the master and both moments in place, as the reference does; nothing waits for the host."""
        buffers.check(torch.float32)
        check_moments(coefficients, buffers.first.dtype)
        if buffers.master.numel():
            launch(buffers, coefficients)

    return adamw_step


BLOCK = 65_536
"""Elements whose squares are summed together: the unit of the canonical norm (`megapipe.engine.reductions`)."""


def gradient_norm(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor, block by block, as a 0-dim float64 tensor on its device.

    It is finite only if every element is, so one pass computes the norm and decides whether to skip the step. Here
    elements beyond 1e17 may overflow too, since a block's norm is taken in the tensor's own dtype (at least fp32).
    """
    size = values.numel()
    if size < BLOCK:
        return _norm(values).square()
    whole = size // BLOCK * BLOCK
    total = _norm(values[:whole].view(-1, BLOCK), 1).square().sum()
    return total if whole == size else total + _norm(values[whole:]).square()


def _norm(values: Tensor, dim: int | None = None) -> Tensor:
    dtype = None if values.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(values, dim=dim, dtype=dtype).double()


def weight_gradient(x: Tensor, dy: Tensor, total: Tensor) -> None:
    """Add the weight gradient to total [out, in], for input x [..., in] and output gradient dy [..., out].

    The product is rounded to the dtype of x before it is added.
    """
    total.add_(dy.flatten(0, -2).t() @ x.flatten(0, -2))


ROUNDED_AT_A_TIME = 1 << 16
"""Elements at a time, for temporaries that stay in the cache."""

DISCARDED = 0xFFFF
"""The lower bits of fp32, which bf16 does not have."""


@dataclass(frozen=True)
class Elements:
    """The elements of a whole tensor that are in a flat piece of it, in order: runs of `run` adjacent elements,
    `stride` apart, without the first `skipped` elements.

    Local element i is global element first + (j // run) * stride + j % run, where j is i + skipped.
    """

    first: int
    run: int
    stride: int
    skipped: int = 0

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the global indices of the local elements from `start` to `stop`, int64."""
        local = torch.arange(start + self.skipped, stop + self.skipped, device=device)
        if self.run == self.stride:
            return local.add_(self.first)
        return local // self.run * self.stride + local % self.run + self.first


def check_rounded(target: Tensor, source: Tensor) -> None:
    """Raise ValueError unless target is bf16 and source fp32, both flat, contiguous and equally long."""
    for name, tensor, dtype in (("target", target, torch.bfloat16), ("source", source, torch.float32)):
        if tensor.dtype != dtype or tensor.shape != (source.numel(),) or not tensor.is_contiguous():
            raise ValueError(
                f"stochastic rounding's {name} is {tensor.dtype} {list(tensor.shape)}; "
                f"it must be a flat, contiguous view of {source.numel()} elements in {dtype}"
            )


@torch.no_grad()
def stochastic_rounding(
    target: Tensor, source: Tensor, key: int, elements: Elements, block: int = ROUNDED_AT_A_TIME
) -> None:
    """Overwrite target (bf16) with source (fp32), each element rounded stochastically; both are flat and equally long.

    key: `megapipe.random.bits.rounding_key`. block: number of elements at a time. Elements that are not finite stay
    so. Raises ValueError for other tensors.
    """
    check_rounded(target, source)
    for start in range(0, source.numel(), block):
        piece = source[start : start + block]
        index = elements.indices(start, start + piece.numel(), source.device)
        low, high = index.to(torch.int32), (index >> 32).to(torch.int32)
        words = finalize(finalize(low * signed(CHANNEL) ^ signed(key)) ^ high * signed(TOKEN))
        # Added to the magnitude, which the lower bits represent for both signs.
        raised = (piece.view(torch.int32) + (words & DISCARDED)) & ~DISCARDED
        target[start : start + block] = torch.where(piece.isfinite(), raised.view(torch.float32), piece)
