"""Rotary positions: the frequencies of channel pairs, stretched for long contexts, and tables of their angles.

Query and key are rotated by the kernel op `rotary`. Scalings whose frequencies depend on the length of the sequence
(dynamic, longrope) use the length of the whole sample, even if a rank has a part of it or documents count their
positions from 0: one table serves all layers and samples of a micro-batch. In generation the length is the capacity of
the caches, so that all keys in a cache have the same frequencies.
"""

import functools
import math

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeScaling
from megapipe.kernels.opaque import constant_when_compiled
from megapipe.kernels.registry import Registry
from megapipe.spec.token_order import Share, TokenOrder


def inverse_frequencies(channels: int, theta: float, scaling: RopeScaling, num_tokens: int) -> Tensor:
    """Return the radians per position of each channel pair, float64 [channels / 2], in sequences of num_tokens tokens.

    Pair i has theta^(-2i/d) (2104.09864, section 3.2.2). `linear` divides all frequencies by the factor (Chen et al.
    2023, 2306.15595). `llama3` divides the frequencies of wavelengths above original_length / low_frequency_factor,
    keeps those of wavelengths below original_length / high_frequency_factor and interpolates between (Llama 3.1's
    published configuration). `dynamic` (NTK-aware) and `yarn` (Peng et al. 2023, 2309.00071, sections 3.1 to 3.3) and
    `longrope` (Ding et al. 2024, 2402.13753) have the formulas of transformers' ROPE_INIT_FUNCTIONS.
    """
    if scaling.kind == "dynamic":
        longer = max(num_tokens, scaling.original_length) / scaling.original_length
        theta *= (scaling.factor * longer - (scaling.factor - 1)) ** (channels / (channels - 2))
    frequencies = theta ** (-torch.arange(0, channels, 2, dtype=torch.float64, device="cpu") / channels)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        factors = scaling.long_factor if num_tokens > scaling.original_length else scaling.short_factor
        return frequencies / torch.tensor(factors, dtype=torch.float64, device="cpu")
    if scaling.kind == "llama3":
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = scaling.original_length * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    elif scaling.kind == "yarn":
        kept = _kept_by_yarn(channels, theta, scaling)
    else:
        return frequencies
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _kept_by_yarn(channels: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the fraction of each pair's frequency that is not stretched, float64 [channels / 2]: it falls linearly
    from the pair that rotates beta_fast times within original_length to the pair that rotates beta_slow times."""

    def pair(turns: float) -> float:
        return channels * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    length = 0.001 if first == last else last - first
    pairs = torch.arange(channels // 2, dtype=torch.float64, device="cpu")
    return 1.0 - ((pairs - first) / length).clamp(0.0, 1.0)


def attention_factor(scaling: RopeScaling) -> float:
    """Return the factor of cosines and sines, by default the one that transformers' ROPE_INIT_FUNCTIONS infer from the
    scaling's factor (YaRN, section 3.4; LongRoPE, section 3.3)."""
    if scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    growth = math.log(scaling.factor)
    if scaling.kind == "longrope":
        return math.sqrt(1 + growth / math.log(scaling.original_length))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * growth + 1) / (0.1 * scaling.mscale_all_dim * growth + 1)
    return 0.1 * growth + 1


class RotaryAngles:
    """Cosines and sines of a model's rotary positions, which its layers may share."""

    def __init__(self, model: ModelConfig) -> None:
        fields = vars(model.rope_scaling).items()
        scaling = ((name, tuple(value) if isinstance(value, list) else value) for name, value in fields)
        self._key = (model.rotary_dim, model.rope_theta, *scaling)

    def tables(self, num_tokens: int, like: Tensor, share: Share | None = None) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [s, rotary_dim / 2] of s = num_tokens tokens, or of this rank's part of them, times
        the attention factor.

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
    channels, theta, *fields = key
    scaling = RopeScaling(**dict(fields))
    # Tensors that are created in inference mode cannot be used in training.
    with torch.inference_mode(False):
        positions = torch.arange(num_tokens, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(channels, theta, scaling, num_tokens))
        factor = attention_factor(scaling)
        return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor, kernels: Registry, *, own_positions: bool = False) -> Tensor:
    """Rotate the first 2 r channels of x [b, s, kv groups, heads, d] by the angles of cosine and sine [s, r].

    own_positions: every token of every sample has its own angles, [b x s, r].
    """
    batch, length, groups, heads, width = x.shape
    channels = 2 * cosine.shape[-1]
    turned = x if channels == width else x[..., :channels]
    # The op supports one table of angles for all samples, so samples with their own angles are passed as one long
    # sample.
    rows = turned.reshape(1 if own_positions else batch, -1, groups * heads, channels)
    turned = kernels.pick("rotary", rows).apply(rows, cosine, sine).view(batch, length, groups, heads, channels)
    return turned if channels == width else torch.cat([turned, x[..., channels:]], dim=-1)
