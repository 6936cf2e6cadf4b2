"""The data of the current micro-batch that layers of a stage need in addition to their inputs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megapipe.kernels.reference.dropout import numbers
from megapipe.layers.split import SplitTape

if TYPE_CHECKING:
    from megapipe.layers.sequence_slices import Slice


@dataclass
class MicrobatchContext:
    """Data of one micro-batch of b samples of s tokens; each layer reads what it needs.

    If samples are sharded over a context group, s counts this rank's tokens, and all fields are about these, except
    those with `whole` in their names. tokens: int64 [b, s], for the embedding. labels: int64 [b, s], for the loss.
    loss_mask: [b, s], weight of each token's loss, None for 1. ordinals: int64 [b], number of each sample in the run,
    for dropout. document_starts: int64 [b, s], position in its sample where each token's document begins: attention is
    limited to that document, and positions count from there; None for samples that are one text. document_blocks: the
    same as blocks for flex_attention, if it is used in place of a mask, by the sliding window of a block's attention.
    token_numbers: int64 [s], ascending, position in its sample of each of this rank's tokens; None for 0 to s - 1.
    whole_document_starts: int64 [b, whole length], document_starts of all tokens, if attention gathers whole samples;
    document_blocks are of these too. slice: the current part of every sample, if a schedule passes samples in slices.
    seed: of the run, below 2**64. training: dropout is active. tape: collects a split backward; None runs it fused.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    ordinals: Tensor | None = None
    seed: int = 0
    training: bool = True
    tape: SplitTape | None = None
    document_starts: Tensor | None = None
    document_blocks: dict[int | None, BlockMask] | None = None
    token_numbers: Tensor | None = None
    whole_document_starts: Tensor | None = None
    slice: "Slice | None" = None


@dataclass
class BertContext(MicrobatchContext):
    """A micro-batch of b padded samples of s tokens, of which at most p are masked and predicted.

    lengths: int64 [b], number of tokens of each whole sample that are not padding, for attention. token_types: int64
    [b, s], 0 up to the first [SEP], then 1, for the embedding. positions: int64 [b, p], indices of the masked tokens
    among this rank's tokens; `labels` [b, p] are their true ids and `loss_mask` [b, p] is 0 after the last.
    sentence_labels: int64 [b], 1 if the pair is not as it was in the text; sentence_weights: [b], 0 for samples past
    the end, and if the first token is on another rank.
    """

    lengths: Tensor | None = None
    token_types: Tensor | None = None
    positions: Tensor | None = None
    sentence_labels: Tensor | None = None
    sentence_weights: Tensor | None = None


def token_numbers(context: MicrobatchContext, num_tokens: int, device: torch.device) -> Tensor:
    """Return the position in its sample of each of this rank's s = num_tokens tokens, int64 or int32 [s]."""
    if context.token_numbers is not None:
        return context.token_numbers.to(device)
    # A view, because a compiler (torch 2.13) cannot save the constant itself for the backward.
    return numbers(0, num_tokens, device).view(-1)
