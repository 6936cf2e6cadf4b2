"""A model's configuration from plain values, as checkpoints and config.json files hold them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from megapipe.checkpoint.errors import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.parser_errors import in_words
from megapipe.config.untrusted import DECODING_ERRORS
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import ParameterSpec


def model_of(fields: Mapping[str, Any]) -> ModelConfig:
    """A ModelConfig, or a BertModelConfig where a field of one is there.

    Raises CheckpointError for unknown fields, wrong types and rules that are broken.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(BertModelConfig if "norm_position" in fields else ModelConfig, "model")
    try:
        model: ModelConfig = parser.instantiate(parser.parse_object({"model": dict(fields)}))["model"]
        problems = model.problems()
    except (ArgumentError, *DECODING_ERRORS) as error:
        raise CheckpointError(
            f"the checkpoint's model configuration cannot be used: {in_words(str(error))}"
        ) from error
    if problems:
        raise CheckpointError(f"the checkpoint's model configuration cannot be used: {'; '.join(problems)}")
    return model


def parameters_of(model: ModelConfig) -> dict[str, ParameterSpec]:
    """Every parameter by its global name, in the model's order; tied ones once."""
    layers = model_layers(model)
    return {spec.name: spec for layer in layers for spec in layer.parameters.values()}


def check_layers(path: Path, model: ModelConfig, tensors: int) -> None:
    """Raise CheckpointError for more layers than a checkpoint has tensors, before anything is made for each layer."""
    if model.num_layers > tensors:
        raise CheckpointError(
            f"{path} describes a model of {model.num_layers} layers but contains only {tensors} tensors; it is "
            "damaged or incomplete"
        )
