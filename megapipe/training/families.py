"""What training asks of a kind of model, and which kind a configuration is of."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.kernels.registry import Registry
from megapipe.layout.stages import layers_of, predictions_of
from megapipe.models import bert, gpt
from megapipe.parallel.groups import Group
from megapipe.spec.parameters import LayerSpec

PAIR_TERMS = {"order": "sop", "next": "nsp"}
"""What a sentence head learns -> the term of the loss."""


@dataclass(frozen=True)
class ModelFamily:
    """A kind of model, for one configuration.

    layers: in order. loss_terms: names of the sums that the last stage's loss consists of. predictions: tokens of a
    sample that the head predicts, None for all.
    build: (layer, tensor group, alignment of padded rows, kernels) -> its module, parameters yet unbound.
    """

    layers: tuple[LayerSpec, ...]
    loss_terms: tuple[str, ...]
    predictions: int | None
    build: Callable[[LayerSpec, Group, int, Registry], nn.Module]

    def named(self, values: tuple[float, ...]) -> dict[str, float]:
        """A value of each term by its name; nothing where the loss is one number, which needs no name."""
        return dict(zip(self.loss_terms, values, strict=True)) if len(self.loss_terms) > 1 else {}


def family_of(config: PretrainConfig) -> ModelFamily:
    """GPT's, or BERT's for the configuration of a BERT run."""
    recompute = config.recompute.logits
    if isinstance(config, BertPretrainConfig):
        encoder = config.model
        pairs = [PAIR_TERMS[config.data.pairs]] if config.data.pairs != "none" else []
        return ModelFamily(
            layers_of(config),
            ("mlm", *pairs),
            predictions_of(config),
            lambda spec, group, alignment, kernels: bert.build_layer(
                spec, encoder, group, alignment, kernels, recompute
            ),
        )
    decoder = config.model
    return ModelFamily(
        layers_of(config),
        ("lm",),
        None,
        lambda spec, group, alignment, kernels: gpt.build_layer(spec, decoder, group, alignment, kernels, recompute),
    )
