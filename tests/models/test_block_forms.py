"""Forms of a block, of its embedding and of its head: generation, both directions of Megatron-LM, and refusals."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig, Reach
from megapipe.conversion.megatron_arguments import _fields, arguments_of
from megapipe.models.gpt_decoding import DecodingContext, decoding_layer
from tests.layers.bound import LLAMA, bind_model, make_context, run, small_model

LENGTH = 12
FORMS: dict[str, dict[str, Any]] = {
    "gemma 2": {
        **LLAMA,
        "activation": "geglu_tanh",
        "normalization": "rms_norm_unit_offset",
        "norm_position": "sandwich",
        "embedding_scale": 5.7,
        "logit_softcap": 2.0,
    },
    "olmo 2": {**LLAMA, "norm_position": "output"},
    "bloom": {"norm_position": "stream", "embedding_norm": True},
    "gpt-neox": {"parallel_residual": True, "activation": "relu_squared"},
    "granite": {**LLAMA, "residual_scale": 0.6, "logit_scale": 0.3},
}


@pytest.mark.parametrize("name", FORMS)
def test_generation_has_the_logits_of_training(name: str) -> None:
    model = small_model(**FORMS[name])
    assert not model.problems()
    layers, context = bind_model(model), replace(make_context(model, length=LENGTH), labels=None)
    with torch.no_grad():
        expected = run(layers, context)
        slots = {Reach(None): LENGTH}
        decoding = [decoding_layer(layer.module, rows=2, capacity=LENGTH, slots=slots) for layer in layers]
        for first, last in ((0, 7), (7, LENGTH)):
            positions = torch.arange(first, last).expand(2, -1)
            new = torch.full((2,), last - first - 1)
            tokens = context.tokens[:, first:last]
            step = DecodingContext.of(slice(0, 2), tokens, positions, new, length=LENGTH, slots=slots)
            hidden: tuple[Tensor, ...] = ()
            for layer in decoding:
                hidden = layer(*hidden, context=step)
            torch.testing.assert_close(hidden[0], expected[:, last - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (small_model(norm_position="post"), "model.norm_position is 'post', which only a BERT has"),
        (small_model(norm_position="output", parallel_residual=True), "set model.norm_position to 'pre'"),
        (small_model(swiglu_limit=2.0), "model.swiglu_limit is 2.0 with model.activation 'gelu'"),
        (
            small_model(normalization="rms_norm_unit_offset", qk_norm=True, qk_norm_over="projection"),
            "'projection', which has no norm with a unit offset",
        ),
        (BertModelConfig(norm_position="sandwich"), "'sandwich'; a BERT has norms in 'pre' or 'post'"),  # type: ignore[arg-type]
        (BertModelConfig(parallel_residual=True), "true with model.norm_position 'post'"),
        (BertModelConfig(logit_softcap=2.0), "model.logit_softcap is 2.0, but the head of a BERT has none"),
        (BertModelConfig(logit_scale=2.0), "set it to 1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_forms_are_refused(model: ModelConfig, message: str) -> None:
    (problem,) = model.problems()
    assert message in problem


@pytest.mark.parametrize(
    "fields",
    [
        {"activation": "geglu"},
        {"norm_position": "sandwich"},
        {"norm_position": "stream"},
        {"parallel_residual": True},
        {"embedding_scale": 2.0},
        {"residual_scale": 2.0},
        {"logit_scale": 2.0},
        {"logit_softcap": 2.0},
        {"embedding_norm": True},
    ],
    ids=str,
)
def test_megatron_refuses_forms_that_its_arguments_lack(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(CheckpointError, match=rf"model\.{name} is .*; Megatron-LM's arguments can express only"):
        arguments_of(_contents(fields), 1, 1, 1, torch.float32)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu", "relu_squared"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "rms_norm_unit_offset"])
def test_megatron_arguments_come_back_as_they_went(activation: str, norm: str) -> None:
    written = arguments_of(_contents({"activation": activation, "normalization": norm}), 1, 1, 1, torch.float32)
    fields = _fields(vars(written))
    assert (fields["activation"], fields["normalization"]) == (activation, norm)


def _contents(fields: dict[str, Any]) -> Any:
    return SimpleNamespace(model=ModelConfig(**fields), run=None)
