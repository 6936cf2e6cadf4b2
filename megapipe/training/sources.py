"""The samples of a run, and what loads them, for every kind of model."""

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.bert_blend import BlendedBertSamples
from megapipe.data.bert_samples import BertSamples
from megapipe.data.sample_set import SampleSet
from megapipe.data.splits import SplitName
from megapipe.layout.batch_plan import BatchPlan
from megapipe.parallel.mesh import Mesh
from megapipe.training.batches import batch_loader, split_samples
from megapipe.training.bert_batches import BertLoader, bert_samples
from megapipe.training.loader import Consumer, Loader

AnyBertSamples = BertSamples | BlendedBertSamples
Samples = SampleSet | AnyBertSamples


def open_samples(config: PretrainConfig, split: SplitName) -> Samples:
    """Open a split's samples. Raises DataError for unusable files or a split too small for one sample."""
    return bert_samples(config, split) if isinstance(config, BertPretrainConfig) else split_samples(config, split)


def open_loader(
    config: PretrainConfig,
    mesh: Mesh,
    consumer: Consumer,
    samples: Samples,
    plan: BatchPlan | None = None,
    *,
    training: bool = True,
) -> Loader:
    """Return the loader of this rank's part of every step.

    plan: default: that of the configuration. training: whether dropout is active.
    """
    if isinstance(config, BertPretrainConfig) and isinstance(samples, AnyBertSamples):
        return BertLoader(config, mesh, consumer, samples, plan, training=training)
    if isinstance(config, BertPretrainConfig) or isinstance(samples, AnyBertSamples):
        raise TypeError(f"{type(samples).__name__} are not samples of a {type(config).__name__}")
    return batch_loader(config, mesh, consumer, samples, plan, training=training)
