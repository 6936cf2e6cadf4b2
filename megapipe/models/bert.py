"""The blocks and heads of a BERT, whose embedding is a GPT's with token types (Devlin et al. 2018, arXiv 1810.04805).

With norms after the residual sums it is transformers' BertForPreTraining; with norms before attention and MLP it is
Megatron-LM's BERT (Shoeybi et al. 2019, arXiv 1909.08053, section 5.3).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.config.bert import BertModelConfig
from megapipe.kernels.reference.norms import wide
from megapipe.kernels.registry import Registry
from megapipe.layers.attention import BidirectionalAttention
from megapipe.layers.context import BertContext
from megapipe.layers.cross_entropy import MaskedTokenHead
from megapipe.layers.linear import OnShards, ReplicatedLinear, Shapes, within
from megapipe.layers.split import Tensors
from megapipe.models.gpt import Block, make_norm, norm_at
from megapipe.parallel.collectives import gather_from_group
from megapipe.parallel.groups import Group


class BertBlock(Block):
    """One transformer block with bidirectional attention."""

    attention_kind = BidirectionalAttention


class BertHead(nn.Module, OnShards):
    """Both heads with their losses: one predicts the masked tokens, the other whether the two parts of a sample follow
    each other in the text.

    Sharded tokens are gathered after the norm; the rest is the same on every tensor rank.
    """

    whole_sequence = ("transform", "transform_norm", "output", "pooler", "sentence")

    def __init__(
        self, model: BertModelConfig, shapes: Shapes, group: Group, kernels: Registry, recompute_logits: bool
    ) -> None:
        super().__init__()
        self.norm = norm_at(model, shapes, "norm", kernels)
        self.transform = ReplicatedLinear(within(shapes, "transform"), group)
        self.transform_norm = make_norm(model, within(shapes, "transform_norm"), kernels)
        self.output = MaskedTokenHead(
            within(shapes, "output"), model.vocabulary_size, group, kernels, recompute_logits
        )
        self.pooler = ReplicatedLinear(within(shapes, "pooler"), group) if model.sentence_head else None
        self.sentence = ReplicatedLinear(within(shapes, "sentence"), group) if model.sentence_head else None
        self.activation = model.transform_kind
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: BertContext) -> Tensors:
        """Return (losses,) for hidden [b, s, h]: the summed cross entropies of the masked tokens and of the sentence
        pairs, [2], or those of the masked tokens, a scalar, if there is no sentence head. In evaluation, return
        (losses, numbers of correct predictions in the same shape). Without labels in the context, return (logits of
        all tokens [b, s, v], logits of the pairs [b, 2] if there is a sentence head).
        """
        tape = context.tape
        if self.norm is not None:
            hidden = self.norm(hidden, tape)
        if self.sequence is not None:
            hidden = gather_from_group(hidden, self.sequence.group, dim=1)
        sentence = self._sentence_logits(hidden, context)
        if context.labels is None:
            logits = self.output.logits(self._transformed(hidden, context), tape)
            return (logits,) if sentence is None else (logits, sentence)
        if context.positions is None or context.loss_mask is None:
            raise ValueError("the heads' stage needs positions and loss_mask in its context")
        rows = hidden.gather(1, context.positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        rows = self._transformed(rows, context)
        if context.training:
            losses = self.output.loss_sum(rows, context.labels, context.loss_mask, tape)
            return (losses if sentence is None else torch.stack([losses, _sentence_loss(sentence, context)]),)
        local = self.output.local_logits(rows, tape)
        losses = self.output.loss_of(local, context.labels, context.loss_mask)
        correct = self.output.correct(local, context.labels, context.loss_mask)
        if sentence is not None:
            losses = torch.stack([losses, _sentence_loss(sentence, context)])
            correct = torch.stack([correct, _sentences_correct(sentence, context)])
        return losses, correct

    def _transformed(self, hidden: Tensor, context: BertContext) -> Tensor:
        inner = self.transform(hidden, context.tape)
        inner = self.kernels.pick(self.activation.op, inner).apply(inner, *self.activation.arguments)
        return self.transform_norm(inner, context.tape)

    def _sentence_logits(self, hidden: Tensor, context: BertContext) -> Tensor | None:
        """Return logits [b, 2] from the pooled first token; None without a sentence head."""
        if self.pooler is None or self.sentence is None:
            return None
        pooled = torch.tanh(self.pooler(hidden[:, 0].contiguous(), context.tape))
        return self.sentence(pooled, context.tape)


def _sentence_loss(logits: Tensor, context: BertContext) -> Tensor:
    """Return the weighted sum of the pairs' cross entropies, in fp32 (fp64 for fp64)."""
    labels, weights = _sentences(context)
    return (functional.cross_entropy(wide(logits), labels, reduction="none") * weights).sum()


def _sentences_correct(logits: Tensor, context: BertContext) -> Tensor:
    labels, weights = _sentences(context)
    return ((logits.argmax(dim=-1) == labels) * weights).sum()


def _sentences(context: BertContext) -> tuple[Tensor, Tensor]:
    if context.sentence_labels is None or context.sentence_weights is None:
        raise ValueError("the sentence head needs sentence_labels and sentence_weights in its context")
    return context.sentence_labels, context.sentence_weights
