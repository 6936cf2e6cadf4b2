"""The samples of a run, and the loaders that turn them into the contexts of a GPT's or a BERT's layers."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.batches import MicrobatchSource, RankOrdinals, TokenBatch
from megapipe.data.bert_samples import BertSamples, BlendedBertSamples, open_bert_samples
from megapipe.data.manifest import check_one_tokenizer
from megapipe.data.megatron_order import MegatronBlendOrder, MegatronSamples, samples_wanted
from megapipe.data.mixing import BlendedSamples, BlendOrder, CorpusOrder, FillInTheMiddle, FillInTheMiddleRule
from megapipe.data.samples import GptSamples, PackedSamples, SampleSet, SplitName
from megapipe.engine.step import Counts, tensor_on
from megapipe.layers.attention import block_lists, document_blocks
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.layers.sequence_slices import sliced
from megapipe.layout.batch_plan import BatchPlan
from megapipe.layout.stages import slice_ranges
from megapipe.parallel.mesh import Mesh
from megapipe.spec.attention import why_a_mask
from megapipe.training.loop.loader import Consumer, HeldTokens, Loader, runs_ring
from megapipe.training.observe.metrics import References

AnyBert = BertSamples | BlendedBertSamples
Context = TypeVar("Context", bound=MicrobatchContext)


class RankLoader(Loader):
    """Loads a rank's part of every step. training: whether dropout is active."""

    def __init__(
        self, config: PretrainConfig, mesh: Mesh, consumer: Consumer, plan: BatchPlan, training: bool
    ) -> None:
        self._seed, self._training = config.training.seed, training
        self._device = mesh.device
        self._is_first, self._is_last = consumer.is_first, consumer.is_last
        self._held = HeldTokens.of(config, mesh)
        self._numbers = None if self._held.numbers is None else tensor_on(self._held.numbers, mesh.device)
        self._num_terms = len(config.loss_terms)
        super().__init__(plan, config.batch.micro_size * mesh.size("data"))

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return tensor_on(array, self._device)

    def _new_context(self, kind: type[Context], ordinals: np.ndarray) -> Context:
        """Return a context with the fields that every stage of every kind of model needs."""
        return kind(
            ordinals=tensor_on(ordinals, self._device, wide=True),
            seed=self._seed,
            training=self._training,
            token_numbers=self._numbers,
        )


class BatchLoader(RankLoader):
    """Loads a GPT's part of every step on one rank.

    Only the first and last stages load token ids. What other stages need (the numbers of the samples, for dropout) is
    a function of the step.
    """

    def __init__(
        self,
        config: PretrainConfig,
        mesh: Mesh,
        consumer: Consumer,
        samples: SampleSet,
        plan: BatchPlan,
        training: bool,
    ) -> None:
        super().__init__(config, mesh, consumer, plan, training)
        data = config.data
        self._source = MicrobatchSource(
            samples,
            data_rank=mesh.coordinate("data"),
            data_size=mesh.size("data"),
            micro_size=config.batch.micro_size,
            # The documents of a packed sample are unrelated, so the model must not predict one from the end of
            # another.
            mask_end_of_document=data.mask_end_of_document or data.pack == "best_fit",
            isolate_documents=data.isolate_documents,
        )
        self._slices = slice_ranges(config)
        self._windows = {each.sliding_window for each in config.model.kinds_of_layers.values()}
        no_mask = not runs_ring(config.parallel) and why_a_mask(config.model, mesh.device.type) is None
        self._builds_blocks = data.isolate_documents and no_mask and len(self._slices) == 1

    def _microbatches(
        self, consumed: int, index: int, num_microbatches: int
    ) -> Iterable[tuple[MicrobatchContext, Counts | None]]:
        context, count = self._microbatch(consumed, index, num_microbatches)
        if len(self._slices) == 1:
            return [(context, count)]
        counts: list[Counts | None] = [None] * len(self._slices)
        if self._is_last:
            mask = self._source.loss_mask(self._source.ordinals(consumed, index, num_microbatches))
            counts = [float(mask[:, places.start : places.stop].sum()) for places in self._slices]
        return zip(sliced(context, self._slices), counts, strict=True)

    def _microbatch(self, consumed: int, index: int, num_microbatches: int) -> tuple[MicrobatchContext, Counts | None]:
        if self._is_first or self._is_last:
            microbatch = self._source.microbatch(consumed, index, num_microbatches)
            count = float(self._held.part(microbatch.loss_mask).sum()) if self._is_last else None
            # Losses of further tokens are divided by the same count as those of the next token, as in DeepSeek-V3.
            counts = count if count is None or self._num_terms == 1 else (count,) * self._num_terms
            return self._context(microbatch), counts
        ordinals = self._source.ordinals(consumed, index, num_microbatches)
        return self._context_without_tokens(ordinals, self._source.document_starts(ordinals)), None

    def _context(self, microbatch: TokenBatch) -> MicrobatchContext:
        context = self._context_without_tokens(microbatch.ordinals, microbatch.document_starts)
        if self._is_first:
            context.tokens = self._on_device(self._held.part(microbatch.tokens))
        if self._is_last:
            context.labels = self._on_device(self._held.part(microbatch.labels))
            context.loss_mask = self._on_device(self._held.part(microbatch.loss_mask))
        return context

    def _context_without_tokens(self, ordinals: np.ndarray, document_starts: np.ndarray | None) -> MicrobatchContext:
        """Return the parts of the context that every stage needs."""
        context = self._new_context(MicrobatchContext, ordinals)
        if document_starts is None:
            return context
        context.document_starts = self._on_device(self._held.part(document_starts))
        whole_starts = context.document_starts
        if self._held.gathers:
            whole_starts = context.whole_document_starts = self._on_device(document_starts)
        if self._builds_blocks:
            context.document_blocks = {}
            for window in self._windows:
                lists = list(map(self._on_device, block_lists(document_starts, window)))
                context.document_blocks[window] = document_blocks(lists, whole_starts, window)
        return context


def split_samples(config: PretrainConfig, split: SplitName) -> SampleSet:
    """Open the samples of a split: the training split in its shuffled order, the others in the order of the shard.

    Raises DataError for unusable shards, shards of different tokenizers, and a split that is too small for one sample.
    """
    training = split == "train"
    corpora: Sequence[GptSamples | PackedSamples | MegatronSamples]
    order: CorpusOrder | None
    if training and config.data.order == "megatron":
        corpora, order = _megatron_corpora(config)
    else:
        corpora = [_corpus(config, prefix, split) for prefix in config.data.prefixes]
        order = BlendOrder(list(config.data.blend.values())) if config.data.blend else None
    check_one_tokenizer(corpus.manifest for corpus in corpora)
    samples = corpora[0] if order is None else BlendedSamples(corpora, order, repeats=training)
    if not (training and config.data.fim_tokens):
        return samples
    prefix, suffix, middle = config.data.fim_tokens
    rule = FillInTheMiddleRule(
        rate=config.data.fim_rate,
        suffix_first=config.data.fim_suffix_first,
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        end_of_document=next((each.manifest.end_of_document for each in corpora if each.manifest is not None), None),
    )
    return FillInTheMiddle(samples, rule, config.training.seed)


def _megatron_corpora(config: PretrainConfig) -> tuple[list[MegatronSamples], MegatronBlendOrder | None]:
    """Return the training split of each shard in Megatron-LM's order, for the samples of the whole run, and the order
    of their blend, if there is one."""
    num_samples = BatchPlan.of(config.batch).consumed_after(config.training.steps)
    weights = list(config.data.blend.values())
    sample_counts = samples_wanted(weights, num_samples) if weights else [num_samples]
    corpora = [
        MegatronSamples(
            prefix,
            split="train",
            shares=config.data.split,
            sequence_length=config.data.sequence_length,
            seed=config.training.seed,
            num_samples=count,
            vocabulary_size=config.model.vocabulary_size,
        )
        for prefix, count in zip(config.data.prefixes, sample_counts, strict=True)
    ]
    if not weights:
        return corpora, None
    order = MegatronBlendOrder(weights, num_samples)
    order.check_supply(config.data.prefixes, [len(corpus) for corpus in corpora])
    return corpora, order


def _corpus(config: PretrainConfig, prefix: str, split: SplitName) -> GptSamples | PackedSamples:
    kind = PackedSamples if config.data.pack == "best_fit" else GptSamples
    return kind(
        prefix,
        split=split,
        shares=config.data.split,
        sequence_length=config.data.sequence_length,
        seed=config.training.seed,
        shuffle=split == "train",
        vocabulary_size=config.model.vocabulary_size,
    )


class BertLoader(RankLoader):
    """Loads a BERT's part of every step on one rank.

    Only the first stage loads tokens, and only the last loads labels. The numbers of the samples and their lengths,
    which attention needs on every stage, come from the index of the shard.
    """

    def __init__(
        self, config: PretrainConfig, mesh: Mesh, consumer: Consumer, samples: AnyBert, plan: BatchPlan, training: bool
    ) -> None:
        super().__init__(config, mesh, consumer, plan, training)
        self._samples = samples
        self._rank = RankOrdinals(
            data_rank=mesh.coordinate("data"),
            data_size=mesh.size("data"),
            micro_size=config.batch.micro_size,
        )
        self._length = config.data.sequence_length

    def _microbatch(self, consumed: int, index: int, num_microbatches: int) -> tuple[BertContext, Counts | None]:
        ordinals = self._rank.ordinals(consumed, index, num_microbatches)
        context = self._new_context(BertContext, ordinals)
        if not (self._is_first or self._is_last):
            context.lengths = self._on_device(self._samples.lengths(ordinals))
            return context, None
        batch = self._samples.batch(ordinals)
        context.lengths = self._on_device(batch.lengths)
        if self._is_first:
            context.tokens = self._on_device(self._held.part(batch.tokens))
            context.token_types = self._on_device(self._held.part(batch.token_types))
        if not self._is_last:
            return context, None
        positions, labels, loss_mask = self._held.predictions(
            batch.positions, batch.labels, batch.loss_mask, self._length
        )
        # The prediction about a pair of sentences uses its first token.
        sentence_weights = batch.sentence_weights if self._held.has_first else np.zeros_like(batch.sentence_weights)
        context.positions = self._on_device(positions)
        context.labels = self._on_device(labels)
        context.loss_mask = self._on_device(loss_mask)
        context.sentence_labels = self._on_device(batch.sentence_labels)
        context.sentence_weights = self._on_device(sentence_weights)
        counts = (float(loss_mask.sum()), float(sentence_weights.sum()))
        return context, counts[: self._num_terms]


def bert_samples(config: BertPretrainConfig, split: SplitName) -> AnyBert:
    """Open the samples of a split: the training split in its shuffled order, the others in the order of the shard.

    Raises DataError for unusable files, a split too small for one sample and a blend of different vocabularies.
    """
    return open_bert_samples(
        config.data,
        split=split,
        seed=config.training.seed,
        vocabulary_size=config.model.vocabulary_size,
        shuffle=split == "train",
    )


Samples = SampleSet | AnyBert

_KINDS: dict[str, tuple[Callable[[Any, SplitName], Samples], Callable[..., Loader]]] = {
    "gpt": (split_samples, BatchLoader),
    "bert": (bert_samples, BertLoader),
}
"""Kind of configuration -> the function that opens the samples of a split, and the loader that reads them."""


def open_samples(config: PretrainConfig, split: SplitName) -> Samples:
    """Open a split's samples. Raises DataError for unusable files or a split too small for one sample."""
    return _KINDS[config.kind][0](config, split)


def open_loader(
    config: PretrainConfig,
    mesh: Mesh,
    consumer: Consumer,
    samples: Samples,
    plan: BatchPlan | None = None,
    *,
    training: bool = True,
) -> Loader:
    """Return the loader of this rank's part of every step. plan: None for the plan of the configuration. training:
    whether dropout is active.
    """
    plan = BatchPlan.of(config.batch) if plan is None else plan
    return _KINDS[config.kind][1](config, mesh, consumer, samples, plan, training)


MAXIMUM_TOKENS = 2**20
"""Maximum number of tokens to count, which takes about a second."""

BLOCK = 256
"""Samples read at a time."""


def reference_losses(samples: Samples, vocabulary_size: int) -> References:
    """Return reference losses from the labels of the run's first samples, a random part of the split, or all of a
    small split; for BERT from all tokens, since any may be hidden.

    The entropy of the counts is below that of the split by about (distinct ids - 1) / (2 num_tokens) (Miller, 1955).
    """
    num_samples = max(1, min(len(samples), MAXIMUM_TOKENS // samples.sequence_length))
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for first in range(0, num_samples, BLOCK):
        ordinals = np.arange(first, min(first + BLOCK, num_samples))
        counts += np.bincount(_labels(samples, ordinals), minlength=vocabulary_size)
    shares = counts[counts > 0] / counts.sum()
    pairs = math.log(2) if isinstance(samples, AnyBert) and samples.has_pairs else 0.0
    return References(math.log(vocabulary_size), float(-(shares * np.log(shares)).sum()), int(counts.sum()), pairs)


def _labels(samples: Samples, ordinals: np.ndarray) -> np.ndarray:
    if isinstance(samples, AnyBert):
        return samples.text(ordinals)
    labels = samples.tokens(ordinals)[:, 1:]
    return labels[np.arange(samples.sequence_length) < samples.num_labels(ordinals)[:, None]]
