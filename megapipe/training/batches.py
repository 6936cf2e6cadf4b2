"""From the data room's arrays to what the engine hands to layers: one context per micro-batch, loaded ahead."""

import numpy as np
import torch

from megapipe.config.run import PretrainConfig
from megapipe.data.batches import MicrobatchSource, TokenBatch
from megapipe.data.blend import BlendedSamples
from megapipe.data.blend_order import BlendOrder
from megapipe.data.checked_shards import check_one_tokenizer
from megapipe.data.fill_in_the_middle import FillInTheMiddle, FillInTheMiddleRule
from megapipe.data.manifest import ShardManifest
from megapipe.data.megatron_blend import MegatronBlendOrder, samples_wanted
from megapipe.data.megatron_order import MegatronSamples
from megapipe.data.packed_samples import PackedSamples
from megapipe.data.sample_set import SampleSet
from megapipe.data.samples import GptSamples
from megapipe.data.splits import SplitName
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.document_blocks import block_lists, document_blocks
from megapipe.layout.batch_plan import BatchPlan
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.transfer import tensor_on
from megapipe.spec.attention_path import why_a_mask
from megapipe.training.context_layout import ALL_TOKENS, HeldTokens, runs_ring
from megapipe.training.loader import Consumer, Loader


class BatchLoader(Loader):
    """Loads a rank's share of every step.

    Token ids reach the first and the last stage alone; what other stages need (the samples' numbers, for dropout) is a
    pure function of the step. blocks: documents that are kept apart are told as blocks for flex_attention, each token
    seeing `window` at most. held: which tokens of a sample this rank trains on.
    """

    def __init__(
        self,
        source: MicrobatchSource,
        plan: BatchPlan,
        *,
        seed: int,
        device: torch.device,
        is_first: bool,
        is_last: bool,
        training: bool = True,
        blocks: bool = False,
        window: int | None = None,
        held: HeldTokens = ALL_TOKENS,
    ) -> None:
        super().__init__(plan, source.micro_size * source.data_size)
        self._source = source
        self._seed = seed
        self._device = device
        self._is_first = is_first
        self._is_last = is_last
        self._training = training
        self._window = window
        self._blocks = blocks
        self._held = held
        self._numbers = None if held.numbers is None else tensor_on(held.numbers, device)

    def _microbatch(self, consumed: int, index: int, num_microbatches: int) -> tuple[MicrobatchContext, float | None]:
        if self._is_first or self._is_last:
            microbatch = self._source.microbatch(consumed, index, num_microbatches)
            count = float(self._held.part(microbatch.loss_mask).sum()) if self._is_last else None
            return self._context(microbatch), count
        ordinals = self._source.ordinals(consumed, index, num_microbatches)
        return self._context_without_tokens(ordinals, self._source.document_starts(ordinals)), None

    def _context(self, microbatch: TokenBatch) -> MicrobatchContext:
        context = self._context_without_tokens(microbatch.ordinals, microbatch.document_starts)
        if self._is_first:
            context.tokens = tensor_on(self._held.part(microbatch.tokens), self._device)
        if self._is_last:
            context.labels = tensor_on(self._held.part(microbatch.labels), self._device)
            context.loss_mask = tensor_on(self._held.part(microbatch.loss_mask), self._device)
        return context

    def _context_without_tokens(self, ordinals: np.ndarray, document_starts: np.ndarray | None) -> MicrobatchContext:
        """What every stage knows."""
        context = MicrobatchContext(
            ordinals=tensor_on(ordinals, self._device, wide=True),
            seed=self._seed,
            training=self._training,
            token_numbers=self._numbers,
        )
        if document_starts is None:
            return context
        context.document_starts = tensor_on(self._held.part(document_starts), self._device)
        whole_starts = context.document_starts
        if self._held.gathers:
            whole_starts = context.whole_document_starts = tensor_on(document_starts, self._device)
        if self._blocks:
            lists = block_lists(document_starts, self._window)
            arrays = (lists.num_partial, lists.partial, lists.num_full, lists.full)
            moved = [tensor_on(each, self._device) for each in arrays]
            context.document_blocks = document_blocks(moved, whole_starts, self._window)
        return context


def split_samples(config: PretrainConfig, split: SplitName) -> SampleSet:
    """A split's samples: the training split in its shuffled order, the others front to back.

    Raises DataError for unusable shards, shards of different tokenizers, and a split of one that is too small for one
    sample.
    """
    training = split == "train"
    if training and config.data.order == "megatron":
        samples, manifests = _megatron_samples(config)
    else:
        samples, manifests = _keyed_samples(config, split)
    if not (training and config.data.fim_tokens):
        return samples
    prefix, suffix, middle = config.data.fim_tokens
    rule = FillInTheMiddleRule(
        rate=config.data.fim_rate,
        suffix_first=config.data.fim_suffix_first,
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        end_of_document=manifests[0].end_of_document if manifests else None,
    )
    return FillInTheMiddle(samples, rule, config.training.seed)


def _keyed_samples(config: PretrainConfig, split: SplitName) -> tuple[SampleSet, list[ShardManifest]]:
    """A split's samples in the project's own order."""
    corpora = [_corpus(config, prefix, split) for prefix in config.data.prefixes]
    manifests = [manifest for corpus in corpora for manifest in corpus.manifests]
    check_one_tokenizer(manifests)
    if not config.data.blend:
        return corpora[0], manifests
    order = BlendOrder(list(config.data.blend.values()))
    return BlendedSamples(corpora, order, repeats=split == "train"), manifests


def _megatron_samples(config: PretrainConfig) -> tuple[SampleSet, list[ShardManifest]]:
    """The training split in Megatron-LM's order, for the samples of the whole run."""
    num_samples = BatchPlan.of(config.batch).consumed_after(config.training.steps)
    weights = list(config.data.blend.values())
    wanted = samples_wanted(weights, num_samples) if weights else [num_samples]
    corpora = [
        MegatronSamples(
            prefix,
            split="train",
            shares=config.data.split,
            sequence_length=config.data.sequence_length,
            seed=config.training.seed,
            num_samples=each,
            vocabulary_size=config.model.vocabulary_size,
        )
        for prefix, each in zip(config.data.prefixes, wanted, strict=True)
    ]
    manifests = [manifest for corpus in corpora for manifest in corpus.manifests]
    check_one_tokenizer(manifests)
    if not weights:
        return corpora[0], manifests
    order = MegatronBlendOrder(weights, num_samples)
    order.check_supply(config.data.prefixes, [len(corpus) for corpus in corpora])
    return BlendedSamples(corpora, order, repeats=True), manifests


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


def batch_loader(
    config: PretrainConfig,
    mesh: Mesh,
    consumer: Consumer,
    samples: SampleSet,
    plan: BatchPlan | None = None,
    *,
    training: bool = True,
) -> BatchLoader:
    """Loads what this rank needs of every step. plan: by default the configuration's; training: dropout is active."""
    source = MicrobatchSource(
        samples,
        data_rank=mesh.coordinate("data"),
        data_size=mesh.size("data"),
        micro_size=config.batch.micro_size,
        # Which documents share a packed sample is chance: nothing is to be learnt from one about the next.
        mask_end_of_document=config.data.mask_end_of_document or config.data.pack == "best_fit",
        isolate_documents=config.data.isolate_documents,
    )
    return BatchLoader(
        source,
        BatchPlan.of(config.batch) if plan is None else plan,
        seed=config.training.seed,
        device=mesh.device,
        is_first=consumer.is_first,
        is_last=consumer.is_last,
        training=training,
        blocks=config.data.isolate_documents
        and not runs_ring(config)
        and why_a_mask(config.model, mesh.device.type) is None,
        window=config.model.sliding_window,
        held=HeldTokens.of(config, mesh),
    )
