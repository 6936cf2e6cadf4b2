"""Every key of config.json is honoured, refused, or listed as without effect.

The keys are those of transformers' own configuration classes, and transformers' logits are the oracle.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from megapipe.checkpoint import CheckpointError
from megapipe.checkpoint.hugging_face import match_parameters
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.hugging_face import HuggingFaceSource
from megapipe.spec.family import FamilyError, families, family_of
from tests.conversion.test_command import convert
from tests.conversion.test_round_trips import check_logits, theirs_of
from tests.models.hugging_face import CONFIGS, ENCODERS

FAMILIES = [
    name if name == "mistral" else pytest.param(name, marks=(pytest.mark.slow, pytest.mark.one_in(8)))
    for name in (*CONFIGS, *ENCODERS)
]
OF_4 = {
    "torch_dtype": "float64",
    "torchscript": True,
    "pruned_heads": {"0": [1]},
    "tie_encoder_decoder": True,
    "is_decoder": True,
    "is_encoder_decoder": True,
    "cross_attention_hidden_size": 8,
    "add_cross_attention": True,
    "max_length": 7,
    "do_sample": True,
    "temperature": 0.5,
    "bad_words_ids": [[3]],
    "suppress_tokens": [2],
    "task_specific_params": {"text-generation": {"max_length": 50}},
    "rope_theta": 77.0,
    "rope_scaling": {"type": "linear", "factor": 3.0},
    "partial_rotary_factor": 0.5,
    "position_embedding_type": "relative_key",
    "n_ctx": 9,
    "quantization_config": {"bits": 4},
    "use_bidirectional_attention": True,
    "per_layer_config": {"0": {"hidden_size": 4}},
}
"""Keys that transformers 4 writes, and some of other models, with values that are not their defaults."""
CHANGES: dict[str, list[Any]] = {
    "hidden_act": ["relu", "gelu", "gelu_new", "swish"],
    "activation_function": ["relu", "gelu", "gelu_pytorch_tanh"],
    "sliding_window": [3, None],
    "layer_types": [["sliding_attention", "full_attention"]],
    "n_inner": [100, 256],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 40.0},
        {"rope_type": "linear", "rope_theta": 40.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 40.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 40.0, "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "default", "rope_theta": 40.0, "partial_rotary_factor": 0.5},
        {
            "full_attention": {"rope_type": "linear", "rope_theta": 40.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "linear", "rope_theta": 9.0, "factor": 4.0},
        },
    ],
    "num_experts_per_tok": [1, 3],
    "pad_token_id": [5],
    "final_logit_softcapping": [5.0],
    "attn_logit_softcapping": [5.0],
    "moe_k": [1, 3, 4],
    "moe_layer_end_index": [0, -1, 5],
    "id2label": [{"0": "A", "1": "B", "2": "C"}],
    "label2id": [{"A": 0, "B": 1, "C": 2}],
    "problem_type": ["regression"],
    "summary_activation": ["tanh"],
}
NOT_TRIED_TOGETHER = {
    *("dtype", "torch_dtype", "architectures", "transformers_version", "torchscript", "return_dict"),
    *("label2id", "classifier_pooling", "slow_but_exact", "use_sliding_window"),
}
"""Keys that decide how transformers loads the model, its class, and how it returns logits; and one of a classifier,
of which transformers refuses other words; and two that count only together with another one, of BLOOM and Qwen."""


def changed(key: str, value: Any) -> list[Any]:
    """Return values of a key other than `value`."""
    if key in CHANGES:
        return [other for other in CHANGES[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    if isinstance(value, float):
        return [value + 0.25]
    if isinstance(value, str):
        return ["another"]
    return [True, 3] if value is None else []


def keys_of(config: dict[str, Any]) -> dict[str, list[Any]]:
    """Return key -> values that are not the folder's."""
    tried = {key: changed(key, value) for key, value in config.items() if key != "model_type"}
    return tried | {key: [value] for key, value in OF_4.items() if config.get(key) != value}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    theirs_of(request.param).save_pretrained(path)
    return path


def variant(folder: Path, target: Path, config: dict[str, Any]) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    shutil.copy(folder / "model.safetensors", target)
    (target / "config.json").write_text(json.dumps(config))
    return target


def opened(folder: Path) -> HuggingFaceSource | None:
    """Open a folder; return None if it is refused."""
    try:
        return HuggingFaceSource(folder)
    except CheckpointError:
        return None


def fields_of(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a config.json; None if it is refused."""
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    try:
        return family_of(config["model_type"]).model_fields(config, names)
    except FamilyError:
        return None


def test_every_changed_key_is_honoured_or_refused(folder: Path, tmp_path: Path) -> None:
    whole = transformers.AutoConfig.from_pretrained(folder).to_dict()
    config = json.loads((folder / "config.json").read_text())
    before = fields_of(folder, config)
    without_effect, honoured, refused = {}, set(), set()
    for key, values in keys_of(whole).items():
        for value in values:
            changes = {**config, key: value}
            fields = fields_of(folder, changes)
            if fields is None:
                refused.add(key)
            elif fields == before:
                without_effect[key] = value
            elif (source := opened(variant(folder, tmp_path / "v", changes))) is not None:
                honoured.add(key)
                check_logits(tmp_path / "v", source, f"{key} {value!r}")
    assert {"is_encoder_decoder", "quantization_config", "use_bidirectional_attention"} <= refused
    assert {"initializer_range", "temperature"} <= without_effect.keys()
    assert honoured & {"layer_norm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"}
    together = {key: value for key, value in without_effect.items() if key not in NOT_TRIED_TOGETHER}
    path = variant(folder, tmp_path / "v", {**config, **together})
    check_logits(path, HuggingFaceSource(path), f"one of {sorted(together)}")


def test_missing_keys_have_defaults_or_are_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    before = fields_of(folder, config)
    # Without tie_word_embeddings, transformers may draw a random head.
    # Without pad_token_id, it may take one beyond the vocabulary.
    for key in config.keys() - {"architectures", "model_type", "tie_word_embeddings", "pad_token_id"}:
        left = {name: value for name, value in config.items() if name != key}
        fields = fields_of(folder, left)
        if fields is None:
            continue
        path = variant(folder, tmp_path / "v", left)
        theirs = transformers.AutoConfig.from_pretrained(path).to_dict().get(key)
        if (fields != before or theirs != config[key]) and (source := opened(path)) is not None:
            check_logits(path, source, key)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", families())
def test_wrong_values_of_any_type_are_one_error_line(family: str, tmp_path: Path) -> None:
    """Without a tensor no folder fits, so every value must end in a CheckpointError."""
    known = family_of(family)
    sizes = {"num_attention_heads": 2, "n_head": 2, "hidden_size": 8, "n_embd": 8}
    others = {key for key in known.known_keys if not key.startswith("rope_")}
    config = {"model_type": family, **{key: sizes.get(key, 1) for key in others}}
    for key in {"hidden_act", "activation_function"} & known.known_keys:
        config[key] = "silu" if "rope_theta" in known.known_keys else "gelu"
    values = (None, "x", 0, -1, 1.5, True, [], [[1]], [None, "x"], {}, {"x": []}, {"rope_type": [1]})
    model = BertModelConfig() if "bert" in family else ModelConfig()
    for key in (*known.known_keys, *(known.fixed or ()), "model_type"):
        for value in values:
            with pytest.raises(CheckpointError) as refused:
                match_parameters(tmp_path, {**config, key: value}, model, [])
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "head", "embedding"),
    [
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        pytest.param("qwen2", "lm_head.weight", "model.embed_tokens.weight", marks=pytest.mark.slow),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ],
)
def test_a_stored_head_that_differs_unties_the_model(name: str, head: str, embedding: str, tmp_path: Path) -> None:
    theirs_of(name).save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for scale in (1.0, 2.0):
        tensors[head] = scale * tensors[embedding]
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        source = HuggingFaceSource(tmp_path)
        assert source.contents.model.tie_embeddings == (scale == 1.0)
        assert bool(source.contents.notes) == (scale != 1.0)
        heads = [source.read(each) for each in source.contents.tensors if each.name == "head.output.weight"]
        assert scale == 1.0 or torch.equal(heads[0], tensors[head])
        check_logits(tmp_path, source)


@pytest.mark.parametrize("name", ["llama", pytest.param("mixtral", marks=pytest.mark.exhaustive)])
def test_heads_that_contradict_the_tensors_are_refused(name: str, tmp_path: Path) -> None:
    theirs_of(name).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/config.json"
    config = json.loads(file.read_text())
    for key, value in (("num_key_value_heads", 4), ("num_attention_heads", 2), ("head_dim", 32)):
        file.write_text(json.dumps({**config, key: value}))
        (line,) = convert(tmp_path / "theirs", "megapipe", tmp_path / "out", status=2).err.splitlines()
        assert "has the shape" in line
        assert "_proj.weight" in line
