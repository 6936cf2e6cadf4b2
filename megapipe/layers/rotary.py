"""Angles of rotary positions, with the stretchings of Llama models."""

import functools
import math

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig, RopeScaling
from megapipe.kernels.opaque import constant_when_compiled
from megapipe.layout.token_order import Share, TokenOrder


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Radians per position of each channel pair, float64 [head_dim / 2].

    theta^(-2i/d) (2104.09864, section 3.2.2); `linear` divides all by the factor (Chen et al. 2023, 2306.15595);
    `llama3` divides wavelengths above original_length / low_frequency_factor, keeps those below original_length /
    high_frequency_factor and interpolates between (Llama 3.1's published configuration).
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = scaling.original_length * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / scaling.factor)
    return frequencies


class RotaryAngles:
    """Cosines and sines of one model's rotary positions. Layers of one model may share it."""

    def __init__(self, model: ModelConfig) -> None:
        scaling = model.rope_scaling
        self._key = (
            model.head_dim,
            model.rope_theta,
            scaling.kind,
            scaling.factor,
            scaling.low_frequency_factor,
            scaling.high_frequency_factor,
            scaling.original_length,
        )

    def tables(self, num_tokens: int, like: Tensor, share: Share | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine [s, head_dim / 2] of s = num_tokens tokens, or of those that a rank holds of so many.

        On the device of `like`, in fp32 (fp64 for fp64).
        """
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if share is None:
            return _tables(self._key, num_tokens, dtype, like.device)
        return _held_tables(self._key, num_tokens, dtype, like.device, share.order, share.rank, share.size)


@constant_when_compiled
def _tables(key: tuple, num_tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return _cached_tables(key, num_tokens, dtype, device)


@constant_when_compiled
def _held_tables(
    key: tuple, num_tokens: int, dtype: torch.dtype, device: torch.device, order: TokenOrder, rank: int, size: int
) -> tuple[Tensor, Tensor]:
    return _cached_held_tables(key, num_tokens, dtype, device, Share(order, rank, size))


@functools.lru_cache(maxsize=8)
def _cached_held_tables(
    key: tuple, num_tokens: int, dtype: torch.dtype, device: torch.device, share: Share
) -> tuple[Tensor, Tensor]:
    numbers = torch.from_numpy(share.numbers(num_tokens)).to(device)
    with torch.inference_mode(False):
        cosine, sine = _cached_tables(key, num_tokens, dtype, device)
        return cosine[numbers], sine[numbers]


@functools.lru_cache(maxsize=8)
def _cached_tables(key: tuple, num_tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    head_dim, theta, kind, factor, low, high, original_length = key
    scaling = RopeScaling(
        kind=kind,
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_length=original_length,
    )
    # Tensors born in inference mode could never take part in training.
    with torch.inference_mode(False):
        positions = torch.arange(num_tokens, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(head_dim, theta, scaling))
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
