"""SmolLM3 (Hugging Face 2025): some layers do not rotate queries and keys."""

from collections.abc import Mapping
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.spec.decoder_family import (
    BIASES,
    FULL,
    SLIDING,
    Fields,
    bias_fields,
    blocks,
    decoder,
    layer_fields,
    layer_types,
    rotary_fields,
    window_of,
)
from megapipe.spec.family import FamilyError, keys


def _layers(config: Mapping[str, Any]) -> Fields:
    number = config["num_hidden_layers"]
    window = config["sliding_window"] if config["use_sliding_window"] else None
    every = config["no_rope_layer_interval"]
    rotated = config["no_rope_layers"] or [int((index + 1) % every != 0) for index in range(number)]
    default = [SLIDING if window and not each else FULL for each in rotated]
    types = config["layer_types"] or default
    if min(len(rotated), len(types)) < number:
        raise FamilyError(f"no_rope_layers or layer_types has fewer than {number} entries")
    if SLIDING in types and not window:
        raise FamilyError(f"layer_types has {SLIDING!r}, but use_sliding_window is false")
    fields: dict[str, Fields] = {
        "rotary": {},
        "no_rope": {"positions": "none"},
        "local": {"sliding_window": window},
        "local_no_rope": {"positions": "none", "sliding_window": window},
    }
    names = {(True, FULL): "rotary", (False, FULL): "no_rope", (True, SLIDING): "local"}
    described = zip(map(bool, rotated[:number]), types, strict=False)
    kinds = [names.get(each, "local_no_rope") for each in described]
    return layer_fields(kinds, fields)


def _rotated(model: ModelConfig) -> list[int]:
    return [int(each.positions == "rotary") for each in blocks(model)]


decoder(
    "smollm3",
    "SmolLM3ForCausalLM",
    reads=keys(
        "attention_bias mlp_bias no_rope_layers no_rope_layer_interval use_sliding_window layer_types sliding_window"
    ),
    more=(rotary_fields, bias_fields, _layers),
    writes={
        **BIASES,
        "no_rope_layers": _rotated,
        "no_rope_layer_interval": lambda model: [*_rotated(model), 0].index(0) + 1,
        "layer_types": layer_types,
        "sliding_window": window_of,
        "use_sliding_window": lambda model: window_of(model) is not None,
    },
    ignored=keys("max_window_layers"),
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
    },
)
