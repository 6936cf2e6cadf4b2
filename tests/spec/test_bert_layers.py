"""BERT's declared parameters and FLOPs: what transformers' models hold, and what a profiler counts."""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.models.bert import build_layer
from megapipe.parallel.groups import SoloGroup
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.layers import layer_flops, model_layers
from tests.models.test_bert_hugging_face import BATCH, HIDDEN_TOKENS, LENGTH, MODEL, make_context


@pytest.mark.parametrize(("norm_position", "family"), [("post", "Bert"), ("pre", "MegatronBert")])
@pytest.mark.parametrize(("sentence_head", "kind"), [(True, "ForPreTraining"), (False, "ForMaskedLM")])
def test_parameters_are_as_many_as_transformers_has(
    norm_position: str, family: str, sentence_head: bool, kind: str
) -> None:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, num_hidden_layers=3, hidden_size=64, intermediate_size=256, num_attention_heads=4
    )
    with torch.device("meta"):
        theirs = getattr(transformers, family + kind)(config)
        theirs.tie_weights()
    model = replace(MODEL, num_layers=3, max_positions=512, norm_position=norm_position, sentence_head=sentence_head)
    ours = {spec.name: spec.num_elements for layer in model_layers(model) for spec in layer.parameters.values()}
    assert sum(ours.values()) == sum(parameter.numel() for parameter in theirs.parameters())


def test_the_heads_products_are_those_that_a_profiler_counts() -> None:
    spec = model_layers(MODEL)[-1]
    state = UnitState(spec.name, spec.parameters.values())
    state.initialize(1)
    module = build_layer(spec, MODEL, SoloGroup("tensor"))
    state.bind(module, spec.parameters)
    hidden = torch.randn(BATCH, LENGTH, MODEL.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        (losses,) = module(hidden, context=make_context())
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        losses.sum().backward()
    counted = layer_flops(MODEL, spec, BATCH, LENGTH, HIDDEN_TOKENS)
    assert counted.forward == forward
    assert counted.backward_input + counted.backward_weight == counter.get_total_flops()


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ({"sentence_head": False}, {}, r"model\.sentence_head is False and data\.pairs is 'order'"),
        ({}, {"pairs": "none"}, r"set model\.sentence_head to true with order or next"),
        ({"sliding_window": 5}, {}, r"model\.sliding_window is 5; BERT attends to the whole sample"),
        ({}, {"mask_probability": 1.0}, r"data\.mask_probability is 1\.0"),
        ({}, {"short_sequence_probability": -0.1}, r"data\.short_sequence_probability is -0\.1"),
        ({}, {"max_ngram": 0}, r"data\.max_ngram is 0"),
        ({}, {"sequence_length": 4}, r"data\.sequence_length is 4; a sentence pair .* at least 5"),
        ({}, {"mask_end_of_document": True}, r"data\.mask_end_of_document is True; it is an option for GPT samples"),
        ({}, {"sequence_length": 513}, r"exceeds model\.max_positions 512"),
    ],
)
def test_what_does_not_fit_is_told_before_work_starts(model: dict, data: dict, message: str) -> None:
    config = BertPretrainConfig(model=BertModelConfig(**model), data=BertDataConfig(prefix="somewhere", **data))
    problems = config.model.problems() + config.problems()
    assert len(problems) == 1
    assert re.search(message, problems[0])


def test_the_defaults_have_no_problems() -> None:
    config = BertPretrainConfig(data=BertDataConfig(prefix="somewhere"))
    assert config.model.problems() + config.problems() == []
