"""Dropout whose mask is a function of global indices, also combined with bias and residual, in torch.

The random words are those of `megapipe.random.bits.dropout_bits`. torch has no arithmetic on unsigned words; int32
also wraps modulo 2**32, and right shifts are masked.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.registry import constant_when_compiled
from megapipe.random.bits import CHANNEL, DOMAIN, SITE, TOKEN, WORD, keep_threshold


def signed(word: int) -> int:
    """Return the int32 with the bits of an unsigned word."""
    return word - (1 << 32) if word >= 1 << 31 else word


_FIRST, _SECOND = signed(0x85EBCA6B), signed(0xC2B2AE35)


def finalize(word: Tensor) -> Tensor:
    """Apply `megapipe.random.bits.finalize` to int32 words of any shape."""
    word = (word ^ (word >> 16 & 0xFFFF)) * _FIRST
    word = (word ^ (word >> 13 & 0x7FFFF)) * _SECOND
    return word ^ (word >> 16 & 0xFFFF)


def site_word(site: int) -> Tensor:
    """Return the number of a dropout site for a key. It is a tensor, so that compiled layers do not differ in
    constants."""
    return torch.tensor(signed(site * SITE & WORD), dtype=torch.int32, device="cpu")


def token_keys(seed: int, ordinals: Tensor, site: Tensor, tokens: int | Tensor) -> Tensor:
    """Return int32 keys [b, s] of tokens of the samples `ordinals` (int64 [b]) at a site (`site_word`).

    tokens: s for the tokens 0 to s - 1, or their positions in the sample (integers [s]).
    """
    low, high = ordinals.to(torch.int32), (ordinals >> 32).to(torch.int32)
    key = torch.full_like(low, signed((seed & WORD) ^ DOMAIN))
    key = finalize(finalize(finalize(key) ^ signed(seed >> 32 & WORD)) ^ low)
    key = finalize(finalize(key ^ high) ^ site)
    if isinstance(tokens, int):
        places = numbers(0, tokens, ordinals.device)
    else:
        places = tokens.to(ordinals.device, torch.int32)
    return finalize(key.unsqueeze(-1) ^ places * signed(TOKEN))


@constant_when_compiled
def numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Return the numbers of `count` tokens or channels, starting at `first`, int32.

    The result is a constant for compilers, because torch 2.13's inductor computes some products of an arange, and so
    masks, wrongly if they wrap (measured on the CPU).
    """
    return _numbers(first, count, device)


@functools.lru_cache(maxsize=16)
def _numbers(first: int, count: int, device: torch.device) -> Tensor:
    # Tensors that are created in inference mode cannot be used in training.
    with torch.inference_mode(False):
        return torch.arange(first, first + count, dtype=torch.int32, device=device)


def keep_mask(keys: Tensor, channels: Tensor, probability: float) -> Tensor:
    """Return a mask that is True where an element is kept. keys (of tokens) and channels, both int32, broadcast to its
    shape."""
    words = finalize(keys ^ channels * signed(CHANNEL))
    # Flipping the top bit turns the comparison of unsigned words into one of signed words.
    return (words ^ signed(1 << 31)) >= keep_threshold(probability) - (1 << 31)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return x * keep * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return gradient * keep * ctx.scale, None, None


def dropout(x: Tensor, keys: Tensor, channels: Tensor, probability: float) -> Tensor:
    """Zero elements of x with `probability`, and divide the others by 1 - probability.

    keys: of the tokens (`token_keys`). channels: global channel numbers. Both are int32 and broadcast to the shape of
    x.
    """
    return _Masked.apply(x, keep_mask(keys, channels, probability), 1.0 / (1.0 - probability))


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor, keys: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias), for x and residual [..., h] and bias [h].

    keys: int32 [...], of the tokens (`megapipe.kernels.reference.dropout.token_keys`). Channels are those of the last
    axis, counted from 0. probability: of zeroing an element.
    """
    channels = numbers(0, x.shape[-1], x.device)
    update = x if bias is None else x + bias
    return residual + dropout(update, keys.unsqueeze(-1), channels, probability)
