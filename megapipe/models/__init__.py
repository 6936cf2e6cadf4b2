"""GPTs and BERTs as lists of layers, and the decoding of GPTs.

`family_of` returns the family of a configuration: the layers of its model, and how each layer becomes a module.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.kernels.registry import Registry
from megapipe.layout.stages import layers_of
from megapipe.models import bert, gpt
from megapipe.parallel.groups import Group
from megapipe.spec.parameters import LayerSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a precision -> dtype of weights and activations."""


@dataclass(frozen=True)
class ModelFamily:
    """The kind of model of one configuration.

    layers: the model's layers in order. loss_terms: names of the terms of the loss. predictions: number of tokens of a
    sample that the head predicts, None for all. build: (layer, tensor group, alignment of padded rows, kernels) ->
    module of the layer, whose parameters are not bound to a buffer yet.
    """

    layers: tuple[LayerSpec, ...]
    loss_terms: tuple[str, ...]
    predictions: int | None
    build: Callable[[LayerSpec, Group, int, Registry], nn.Module]

    def named(self, values: tuple[float, ...]) -> dict[str, float]:
        """Return the value of each term by its name; empty if the loss has a single term."""
        return dict(zip(self.loss_terms, values, strict=True)) if len(self.loss_terms) > 1 else {}


def family_of(config: PretrainConfig) -> ModelFamily:
    """Return the family of a configuration: BERT for the configuration of a BERT run, else GPT."""
    recompute = config.recompute.logits
    if isinstance(config, BertPretrainConfig):
        encoder = config.model
        return ModelFamily(
            layers_of(config),
            config.loss_terms,
            config.predictions,
            lambda spec, group, alignment, kernels: bert.build_layer(
                spec, encoder, group, alignment, kernels, recompute
            ),
        )
    decoder = config.model
    return ModelFamily(
        layers_of(config),
        config.loss_terms,
        None,
        lambda spec, group, alignment, kernels: gpt.build_layer(spec, decoder, group, alignment, kernels, recompute),
    )
