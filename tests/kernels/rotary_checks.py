"""Checks of rotary backends: values and gradients against float64 and the reference."""

from types import ModuleType

import torch
from torch import Tensor

from megapipe.kernels.reference import rotary as reference
from tests.kernels.apply_checks import Function, check_exactness
from tests.kernels.cases import draw


def angles(num_tokens: int, pairs: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine [s, d/2] in fp32."""
    turns = draw(num_tokens, pairs, seed=5, device=device) * 3
    return turns.cos().float(), turns.sin().float()


def with_angles(op: ModuleType, num_tokens: int, pairs: int, device: str, interleaved: bool) -> Function:
    """The op as a function of x alone, with the same angles for every dtype."""
    cosine, sine = angles(num_tokens, pairs, device)

    def function(x: Tensor) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return op.apply(x, cosine.to(wide), sine.to(wide), interleaved)

    return function


def check(
    op: ModuleType, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, interleaved: bool
) -> None:
    """x [b, s, heads, d]: no less exact than torch, and the same bits on two runs."""
    ours, theirs = (with_angles(each, shape[1], shape[3] // 2, device, interleaved) for each in (op, reference))
    check_exactness(ours, theirs, [draw(*shape, dtype=dtype, device=device)], shape[3])
