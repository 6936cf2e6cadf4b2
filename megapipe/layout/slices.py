"""The slices into which a schedule cuts sequences, and the runs that can use such schedules."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.scheduling import num_slices, splits_backwards
from megapipe.layout.stages import layers_of
from megapipe.spec.layers import layer_ops
from megapipe.spec.ops import MicrobatchShape, total_flops

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
            if op.name == "attention":  # it counts the whole window, or all keys, for every query
                each = each / min(window, length) * np.minimum(np.arange(1, length + 1), window)
            flops += each
    return flops


def unplanned(config: PretrainConfig) -> list[str]:
    """Return why times of this run's schedule cannot be planned, if it passes sequences in slices."""
    if (count := num_slices(config)) == 1:
        return []
    name = config.schedule.file or config.schedule.name
    return [
        f"schedule {name} passes sequences in {count} slices, whose times are not "
        "planned; use whole sequences, such as 1f1b (megapipe plan dry-run checks the memory of slices)"
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
            f"schedule.slice_split is {config.schedule.slice_split}, but {name} passes whole sequences; leave it out, "
            "or use a schedule with several slices"
        ]
    model, length = config.model, config.data.sequence_length
    kinds = model.kinds_of_layers.values()
    unit = TILE * config.parallel.tensor
    even = unit * count if config.schedule.slice_split == "uniform" else unit
    refused = [
        (isinstance(config, BertPretrainConfig), "a BERT's attention is not causal", "train a GPT"),
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
        f"schedule {name} passes sequences in {count} slices, but {reason}; {fix}, or use a schedule of whole "
        "sequences, such as 1f1b"
        for reason, fix in problems
    ]
