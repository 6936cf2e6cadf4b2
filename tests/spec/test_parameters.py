"""Declared parameters: published sizes, shards, rules of tensor sizes."""

import math
import re
from typing import Any, get_args

import pytest
import torch
import transformers

from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.config.field_types import bound_of, type_hints
from megapipe.config.model import ModelConfig
from megapipe.spec.attention import kv_copies
from megapipe.spec.layers import model_layers, tensor_problems
from megapipe.spec.parameters import LayerSpec, ParameterSpec, tied_names, tied_stages


def unique_parameters(layers: tuple[LayerSpec, ...]) -> dict[str, ParameterSpec]:
    return {spec.name: spec for layer in layers for spec in layer.parameters.values()}


def total(model: ModelConfig) -> int:
    return sum(spec.num_elements for spec in unique_parameters(model_layers(model)).values())


def llama(*sizes: int, **changes: object) -> ModelConfig:
    """sizes: of vocabulary, layers, hidden states, heads and MLP."""
    names = "vocabulary_size", "num_layers", "hidden_size", "num_heads", "ffn_hidden_size"
    kinds = {"normalization": "rms_norm", "activation": "swiglu", "positions": "rotary", "bias": "none"}
    fields = {**kinds, "tie_embeddings": False, **dict(zip(names, sizes, strict=False)), **changes}
    return ModelConfig(**fields)  # type: ignore[arg-type]


# The published sizes of these models, as their checkpoints hold them.
QWEN_3 = {"num_kv_heads": 8, "head_size": 128, "qk_norm": True, "tie_embeddings": True}
PUBLISHED = {
    "gpt2": (ModelConfig(), 124_439_808),
    "gpt2-xl": (ModelConfig(num_layers=48, hidden_size=1600, num_heads=25), 1_557_611_200),
    "llama-2-7b": (llama(32000, 32, 4096, 32, 11008), 6_738_415_616),
    "llama-3-8b": (llama(128256, 32, 4096, 32, 14336, num_kv_heads=8), 8_030_261_248),
    "qwen2-0.5b": (
        llama(151936, 24, 896, 14, 4864, num_kv_heads=2, bias="qkv", tie_embeddings=True), 494_032_768,
    ),
    "qwen3-0.6b": (llama(151936, 28, 1024, 16, 3072, **QWEN_3), 596_049_920),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_equals_the_published_one(name: str) -> None:
    model, count = PUBLISHED[name]
    assert model.problems() == []
    assert total(model) == count


@pytest.mark.parametrize(
    ("heads", "hidden", "layers", "billions"),
    [(24, 2304, 24, 1.7), (32, 4096, 36, 7.5), (64, 8192, 48, 39.1), (96, 12288, 80, 145.6), (128, 20480, 105, 529.6)],
)
def test_megatrons_models_have_their_published_size(heads: int, hidden: int, layers: int, billions: float) -> None:
    """arXiv 2104.04473, table 1; its equation 2 leaves out the final norm."""
    model = ModelConfig(
        vocabulary_size=51200, num_layers=layers, hidden_size=hidden, num_heads=heads, max_positions=2048
    )
    equation = 12 * layers * hidden**2 + 13 * layers * hidden + (51200 + 2048) * hidden
    assert total(model) == equation + 2 * hidden
    assert round(total(model) / 1e9, 1) == billions


@pytest.mark.parametrize(("norm_position", "family"), [("post", "Bert"), ("pre", "MegatronBert")])
@pytest.mark.parametrize(("sentence_head", "kind"), [(True, "ForPreTraining"), (False, "ForMaskedLM")])
def test_berts_have_the_parameters_of_transformers(
    norm_position: str, family: str, sentence_head: bool, kind: str
) -> None:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, num_hidden_layers=3, hidden_size=64, intermediate_size=256, num_attention_heads=4
    )
    with torch.device("meta"):
        theirs = getattr(transformers, family + kind)(config)
        theirs.tie_weights()
    sizes: dict[str, Any] = {"vocabulary_size": 97, "num_layers": 3, "hidden_size": 64, "num_heads": 4}
    model = BertModelConfig(**sizes, max_positions=512, norm_position=norm_position, sentence_head=sentence_head)  # type: ignore[arg-type]
    assert total(model) == sum(parameter.numel() for parameter in theirs.parameters())


def test_layers_are_ordered_and_tied_heads_use_the_embedding() -> None:
    tied, untied = (model_layers(ModelConfig(num_layers=3, tie_embeddings=tie)) for tie in (True, False))
    names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [(each.name, each.kind, each.index) for each in tied] == [
        (name, name.partition(".")[0].removesuffix("s"), max(0, place - 1) % 3) for place, name in enumerate(names)
    ]
    assert all(spec.name == f"{each.name}.{path}" for each in untied for path, spec in each.parameters.items())
    assert tied[-1].parameters["output.weight"] is tied[0].parameters["word.weight"]
    assert tied_names(tied) == (("embedding.word.weight",),)
    assert tied_stages(tied, [range(2), range(2, 4), range(4, 5)]) == ((0, 2),)
    assert tied_names(untied) == ()


def test_shared_blocks_are_one_tied_weight_on_their_stages() -> None:
    layers = model_layers(BertModelConfig(num_layers=3, shared_blocks=True))
    words, block = tied_names(layers)
    assert words == ("embedding.word.weight",)
    assert block == tuple(spec.name for spec in layers[1].parameters.values())
    assert tied_stages(layers, [range(1), range(1, 3), range(3, 5)]) == ((0, 2), (1, 2))


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_boxes_of_the_tensor_ranks_tile_every_parameter(tensor_size: int, activation: str) -> None:
    model = ModelConfig(
        vocabulary_size=101, num_layers=1, hidden_size=32, num_heads=8, num_kv_heads=4, ffn_hidden_size=48
    )
    model.activation = activation  # type: ignore[assignment]
    for spec in unique_parameters(model_layers(model)).values():
        boxes = [spec.box(rank, tensor_size) for rank in range(tensor_size)]
        if spec.partition_axis is None:
            assert all(box.shape == spec.shape for box in boxes)
            continue
        assert sum(box.num_elements for box in boxes) == spec.num_elements
        axis = spec.partition_axis
        assert [box.starts[axis] for box in boxes[1:]] == [box.stops[axis] for box in boxes[:-1]]
        assert all(math.prod(box.shape) <= math.prod(spec.local_shape(tensor_size)) for box in boxes)


def test_indivisible_tensor_sizes_are_refused_with_possible_ones() -> None:
    model = ModelConfig(hidden_size=96, num_heads=12, num_kv_heads=4, ffn_hidden_size=100)
    assert tensor_problems(model, 1) == []
    assert tensor_problems(model, 2) == []
    assert tensor_problems(model, 4) == []
    fix = "tensor sizes that divide this model: 1, 2, 4"
    assert tensor_problems(model, 3) == [
        f"model.ffn_hidden_size 100 is not divisible by parallel.tensor 3; {fix}",
        f"model.num_kv_heads 4 is not divisible by parallel.tensor 3; {fix}",
    ]
    model.num_kv_heads = None
    assert tensor_problems(model, 8)[0] == f"model.num_heads 12 is not divisible by parallel.tensor 8; {fix}"
    assert tensor_problems(model, 0) == ["parallel.tensor is 0; it must be at least 1"]
    model = ModelConfig(hidden_size=96, num_heads=12, ffn_hidden_size=100, num_experts=6)
    assert tensor_problems(model, 3) == []
    assert tensor_problems(model, 4) == [
        "model.num_experts 6 is not divisible by parallel.tensor 4; tensor sizes that divide this model: 1, 2, 3, 6"
    ]


def test_key_heads_are_copied_until_they_divide() -> None:
    assert [kv_copies(4, 2, size) for size in (1, 2, 4, 8)] == [1, 1, 1, 2]
    assert kv_copies(2, 6, 4) == 2
    with pytest.raises(ValueError, match="8 query heads cannot be divided evenly over 3 context ranks"):
        kv_copies(4, 2, 3)


@pytest.mark.parametrize("tensor_size", range(1, 9))
def test_the_tensor_size_rule_agrees_with_shapes(tensor_size: int) -> None:
    model = ModelConfig(num_layers=1, hidden_size=48, num_heads=12, num_kv_heads=6, ffn_hidden_size=72)
    try:
        for spec in unique_parameters(model_layers(model)).values():
            if "output.weight" not in spec.name:
                spec.local_shape(tensor_size)
        fits = True
    except ValueError:
        fits = False
    assert fits == (tensor_problems(model, tensor_size) == [])


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("without", ["ffn_hidden_size", "num_experts", "kv_latent_size"])
def test_elements_of_the_largest_model_fit_in_64_bits(activation: str, without: str) -> None:
    kinds = {name: (hint, *get_args(hint)) for name, hint in type_hints(ModelConfig).items()}
    bounds = {name: bound for name, each in kinds.items() for bound in map(bound_of, each) if bound and bound.most}
    largest = {name: bound.most for name, bound in bounds.items() if bound.least}
    assert len(largest) == 16
    sizes: dict[str, Any] = {**largest, "num_layers": 1, without: None}
    model = ModelConfig(**sizes, activation=activation)  # type: ignore[arg-type]
    assert not any("from 1 to" in problem for problem in model.problems())
    assert all(spec.num_elements < 1 << 63 for spec in unique_parameters(model_layers(model)).values())
    for name, most in largest.items():
        if name != without:
            (problem,) = ModelConfig(**{**sizes, name: most + 1}).problems()
            assert problem.startswith(f"model.{name} is {most + 1}; it must be from 1 to {most}")


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ({"sentence_head": False}, {}, r"model\.sentence_head is False and data\.pairs is 'order'"),
        ({}, {"pairs": "none"}, r"set model\.sentence_head to true with order or next"),
        ({"token_types": 1}, {}, r"model\.token_types 1; the parts of a pair need one type each"),
        ({"first_position": 2, "positions": "rotary"}, {}, r"set model\.first_position to 0"),
        ({"attention_norm": False}, {}, r"attention_norm is false with model\.norm_position 'post'"),
        ({}, {"mask_probability": 1.0}, r"data\.mask_probability is 1\.0"),
        ({}, {"short_sequence_probability": -0.1}, r"data\.short_sequence_probability is -0\.1"),
        ({}, {"max_ngram": 0}, r"data\.max_ngram is 0"),
        ({}, {"sequence_length": 4}, r"data\.sequence_length is 4; it must be at least 5, for a sentence pair"),
        ({}, {"mask_end_of_document": True}, r"data\.mask_end_of_document is True; it is an option for GPT samples"),
        ({}, {"sequence_length": 513}, r"exceeds model\.max_positions 512"),
    ],
)
def test_options_of_bert_that_exclude_each_other_are_refused(model: dict, data: dict, message: str) -> None:
    config = BertPretrainConfig(model=BertModelConfig(**model), data=BertDataConfig(prefix="somewhere", **data))
    problems = config.model.problems() + config.problems()
    assert len(problems) == 1
    assert re.search(message, problems[0])
    defaults = BertPretrainConfig(data=BertDataConfig(prefix="somewhere"))
    assert defaults.model.problems() + defaults.problems() == []
