"""What the layers of a stage know about the micro-batch in hand."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megapipe.layers.split import SplitTape


@dataclass
class MicrobatchContext:
    """Tensors and facts of one micro-batch of b samples of s tokens; each layer takes what it needs.

    tokens: int64 [b, s], for the embedding. labels: int64 [b, s], for the loss. loss_mask: [b, s], weight of each
    token's loss, None for 1. ordinals: int64 [b], number of each sample in the run, for dropout.
    document_starts: int64 [b, s], place in its sample where each token's document begins: attention sees that document
    alone and positions count from there; None for samples that are one text. document_blocks: the same as blocks for
    flex_attention, where that is to be used in place of a mask.
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
    document_blocks: BlockMask | None = None


@dataclass
class BertContext(MicrobatchContext):
    """A micro-batch of b padded samples of s tokens, of which at most p are hidden and predicted.

    lengths: int64 [b], tokens of each sample that are not padding, for attention. token_types: int64 [b, s], 0 up to
    the first [SEP], then 1, for the embedding. positions: int64 [b, p], places of the hidden tokens; `labels` [b, p]
    are what stood there and `loss_mask` [b, p] is 0 behind the last. sentence_labels: int64 [b], 1 where the pair is
    not as it was in the text; sentence_weights: [b], 0 for samples past the end.
    """

    lengths: Tensor | None = None
    token_types: Tensor | None = None
    positions: Tensor | None = None
    sentence_labels: Tensor | None = None
    sentence_weights: Tensor | None = None
