"""BERT's micro-batches as the engine hands them to layers."""

import numpy as np
import torch

from megapipe.config.bert import BertPretrainConfig
from megapipe.data.batches import microbatch_ordinals
from megapipe.data.bert_blend import BlendedBertSamples, open_bert_samples
from megapipe.data.bert_samples import BertSamples
from megapipe.data.splits import SplitName
from megapipe.engine.step import Counts
from megapipe.layers.context import BertContext
from megapipe.layout.batch_plan import BatchPlan
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.transfer import tensor_on
from megapipe.training.context_layout import HeldTokens
from megapipe.training.loader import Consumer, Loader


class BertLoader(Loader):
    """Loads a rank's share of every step.

    Tokens reach the first stage alone, labels the last; the samples' lengths, which attention needs everywhere, and
    their numbers come from the index of the shard. plan: by default the configuration's; training: dropout is active.
    """

    def __init__(
        self,
        config: BertPretrainConfig,
        mesh: Mesh,
        consumer: Consumer,
        samples: BertSamples | BlendedBertSamples,
        plan: BatchPlan | None = None,
        *,
        training: bool = True,
    ) -> None:
        self._samples = samples
        self._device = mesh.device
        self._is_first, self._is_last = consumer.is_first, consumer.is_last
        self._seed, self._training = config.training.seed, training
        self._data_rank, self._data_size = mesh.coordinate("data"), mesh.size("data")
        self._micro_size = config.batch.micro_size
        self._held = HeldTokens.of(config, mesh)
        self._length = config.data.sequence_length
        self._numbers = None if self._held.numbers is None else tensor_on(self._held.numbers, mesh.device)
        self._num_terms = len(consumer.family.loss_terms)
        super().__init__(BatchPlan.of(config.batch) if plan is None else plan, self._micro_size * self._data_size)

    def _microbatch(self, consumed: int, index: int, num_microbatches: int) -> tuple[BertContext, Counts | None]:
        ordinals = microbatch_ordinals(
            consumed,
            data_rank=self._data_rank,
            data_size=self._data_size,
            microbatch=index,
            micro_size=self._micro_size,
            num_microbatches=num_microbatches,
        )
        context = BertContext(
            ordinals=tensor_on(ordinals, self._device, wide=True),
            seed=self._seed,
            training=self._training,
            token_numbers=self._numbers,
        )
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
        # A pair is judged by its first token.
        sentence_weights = batch.sentence_weights if self._held.has_first else np.zeros_like(batch.sentence_weights)
        context.positions = self._on_device(positions)
        context.labels = self._on_device(labels)
        context.loss_mask = self._on_device(loss_mask)
        context.sentence_labels = self._on_device(batch.sentence_labels)
        context.sentence_weights = self._on_device(sentence_weights)
        counts = (float(loss_mask.sum()), float(sentence_weights.sum()))
        return context, counts[: self._num_terms]

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return tensor_on(array, self._device)


def bert_samples(config: BertPretrainConfig, split: SplitName) -> BertSamples | BlendedBertSamples:
    """A split's samples: the training split in its shuffled order, the others front to back.

    Raises DataError for unusable files, a split too small for one sample and a blend of different vocabularies.
    """
    return open_bert_samples(
        config.data,
        split=split,
        seed=config.training.seed,
        vocabulary_size=config.model.vocabulary_size,
        shuffle=split == "train",
    )
