"""Stochastic rounding to bf16 in Triton: the function, arguments and bits of the reference module."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapipe.kernels.reference.stochastic_rounding import Elements, check_rounded
from megapipe.kernels.triton_backend.dropout_bits import finalize
from megapipe.kernels.triton_backend.launch import Launch, ceiling_division
from megapipe.kernels.triton_backend.specimens import Specimen, meta
from megapipe.random.dropout import CHANNEL, TOKEN

_BLOCK = 1024
_NUM_WARPS = 4
_CHANNEL, _TOKEN = tl.constexpr(CHANNEL), tl.constexpr(TOKEN)
_DISCARDED, _INFINITY, _MAGNITUDE, _QUIET = (tl.constexpr(bits) for bits in (0xFFFF, 0x7F800000, 0x7FFFFFFF, 0x40))


@triton.jit
def _kernel(target, source, key, first, run, stride, skipped, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    place = offsets + skipped
    index = place // run * stride + place % run + first
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    word = finalize(finalize(low * _CHANNEL ^ tl.full((BLOCK,), key, tl.uint32)) ^ high * _TOKEN)
    value = tl.load(source + offsets, mask=mask, other=0.0)
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    raised = tl.where(magnitude < _INFINITY, bits + (word & _DISCARDED), bits) >> 16
    # Of a NaN the upper half alone might be an infinity.
    rounded = tl.where(magnitude > _INFINITY, raised | _QUIET, raised)
    tl.store(target + offsets, rounded.to(tl.int16), mask=mask)


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """What is rounded, by which a backend is picked, is fp32."""
    return None if dtype == torch.float32 else f"rounds float32, not {str(dtype).removeprefix('torch.')}"


def round_to(target: Tensor, source: Tensor, key: int, elements: Elements) -> None:
    """Overwrite target (bf16) by source (fp32), each element rounded at random, as the reference does."""
    check_rounded(target, source)
    _launch(target, source, key, elements).run()


def _launch(target: Tensor, source: Tensor, key: int, elements: Elements) -> Launch:
    arguments = {
        "target": target.view(torch.int16),
        "source": source,
        "key": key,
        "first": elements.first,
        "run": elements.run,
        "stride": elements.stride,
        "skipped": elements.skipped,
        "count": source.numel(),
    }
    return Launch(_kernel, (ceiling_division(source.numel(), _BLOCK),), arguments, {"BLOCK": _BLOCK}, _NUM_WARPS)


def specimens() -> list[Specimen]:
    """A large matrix, and a tensor rank's share of its columns."""
    count = 1 << 26
    source, target = meta(count), meta(count, dtype=torch.bfloat16)
    whole, share = Elements(0, 1 << 26, 1 << 26), Elements(1 << 12, 1 << 12, 1 << 15)
    return [
        Specimen("stochastic rounding", _launch(target, source, 0x9E3779B9, whole), loads=1, stores=1),
        Specimen("stochastic rounding of columns", _launch(target, source, 0x1E3779B9, share), loads=1, stores=1),
    ]
