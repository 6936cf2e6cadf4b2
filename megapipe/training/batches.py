"""From the data room's arrays to what the engine hands to layers: one context per micro-batch, loaded ahead."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megapipe.config.run import PretrainConfig
from megapipe.data.batches import Microbatch, MicrobatchSource
from megapipe.data.blend import BlendedSamples
from megapipe.data.blend_order import BlendOrder
from megapipe.data.checked_shards import check_one_tokenizer
from megapipe.data.megatron_blend import MegatronBlendOrder, samples_wanted
from megapipe.data.megatron_order import MegatronSamples
from megapipe.data.prefetch import Prefetcher
from megapipe.data.sample_set import SampleSet
from megapipe.data.samples import GptSamples
from megapipe.data.splits import SplitName
from megapipe.layers.context import MicrobatchContext
from megapipe.parallel.mesh import Mesh
from megapipe.training.batch_plan import BatchPlan
from megapipe.training.replica import Replica


@dataclass(frozen=True)
class StepBatch:
    """One step's micro-batches on one rank.

    num_samples: of the global batch. token_counts: loss tokens of each micro-batch, known on the last stage.
    """

    contexts: list[MicrobatchContext]
    num_samples: int
    token_counts: tuple[float, ...]


class BatchLoader:
    """Loads a rank's share of every step.

    Token ids reach the first and the last stage alone; what other stages need (the samples' numbers, for dropout) is a
    pure function of the step.
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
    ) -> None:
        self._source = source
        self._plan = plan
        self._seed = seed
        self._device = device
        self._is_first = is_first
        self._is_last = is_last
        self._training = training

    def load(self, consumed: int) -> StepBatch:
        """The step that starts after `consumed` samples."""
        contexts, token_counts = [], []
        num_samples = self._plan.size(consumed)
        num_microbatches = num_samples // (self._source.micro_size * self._source.data_size)
        for index in range(num_microbatches):
            if self._is_first or self._is_last:
                microbatch = self._source.microbatch(consumed, index, num_microbatches)
                token_counts.append(float(microbatch.loss_mask.sum()))
                contexts.append(self._context(microbatch))
            else:
                ordinals = self._source.ordinals(consumed, index, num_microbatches)
                contexts.append(
                    MicrobatchContext(ordinals=torch.from_numpy(ordinals), seed=self._seed, training=self._training)
                )
        return StepBatch(contexts, num_samples, tuple(token_counts) if self._is_last else ())

    @contextmanager
    def steps(self, consumed: int) -> Iterator[Iterator[StepBatch]]:
        """Endless steps from `consumed` samples on, prefetched by a thread that ends with the block."""
        with Prefetcher(self.load, self._plan.cursors(consumed)) as loaded:
            yield loaded

    def _context(self, microbatch: Microbatch) -> MicrobatchContext:
        def on_device(array: object) -> torch.Tensor:
            return torch.as_tensor(array).contiguous().to(self._device, non_blocking=True)

        return MicrobatchContext(
            tokens=on_device(microbatch.tokens) if self._is_first else None,
            labels=on_device(microbatch.labels) if self._is_last else None,
            loss_mask=on_device(microbatch.loss_mask) if self._is_last else None,
            ordinals=torch.from_numpy(microbatch.ordinals),
            seed=self._seed,
            training=self._training,
        )


def split_samples(config: PretrainConfig, split: SplitName) -> SampleSet:
    """A split's samples: the training split in its shuffled order, the others front to back.

    Raises DataError for unusable shards, shards of different tokenizers, and a split of one that is too small for one
    sample.
    """
    if split == "train" and config.data.order == "megatron":
        return _megatron_samples(config)
    corpora = [_corpus(config, prefix, split) for prefix in config.data.prefixes]
    if not config.data.blend:
        return corpora[0]
    check_one_tokenizer([manifest for corpus in corpora for manifest in corpus.manifests])
    return BlendedSamples(corpora, BlendOrder(list(config.data.blend.values())), repeats=split == "train")


def _megatron_samples(config: PretrainConfig) -> SampleSet:
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
    if not weights:
        return corpora[0]
    check_one_tokenizer([manifest for corpus in corpora for manifest in corpus.manifests])
    order = MegatronBlendOrder(weights, num_samples)
    order.check_supply(config.data.prefixes, [len(corpus) for corpus in corpora])
    return BlendedSamples(corpora, order, repeats=True)


def _corpus(config: PretrainConfig, prefix: str, split: SplitName) -> GptSamples:
    return GptSamples(
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
    replica: Replica,
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
        mask_end_of_document=config.data.mask_end_of_document,
    )
    return BatchLoader(
        source,
        BatchPlan.of(config.batch) if plan is None else plan,
        seed=config.training.seed,
        device=mesh.device,
        is_first=replica.is_first,
        is_last=replica.is_last,
        training=training,
    )
