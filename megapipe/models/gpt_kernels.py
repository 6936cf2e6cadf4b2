"""Which ops a GPT runs through the kernel registry, and on what tensors: known before anything runs."""

from dataclasses import dataclass

import torch

from megapipe.config.model import ModelConfig
from megapipe.layers.attention import choose_path


@dataclass(frozen=True)
class KernelUse:
    """Tensors that an op is picked for: their dtype and the length of their last axis."""

    op: str
    dtype: torch.dtype
    width: int


def kernel_uses(
    model: ModelConfig, dtype: torch.dtype, device: str, sequence_length: int, tensor_size: int
) -> list[KernelUse]:
    """Every op that training runs in the layers of a model on ranks that share matrices with `tensor_size`."""
    hidden, head = model.hidden_size, model.head_dim
    experts = model.num_experts is not None  # each whole on a rank, its bias added in the product
    share = model.ffn_size // (1 if experts else tensor_size)
    uses = [KernelUse(model.normalization, dtype, hidden)]
    if model.qk_norm:
        uses.append(KernelUse("rms_norm", dtype, head))
    if model.positions == "rotary":
        uses.append(KernelUse("rotary", dtype, head))
    if runs_unfused(model, dtype, device, sequence_length):
        uses.append(KernelUse("attention_probabilities", dtype, head))
    if model.attention_dropout:
        uses.append(KernelUse("dropout", dtype, sequence_length))
    if model.activation == "swiglu":
        uses.append(KernelUse("swiglu", dtype, 2 * share))
    else:
        uses.append(KernelUse("bias_gelu" if model.bias == "all" and not experts else "gelu", dtype, share))
    if model.embedding_dropout:
        uses.append(KernelUse("dropout", dtype, hidden))
    if model.hidden_dropout:
        uses.append(KernelUse("bias_dropout_residual", dtype, hidden))
    return [*uses, KernelUse("linear_cross_entropy", dtype, hidden)]


def runs_unfused(model: ModelConfig, dtype: torch.dtype, device: str, sequence_length: int) -> bool:
    """Whether attention takes the path that keeps its weights, documents that are kept apart by blocks set aside."""
    if model.attention == "auto":
        return model.attention_dropout > 0 or choose_path(device, dtype, sequence_length) == "unfused"
    return model.attention == "unfused"
