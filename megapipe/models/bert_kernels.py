"""Which ops a BERT runs through the kernel registry, and on what tensors: known before anything runs."""

import torch

from megapipe.config.bert import BertModelConfig
from megapipe.models import gpt_kernels
from megapipe.models.gpt_kernels import KernelUse

CAUSAL = ("attention_probabilities", "linear_cross_entropy")
"""What a GPT runs and a BERT does not, or not always: causal attention, and a loss that is one with its projection."""


def kernel_uses(
    model: BertModelConfig,
    dtype: torch.dtype,
    device: str,
    sequence_length: int,
    tensor_size: int,
    recompute_logits: bool = False,
) -> list[KernelUse]:
    """Every op that training runs in the layers of a model on ranks that share matrices with `tensor_size`."""
    shared = gpt_kernels.kernel_uses(model, dtype, device, sequence_length, tensor_size)
    share = -(-model.vocabulary_size // tensor_size)
    return [
        *(use for use in shared if use.op not in CAUSAL),
        KernelUse("gelu", dtype, model.hidden_size),
        KernelUse("linear_cross_entropy", dtype, model.hidden_size)
        if recompute_logits
        else KernelUse("cross_entropy", dtype, share),
    ]
