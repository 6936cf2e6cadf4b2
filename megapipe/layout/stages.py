"""How a pipeline cuts a run: the layers of each stage, and the slices of a sequence that a schedule may pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.scheduling import num_slices, num_stages, splits_backwards
from megapipe.schedules.building_blocks import balance_layers, check_assignment
from megapipe.spec.layers import layer_flops, layer_ops, model_layers, one_of_each, sharded_vocabulary
from megapipe.spec.ops import MicrobatchShape, total_flops
from megapipe.spec.parameters import LayerSpec, tied_stages

VOCABULARY_ALIGNMENT = 64
"""Rows of a padded vocabulary shard are multiples of this, so that the size of its matrix product is not odd."""


@dataclass(frozen=True)
class Keyed:
    """An unhashable value with a hashable key, for caches."""

    key: object
    value: Any = field(compare=False)


Method = TypeVar("Method", bound=Callable[..., Any])


def cached_method(method: Method) -> Method:
    """Return a method that finds each answer once per instance; arguments must be hashable and positional."""
    return cast(Method, cached_property(lambda instance: cache(partial(method, instance))))


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
            config.predictions,
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
    return model_layers(keyed.value)


def num_parameters(config: PretrainConfig) -> int:
    """Return the parameters of a run's model; a tied weight counts once."""
    specs = {spec.name: spec.num_elements for layer in layers_of(config) for spec in layer.parameters.values()}
    return sum(specs.values())


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
        sizes, kinds = (1, sequence_length, predictions, recompute_logits), one_of_each(layers)
        flops = {(each.kind, each.variant): layer_flops(model, each, *sizes).executed for each in kinds}
        bounds = balance_layers([flops[layer.kind, layer.variant] for layer in layers], num_stages)
    else:
        bounds = check_assignment(layers_per_stage, len(layers), num_stages)
    ranges = tuple(range(first, stop) for first, stop in bounds)
    return StageLayout(layers, ranges, tied_stages(layers, ranges))


TILE = 8
"""On each tensor rank that has a part of a slice, that part is a multiple of this number of tokens."""


def slice_ranges(config: PretrainConfig) -> tuple[range, ...]:
    """Return the positions of each slice's tokens in a sample; one range if the schedule passes whole samples."""
    count, length = num_slices(config), config.data.sequence_length
    if count == 1:
        return (range(length),)
    if config.schedule.slice_split == "uniform":
        return _between([length * each // count for each in range(count + 1)])
    return equal_work(token_flops(config), count, TILE * config.parallel.tensor)


def equal_work(costs: np.ndarray, count: int, multiple: int) -> tuple[range, ...]:
    """Return slices of about equal work. They are cut from the end, each rounded down to a multiple of tokens, and the
    first slice gets the remaining tokens (as in the code of Seq1F1B). costs [s]: work of each token."""
    total = np.concatenate([[0.0], np.cumsum(costs)])
    cuts = [len(costs)]
    for _ in range(count - 1):
        begin = int(np.searchsorted(total, total[cuts[0]] - total[-1] / count))
        cuts.insert(0, cuts[0] - (cuts[0] - begin) // multiple * multiple)
    return _between([0, *cuts])


def token_flops(config: PretrainConfig) -> np.ndarray:
    """Return the FLOPs of a forward for each token of a sample, float64 [s]; attention counts the keys seen."""
    length, flops = config.data.sequence_length, np.zeros(config.data.sequence_length)
    for layer in layers_of(config):
        model = config.model.of_kind(layer.variant)
        window = model.sliding_window or length
        for op in layer_ops(layer.kind, MicrobatchShape(model, sequence_length=length)):
            each: float | np.ndarray = total_flops([op]).forward / length
            if op.name == "attention":  # it counts the window, or all keys, for every query
                each = each / min(window, length) * np.minimum(np.arange(1, length + 1), window)
            flops += each
    return flops


def unplanned(config: PretrainConfig) -> list[str]:
    """Return why times of this run's schedule cannot be planned, if it passes sequences in slices."""
    if (count := num_slices(config)) == 1:
        return []
    name = config.schedule.file or config.schedule.name
    return [
        f"schedule {name} passes sequences in {count} slices, whose times are not planned; "
        "use whole sequences, such as 1f1b (megapipe plan dry-run checks the memory of slices)"
    ]


def _between(cuts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(*pair) for pair in pairwise(cuts))


def slice_problems(config: PretrainConfig) -> list[str]:
    """Return one message for each reason why sequences cannot be passed in slices; the schedule itself is valid."""
    count, name = num_slices(config), config.schedule.file or config.schedule.name
    if count == 1:
        if config.schedule.slice_split == "uniform":
            return []
        return [
            f"schedule.slice_split is {config.schedule.slice_split}, but {name} passes "
            "whole sequences; leave it out, or use a schedule with several slices"
        ]
    model, length = config.model, config.data.sequence_length
    kinds = model.kinds_of_layers.values()
    unit = TILE * config.parallel.tensor
    even = unit * count if config.schedule.slice_split == "uniform" else unit
    refused = [
        (not model.is_causal, "a BERT's attention is not causal", "train a GPT"),
        (config.parallel.context > 1, f"parallel.context {config.parallel.context} shards them", "set it to 1"),
        (any(each.kv_latent_size is not None for each in kinds), "model.kv_latent_size is set", "leave it out"),
        (any(each.num_experts is not None for each in kinds), "model.num_experts is set", "leave it out"),
        (bool(model.chunk_sizes(length)), "model.attention_chunk_size cuts samples into chunks", "set it to null"),
        (model.mtp_layers > 0, f"model.mtp_layers is {model.mtp_layers}", "set it to 0"),
        (model.attention == "flex", "model.attention is flex", "set it to auto"),
        (config.training.fp8 != "none", f"training.fp8 is {config.training.fp8}", "set it to none"),
        (config.training.compile, "training.compile is true", "set it to false"),
        (
            config.offload.activations != "none",
            f"offload.activations is {config.offload.activations}",
            "set it to none",
        ),
        (config.offload.weights, "offload.weights is true", "set it to false"),
        (splits_backwards(config), "it splits backwards", "write whole backwards"),
        (
            length % even != 0 or length < unit * count,
            f"data.sequence_length {length} is not a multiple of {even} with parallel.tensor {config.parallel.tensor}",
            f"use {max(unit * count, length // even * even)} or {max(unit * count, -(-length // even) * even)}",
        ),
    ]
    problems = [(reason, fix) for wrong, reason, fix in refused if wrong]
    if not problems and min(map(len, slice_ranges(config))) < unit:
        problems = [
            (f"equal work leaves less than {unit} tokens for one of them", "use longer samples or fewer slices")
        ]
    return [
        f"schedule {name} passes sequences in {count} slices, but {reason}; "
        f"{fix}, or use a schedule of whole sequences, such as 1f1b"
        for reason, fix in problems
    ]
