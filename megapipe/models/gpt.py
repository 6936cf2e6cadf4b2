"""GPT as a list of layers: embedding, blocks, head. GPT-2/3, Llama, Mistral and Qwen shapes come from one block."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.config.memory import Part
from megapipe.config.model import ModelConfig
from megapipe.kernels.registry import Registry
from megapipe.layers.attention import Attention, MultiLatentAttention
from megapipe.layers.context import BertContext, MicrobatchContext, token_numbers
from megapipe.layers.context_parallel import attend_in_pieces, share_samples
from megapipe.layers.cross_entropy import SharedHead, VocabParallelHead
from megapipe.layers.dropout import EMBEDDING_SITE, Dropout, block_sites
from megapipe.layers.embedding import LearnedVectors, VocabParallelEmbedding, scaled
from megapipe.layers.feed_forward import MLP, Experts
from megapipe.layers.linear import OwnTokensLinear, Shapes, within
from megapipe.layers.norms import Norm
from megapipe.layers.split import Rerun, SplitTape, rerun_in_backward
from megapipe.parallel.groups import Group
from megapipe.spec.ops import ContextAttention


class Positions(nn.Module):
    """The rest of the embedding if all pipeline ranks share the table of words: scale, positions, types, norm and
    dropout."""

    def __init__(self, model: ModelConfig, shapes: Shapes, kernels: Registry) -> None:
        super().__init__()
        self.scale = model.embedding_scale
        own, types = within(shapes, "position"), within(shapes, "token_type")
        self.position = LearnedVectors(own, unused=own["weight"][0] - model.max_positions) if own else None
        self.token_type = LearnedVectors(types) if types else None
        self.norm = norm_at(model, shapes, "norm", kernels)
        self.dropout = Dropout(model.embedding_dropout, EMBEDDING_SITE, kernels)

    def forward(self, words: Tensor, context: MicrobatchContext) -> tuple[Tensor]:
        """Return (hidden [b, s, h],) for rows [b, s, h] of the table of words."""
        return (self.after(scaled(words, self.scale), context),)

    def after(self, hidden: Tensor, context: MicrobatchContext) -> Tensor:
        """Return the hidden states [b, s, h] for scaled rows [b, s, h]."""
        if self.position is not None:
            assert context.tokens is not None
            places = token_numbers(context, context.tokens.shape[1], hidden.device)
            hidden = hidden + self.position(places, context.document_starts, context.tape)
        if self.token_type is not None:
            if not isinstance(context, BertContext) or context.token_types is None:
                raise ValueError("the embedding's stage needs token_types in its context")
            hidden = hidden + self.token_type(context.token_types, None, context.tape)
        if self.norm is not None:
            hidden = self.norm(hidden, context.tape)
        return self.dropout(hidden, context)


class Embedding(Positions):
    """Maps tokens, their positions and, in a BERT, their types to hidden states."""

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        super().__init__(model, shapes, kernels)
        self.word = VocabParallelEmbedding(within(shapes, "word"), model.vocabulary_size, group, model.embedding_scale)
        projection = within(shapes, "projection")
        self.projection = OwnTokensLinear(projection, group) if projection else None

    def forward(self, context: MicrobatchContext) -> tuple[Tensor]:  # type: ignore[override]
        """Return (hidden [b, s, h],) for the context's tokens [b, s]."""
        if context.tokens is None:
            raise ValueError("the embedding's stage needs tokens in its context")
        hidden = self.after(self.word(context.tokens, context.tape), context)
        return (hidden if self.projection is None else self.projection(hidden, context.tape),)


class WordShard(nn.Module):
    """A pipeline rank's shard of the table of words. group: all ranks that share the table."""

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(within(shapes, "word"), model.vocabulary_size, group)

    def forward(self, context: MicrobatchContext) -> tuple[Tensor]:
        """Return (rows [b, s, h],) for the context's tokens [b, s]; zeros for rows on other ranks."""
        assert context.tokens is not None
        return (self.word.own_rows(context.tokens, context.tape),)


BlockAttention = Callable[[Tensor, Rerun | None], Tensor]
"""Maps hidden states [b, s, h], passed with a way to recompute them, to the output of attention [b, s, h]."""


class Block(nn.Module):
    """One transformer block; the model decides where its norms are."""

    attention_kind = Attention

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry, index: int) -> None:
        super().__init__()
        attention_site, attention_output_site, mlp_output_site = block_sites(index)
        self.post_norm, self.parallel = model.norm_position == "post", model.parallel_residual
        self.normalizes_stream = model.norm_position == "stream"
        self.update_scale = model.residual_scale
        self.attention_norm = norm_at(model, shapes, "attention_norm", kernels)
        self.attention_output_norm = norm_at(model, shapes, "attention_output_norm", kernels)
        self.mlp_norm = norm_at(model, shapes, "mlp_norm", kernels)
        self.mlp_output_norm = norm_at(model, shapes, "mlp_output_norm", kernels)
        kind = self.attention_kind if model.kv_latent_size is None else MultiLatentAttention
        self.attention = kind(model, within(shapes, "attention"), group, kernels, attention_site)
        if model.why_pieces is not None:
            attend_in_pieces(self.attention)
        self.attention_dropout = Dropout(model.hidden_dropout, attention_output_site, kernels)
        feed_forward = MLP if model.num_experts is None else Experts
        self.mlp = feed_forward(model, within(shapes, "mlp"), group, kernels)
        self.mlp_dropout = Dropout(model.hidden_dropout, mlp_output_site, kernels)

    def share_samples(self, group: Group, kind: ContextAttention) -> None:
        """Attend to the tokens of all ranks of a group, each of which holds a part of every sample."""
        share_samples(self.attention, group, kind)

    def recompute(self, parts: Collection[Part]) -> None:
        """Recompute these parts in the backward instead of saving them; the bits are the same."""
        self.attention.recompute = "attention" in parts
        self.mlp.recompute = "mlp" in parts
        for norm in (self.attention_norm, self.mlp_norm):
            if norm is not None:
                norm.recompute = "norms" in parts

    def forward(self, hidden: Tensor, context: MicrobatchContext) -> tuple[Tensor]:
        """Map hidden states [b, s, h] to (hidden states [b, s, h],)."""
        return (self.around(lambda x, rerun: self.attention(x, context, rerun), hidden, context),)

    def around(self, attention: BlockAttention, hidden: Tensor, context: MicrobatchContext | None) -> Tensor:
        """Return the output [b, s, h] of the block with this attention. context: None for decoding."""
        tape = None if context is None else context.tape
        if self.post_norm:
            return self._post_norm(attention, hidden, context, tape)
        attention_input = _normalised(self.attention_norm, hidden, tape)
        update = self._update(attention(*attention_input), self.attention_output_norm, tape)
        if self.normalizes_stream:
            hidden = self.attention_dropout.add(update, attention_input[0], context)
            mlp_input = _normalised(self.mlp_norm, hidden, tape)
            hidden = mlp_input[0]
        elif self.parallel:
            mlp_input = _normalised(self.mlp_norm, hidden, tape)
            hidden = self.attention_dropout.add(update, hidden, context)
        elif self.mlp_norm is None or (context is not None and self.attention_dropout.active(context)):
            hidden = self.attention_dropout.add(update, hidden, context)
            mlp_input = _normalised(self.mlp_norm, hidden, tape)
        else:
            normalised, hidden = self.mlp_norm.add(update, hidden, tape)
            mlp_input = normalised, self.mlp_norm.recomputation(hidden, tape)
        update = self._update(self.mlp(mlp_input[0], tape, mlp_input[1]), self.mlp_output_norm, tape)
        return self.mlp_dropout.add(update, hidden, context)

    def _post_norm(
        self, attention: BlockAttention, hidden: Tensor, context: MicrobatchContext | None, tape: SplitTape | None
    ) -> Tensor:
        assert self.attention_norm is not None
        assert self.mlp_norm is not None
        added = self.attention_dropout.add(self._update(attention(hidden, None), None, tape), hidden, context)
        hidden = self.attention_norm(added, tape)
        update = self._update(self.mlp(hidden, tape, self.attention_norm.recomputation(added, tape)), None, tape)
        return self.mlp_norm(self.mlp_dropout.add(update, hidden, context), tape)

    def _update(self, output: Tensor, norm: Norm | None, tape: SplitTape | None) -> Tensor:
        """Return what an output of attention or MLP adds to the residual stream."""
        if norm is not None:
            output = norm(output, tape)
        return output if self.update_scale == 1 else output * self.update_scale


def _normalised(norm: Norm | None, hidden: Tensor, tape: SplitTape | None) -> tuple[Tensor, Rerun | None]:
    """Return the norm of hidden states, and how to recompute it; without a norm the hidden states."""
    return (hidden, None) if norm is None else (norm(hidden, tape), norm.recomputation(hidden, tape))


class PredictionDepth(nn.Module):
    """The part of a model that predicts one more token (DeepSeek-V3, arXiv 2412.19437, section 2.2). Embedding and
    output matrix are those of the model. index: number of its block."""

    def __init__(
        self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry, recompute_logits: bool, index: int
    ) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(within(shapes, "word"), model.vocabulary_size, group, model.embedding_scale)
        self.embedding_norm = make_norm(model, within(shapes, "embedding_norm"), kernels)
        self.hidden_norm = make_norm(model, within(shapes, "hidden_norm"), kernels)
        self.projection = OwnTokensLinear(within(shapes, "projection"), group)
        self.block = Block(model, within(shapes, "block"), group, kernels, index)
        self.reruns = False
        self.norm = make_norm(model, within(shapes, "norm"), kernels)
        self.output = VocabParallelHead(
            within(shapes, "output"), model.vocabulary_size, group, kernels, recompute_logits, model.logit_softcap
        )

    def recompute(self, parts: Collection[Part]) -> None:
        """Recompute these parts of the block in the backward; the bits are the same."""
        self.reruns = "block" in parts
        self.block.recompute(parts)

    def forward(self, hidden: Tensor, tokens: Tensor, context: MicrobatchContext) -> Tensor:
        """Return the normalised hidden states [b, s, h] that predict the tokens after `tokens` [b, s].

        hidden: normalised ones [b, s, h] that predict `tokens`.
        """

        def run(x: Tensor, tape: SplitTape | None) -> Tensor:
            (output,) = self.block(x, context=replace(context, tape=tape))
            return cast(Tensor, output)

        tape = context.tape
        parts = self.embedding_norm(self.word(tokens, tape), tape), self.hidden_norm(hidden, tape)
        hidden = self.projection(torch.cat(parts, dim=-1), tape)
        if self.reruns:
            hidden = rerun_in_backward(run, tape, hidden)
        else:
            hidden = run(hidden, tape)
        return self.norm(hidden, tape)


class LastNorm(nn.Module):
    """The last norm of a GPT, by itself where all pipeline ranks share the output matrix."""

    def __init__(self, model: ModelConfig, shapes: Shapes, kernels: Registry) -> None:
        super().__init__()
        self.norm = make_norm(model, within(shapes, "norm"), kernels)
        self.logit_scale = model.logit_scale

    def forward(self, hidden: Tensor, context: MicrobatchContext) -> tuple[Tensor]:
        """Map hidden [b, s, h] to (input of the output matrix [b, s, h],)."""
        return (self.normalised(hidden, context.tape),)

    def normalised(self, hidden: Tensor, tape: SplitTape | None) -> Tensor:
        """Return the input of the output projection."""
        return self._scaled(self.norm(hidden, tape))

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Return hidden states whose logits are scaled."""
        return hidden if self.logit_scale == 1 else hidden * self.logit_scale


class Head(LastNorm):
    """Final norm and output projection, with the loss, and the prediction of further tokens."""

    def __init__(
        self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry, recompute_logits: bool
    ) -> None:
        super().__init__(model, shapes, kernels)
        self.output = VocabParallelHead(
            within(shapes, "output"), model.vocabulary_size, group, kernels, recompute_logits, model.logit_softcap
        )
        depths = [
            PredictionDepth(
                model, within(shapes, f"mtp.{depth}"), group, kernels, recompute_logits, model.num_layers + depth
            )
            for depth in range(model.mtp_layers)
        ]
        self.mtp = nn.ModuleList(depths)
        self.mtp_weight = model.mtp_loss_weight / max(1, model.mtp_layers)

    def recompute(self, parts: Collection[Part]) -> None:
        """Recompute these parts of the blocks of further tokens in the backward; the bits are the same."""
        for depth in self.depths:
            depth.recompute(parts)

    @property
    def depths(self) -> tuple[PredictionDepth, ...]:
        """The parts of the head that each predict one more token."""
        return tuple(cast(Iterable[PredictionDepth], self.mtp))

    def forward(self, hidden: Tensor, context: MicrobatchContext) -> tuple[Tensor]:
        """Return (loss,) for hidden [b, s, h]: the sum of the tokens' weighted cross entropies, a scalar; if the model
        predicts further tokens, [2], in which the second element is their part of the loss.

        Without labels in the context, return (logits over the true vocabulary [b, s, v],).
        """
        normalised = self.norm(hidden, context.tape)
        scaled = self._scaled(normalised)
        if context.labels is None:
            return (self.output.logits(scaled, context.tape),)
        loss = self.output.loss_sum(scaled, context.labels, context.loss_mask, context.tape)
        return (torch.stack([loss, self._further_loss(normalised, context.labels, context)]) if self.mtp else loss,)

    def _further_loss(self, hidden: Tensor, labels: Tensor, context: MicrobatchContext) -> Tensor:
        """Return the loss of the further tokens, a scalar. hidden: normalised hidden states [b, s, h].

        The last tokens of a sample have no further ones in it. If a token between a token and the one that it predicts
        has no weight, the prediction has none, because another document may start there.
        """
        losses = []
        weights = torch.ones_like(labels, dtype=torch.float32) if context.loss_mask is None else context.loss_mask
        later = weights
        for depth in self.depths:
            tokens, labels, later = labels, _shifted(labels), _shifted(later)
            weights = weights * later
            hidden = depth(hidden, tokens, context)
            losses.append(depth.output.loss_sum(self._scaled(hidden), labels, weights, context.tape))
        return torch.stack(losses).sum() * self.mtp_weight


def _shifted(per_token: Tensor) -> Tensor:
    """Return for each token the next token's entry of per_token [b, s]; 0 for the last token."""
    return functional.pad(per_token[:, 1:], (0, 1))


class OutputShard(nn.Module):
    """A pipeline rank's shard of the output matrix, with the loss. group: all ranks that share the matrix."""

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        super().__init__()
        self.output = SharedHead(
            within(shapes, "output"), model.vocabulary_size, group, kernels, softcap=model.logit_softcap
        )

    def forward(self, hidden: Tensor, context: MicrobatchContext) -> tuple[Tensor]:
        """Return (sum of the tokens' weighted cross entropies,) for hidden [b, s, h]; its value is known after the
        backward."""
        assert context.labels is not None
        return (self.output.loss_sum(hidden, context.labels, context.loss_mask, context.tape),)


def make_norm(model: ModelConfig, shapes: Shapes, kernels: Registry) -> Norm:
    """Return a norm of the model's kind."""
    return Norm(model.norm_kind.op, shapes, model.norm_epsilon, kernels)


def norm_at(model: ModelConfig, shapes: Shapes, path: str, kernels: Registry) -> Norm | None:
    """Return the norm that a layer has at this path, or None."""
    own = within(shapes, path)
    return make_norm(model, own, kernels) if own else None
