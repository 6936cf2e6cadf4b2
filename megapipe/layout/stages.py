"""The layers of each stage of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.scheduling import num_stages
from megapipe.schedules.building_blocks import balance_layers, check_assignment
from megapipe.spec.layers import layer_flops, model_layers, one_of_each, sharded_vocabulary
from megapipe.spec.parameters import LayerSpec, tied_stages

VOCABULARY_ALIGNMENT = 64
"""Rows of a padded vocabulary shard are multiples of this, so that the size of its matrix product is not odd."""


@dataclass(frozen=True)
class Keyed:
    """An unhashable value with a hashable key, for caches."""

    key: object
    value: Any = field(compare=False)


PAIR_TERMS = {"order": "sop", "next": "nsp"}
"""Kind of sentence pairs -> name of the term of the loss."""


@dataclass(frozen=True)
class StageLayout:
    """The layers of each stage of a model.

    ranges[s]: layers of stage s. tied[g]: stages that use the g-th tied weight, one entry per stage.
    """

    layers: tuple[LayerSpec, ...]
    ranges: tuple[range, ...]
    tied: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, config: PretrainConfig) -> "StageLayout":
        """Return the layout that a configuration describes. Raises ScheduleError."""
        sharded = config.parallel.vocabulary_variant > 0
        layout = lay_out(
            stage_layers(config)[:-2] if sharded else layers_of(config),
            config.model,
            num_stages(config),
            config.data.sequence_length,
            config.parallel.layers_per_stage,
            predictions_of(config),
            config.recompute.logits,
        )
        return layout.sharded(stage_layers(config), config.parallel.pipeline) if sharded else layout

    def sharded(self, layers: tuple[LayerSpec, ...], pipeline: int) -> "StageLayout":
        """Return the layout with two more stages on each pipeline rank: shards of the last two of `layers`, output
        matrix and word embeddings, which are sharded over all pipeline ranks (`schedules.vocabulary`)."""
        shared = (range(layer, layer + 1) for layer in (len(layers) - 2, len(layers) - 1))
        ranges = (*self.ranges, *(each for each in shared for _ in range(pipeline)))
        return StageLayout(layers, ranges, tied_stages(layers, ranges))

    @cached_property
    def units_per_stage(self) -> tuple[int, ...]:
        """Layers in each stage; a unit is a layer."""
        return tuple(len(each) for each in self.ranges)

    def blocks(self, stage: int) -> tuple[int, ...]:
        """Return the units of a stage that are transformer blocks."""
        return tuple(unit for unit, layer in enumerate(self.ranges[stage]) if self.layers[layer].kind == "block")


def layers_of(config: PretrainConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of a GPT, or of a BERT for the configuration of a BERT run."""
    return _layers_of(Keyed(repr(config.model), config.model))


def stage_layers(config: PretrainConfig) -> tuple[LayerSpec, ...]:
    """Return the layers that stages are made of: with a shared vocabulary, embedding and head are two each."""
    layers = layers_of(config)
    return sharded_vocabulary(layers, config.parallel.pipeline) if config.parallel.vocabulary_variant else layers


@lru_cache(maxsize=16)
def _layers_of(keyed: Keyed) -> tuple[LayerSpec, ...]:
    model: ModelConfig = keyed.value
    return model_layers(model)


def num_parameters(config: PretrainConfig) -> int:
    """Return the parameters of a run's model; a tied weight counts once."""
    specs = {spec.name: spec.num_elements for layer in layers_of(config) for spec in layer.parameters.values()}
    return sum(specs.values())


def predictions_of(config: PretrainConfig) -> int | None:
    """Return the tokens of a sample that the head predicts, None for all."""
    return config.data.max_predictions if isinstance(config, BertPretrainConfig) else None


def loss_terms_of(config: PretrainConfig) -> tuple[str, ...]:
    """Return the names of the terms of the loss."""
    if isinstance(config, BertPretrainConfig):
        return ("mlm", PAIR_TERMS[config.data.pairs]) if config.data.pairs != "none" else ("mlm",)
    return ("lm", "mtp") if config.model.mtp_layers else ("lm",)


def lay_out(
    layers: tuple[LayerSpec, ...],
    model: ModelConfig,
    num_stages: int,
    sequence_length: int,
    layers_per_stage: Sequence[int] | None = None,
    predictions: int | None = None,
    recompute_logits: bool = False,
) -> StageLayout:
    """Split layers into contiguous stages, by given numbers or balanced by their FLOPs.

    predictions: tokens of a sample that the head predicts, by default all. recompute_logits: as in `layer_flops`.

    Raises ScheduleError for more stages than layers, or given numbers that do not fit.
    """
    if layers_per_stage is None:
        flops = {
            (each.kind, each.variant): layer_flops(
                model, each, 1, sequence_length, predictions, recompute_logits
            ).executed
            for each in one_of_each(layers)
        }
        bounds = balance_layers([flops[layer.kind, layer.variant] for layer in layers], num_stages)
    else:
        bounds = check_assignment(layers_per_stage, len(layers), num_stages)
    ranges = tuple(range(first, stop) for first, stop in bounds)
    return StageLayout(layers, ranges, tied_stages(layers, ranges))
