"""Models of one shape in several sizes, for the largest that fits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.stages import layers_of

STEPS = 4
"""Models to every doubling of width and depth."""
SMALLEST, LARGEST = -2, 5
"""Powers of 2 between which width and depth are scaled."""
HEADS, LAYERS = 8, 4
"""Heads and layers come in these multiples, or what these have in common with the model's own, so that tensor and
pipeline sizes divide them."""


class Member(NamedTuple):
    """A model of a family. parameters: tied ones once."""

    name: str
    model: ModelConfig
    parameters: int


def family(base: PretrainConfig) -> tuple[Member, ...]:
    """`base.model` with width and depth scaled alike, smaller and larger, ascending.

    A head keeps its size, grouped queries their number a group, and an MLP of a given width its ratio to the hidden
    size. Two models that round to one are named once.
    """
    model = base.model
    found: dict[tuple[int, int], Member] = {}
    for step in range(SMALLEST * STEPS, LARGEST * STEPS + 1):
        scaled = _scaled(model, 2.0 ** (step / STEPS))
        key = scaled.num_heads, scaled.num_layers
        if key not in found:
            found[key] = member(f"{scaled.num_layers} layers of {scaled.hidden_size}", replace(base, model=scaled))
    return tuple(sorted(found.values(), key=lambda each: each.parameters))


def members(base: PretrainConfig, models: Sequence[tuple[str, ModelConfig]]) -> tuple[Member, ...]:
    """Models by name, ascending by parameters."""
    found = [member(name, replace(base, model=model)) for name, model in models]
    return tuple(sorted(found, key=lambda each: each.parameters))


def member(name: str, config: PretrainConfig) -> Member:
    """The model of a run."""
    specs = {spec.name: spec.num_elements for layer in layers_of(config) for spec in layer.parameters.values()}
    return Member(name, config.model, sum(specs.values()))


def _scaled(model: ModelConfig, factor: float) -> ModelConfig:
    group = model.num_heads // model.kv_heads
    multiple = math.lcm(math.gcd(HEADS, model.num_heads), group)
    heads = max(1, round(model.num_heads * factor / multiple)) * multiple
    even = math.gcd(LAYERS, model.num_layers)
    layers = max(1, round(model.num_layers * factor / even)) * even
    channels = model.hidden_size / model.num_heads
    hidden = round(channels * heads)
    ffn = model.ffn_hidden_size
    return replace(
        model,
        num_heads=heads,
        num_layers=layers,
        hidden_size=hidden,
        num_kv_heads=None if model.num_kv_heads is None else heads // group,
        ffn_hidden_size=None if ffn is None else round(ffn / model.hidden_size * hidden / 64) * 64,
    )
