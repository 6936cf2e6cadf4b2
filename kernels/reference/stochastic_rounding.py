"""Stochastic rounding of fp32 to bf16 in torch, with the random words of `megapipe.random.rounding`.

A number between two neighbours in bf16 becomes either, the nearer one with the higher probability, so that the mean is
the number itself: updates too small for bf16 add up all the same (Gupta et al. 2015, 1502.02551, section 3.1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.kernels.reference.dropout import finalize, signed
from megapipe.random.dropout import CHANNEL, TOKEN

BLOCK = 1 << 16
"""Elements at a time, for temporaries that stay in the cache."""

DISCARDED = 0xFFFF
"""The bits of fp32 that bf16 has no room for."""


@dataclass(frozen=True)
class Elements:
    """Which elements of a whole tensor a flat piece of it holds, in order: runs of `run` neighbours, `stride` apart,
    of which the piece leaves out the first `skipped`.

    Local element i is global element first + (j // run) * stride + j % run, where j is i + skipped.
    """

    first: int
    run: int
    stride: int
    skipped: int = 0

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Global indices of the local elements from `start` to `stop`, int64."""
        local = torch.arange(start + self.skipped, stop + self.skipped, device=device)
        if self.run == self.stride:
            return local.add_(self.first)
        return local // self.run * self.stride + local % self.run + self.first


def check_rounded(target: Tensor, source: Tensor) -> None:
    """Raise ValueError unless target is bf16 and source fp32, both flat, contiguous and equally long."""
    for name, tensor, dtype in (("target", target, torch.bfloat16), ("source", source, torch.float32)):
        if tensor.dtype != dtype or tensor.shape != (source.numel(),) or not tensor.is_contiguous():
            raise ValueError(
                f"stochastic rounding's {name} is {tensor.dtype} {list(tensor.shape)}; it must be a flat, contiguous "
                f"view of {source.numel()} elements in {dtype}"
            )


@torch.no_grad()
def round_to(target: Tensor, source: Tensor, key: int, elements: Elements, block: int = BLOCK) -> None:
    """Overwrite target (bf16) by source (fp32), each element rounded at random; both flat and equally long.

    key: `megapipe.random.rounding.rounding_key`. block: elements at a time. What is not finite stays so.
    Raises ValueError for other tensors.
    """
    check_rounded(target, source)
    for start in range(0, source.numel(), block):
        piece = source[start : start + block]
        index = elements.indices(start, start + piece.numel(), source.device)
        low, high = index.to(torch.int32), (index >> 32).to(torch.int32)
        words = finalize(finalize(low * signed(CHANNEL) ^ signed(key)) ^ high * signed(TOKEN))
        # To the magnitude, which is what the lower bits of either sign hold.
        raised = (piece.view(torch.int32) + (words & DISCARDED)) & ~DISCARDED
        target[start : start + block] = torch.where(piece.isfinite(), raised.view(torch.float32), piece)
