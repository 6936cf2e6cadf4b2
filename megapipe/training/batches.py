"""From the data room's arrays to what the engine hands to layers: one context per micro-batch, loaded ahead."""

import torch

from megapipe.config.run import PretrainConfig
from megapipe.data.batches import Microbatch, MicrobatchSource
from megapipe.data.samples import GptSamples
from megapipe.data.splits import SplitName
from megapipe.layers.context import MicrobatchContext
from megapipe.parallel.mesh import Mesh
from megapipe.training.batch_plan import BatchPlan
from megapipe.training.loader import Loader
from megapipe.training.replica import Replica


class BatchLoader(Loader):
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
        super().__init__(plan, source.micro_size * source.data_size)
        self._source = source
        self._seed = seed
        self._device = device
        self._is_first = is_first
        self._is_last = is_last
        self._training = training

    def _microbatch(self, consumed: int, index: int, num_microbatches: int) -> tuple[MicrobatchContext, float | None]:
        if self._is_first or self._is_last:
            microbatch = self._source.microbatch(consumed, index, num_microbatches)
            count = float(microbatch.loss_mask.sum()) if self._is_last else None
            return self._context(microbatch), count
        ordinals = torch.from_numpy(self._source.ordinals(consumed, index, num_microbatches))
        return MicrobatchContext(ordinals=ordinals, seed=self._seed, training=self._training), None

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


def split_samples(config: PretrainConfig, split: SplitName) -> GptSamples:
    """A split's samples: the training split in its shuffled order, the others front to back.

    Raises DataError for unusable shards or a split too small for one sample.
    """
    return GptSamples(
        config.data.prefix,
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
    samples: GptSamples,
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
