"""The path of attention: fused, or through its weights, which it then keeps for the backward."""

from megapipe.config.model import ModelConfig
from megapipe.spec.dtypes import AttentionPath, Precision

LEAST_HEAD_DIM = 16
"""Channels of a head that flex_attention's kernels need."""
WITH_AMX = 512
WITHOUT_AMX = 128
"""Tokens up to which the unfused path is faster in 16 bits on a CPU."""


def faster_path(device: str, half: bool, num_tokens: int, amx: bool) -> AttentionPath:
    """Return the faster path, forward and backward, on this device type.

    half: 16 bits a number. amx: the CPU has matrix instructions for bf16.

    Measured on one CPU thread, 4 heads of 64 channels: in fp32 the two are level up to 256 tokens and SDPA is ahead
    from 512 on. In bf16 unfused is ahead up to 512 tokens with AMX (by 2.6 at 256) and up to 128 without.
    """
    if device != "cpu" or not half:
        return "sdpa"
    return "unfused" if num_tokens <= (WITH_AMX if amx else WITHOUT_AMX) else "sdpa"


def attention_path(
    model: ModelConfig, precision: Precision, device: str, num_tokens: int, amx: bool = False
) -> AttentionPath:
    """Return the path of a model: the configured one, else the faster one that supports its dropout."""
    if model.attention != "auto":
        return "unfused" if model.attention == "unfused" else "sdpa"
    if model.attention_dropout > 0:
        return "unfused"
    return faster_path(device, precision != "fp32", num_tokens, amx)


def why_a_mask(model: ModelConfig, device: str) -> str | None:
    """Return why attention within documents takes a mask on this device type; None if it takes blocks."""
    if model.attention in ("sdpa", "unfused"):
        return f"model.attention is {model.attention}"
    if model.attention_dropout > 0:
        return "model.attention_dropout needs the unfused path"
    if device != "cuda":
        return f"torch's flex_attention has no backward on {device}"
    if model.head_dim < LEAST_HEAD_DIM:
        return f"torch's flex_attention needs heads of {LEAST_HEAD_DIM} channels, and these have {model.head_dim}"
    return None
