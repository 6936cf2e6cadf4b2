"""Initial weights from folders of transformers: every family, any layout, and clear refusals.

tests/models compares the mapping of names with transformers' logits. tests/conversion has hostile folders, with wrong
files, tensors and shapes, and every key of config.json.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megapipe.checkpoint import CheckpointError
from megapipe.checkpoint.hugging_face import INDEX, SINGLE, with_stored_head
from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.spec.family import family_of
from tests.checkpoint.runs import config_in, initial_weights
from tests.checkpoint.toy import alone
from tests.models.hugging_face import CONFIGS, canonical, most_exhaustive, opened
from tests.models.hugging_face import case_of as decoder_of
from tests.models.test_bert_hugging_face import case_of
from tests.support.gpt_runs import assembled
from tests.support.meshes import run_threads

BERTS = {
    "bert": {},
    "bert_without_sentence_head": {"sentence_head": False, "activation": "gelu_tanh"},
    "megatron_bert": {"form": "pre"},
    "albert": {"form": "shared"},
}
LAYOUT = {"tensor": 2, "pipeline": 2}


def case(name: str) -> Any:
    if name in BERTS:
        return case_of(**BERTS[name])
    return decoder_of(name)


class Folders(dict[str, Path]):
    """Case -> its folder, as `save_pretrained` writes it for the first test that needs it."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def __missing__(self, name: str) -> Path:
        case(name).theirs.save_pretrained(self.base / name)
        return self.setdefault(name, self.base / name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Folders(tmp_path_factory.mktemp("hugging-face"))


def configured(directory: Path, model: Any, source: Path) -> PretrainConfig:
    if not isinstance(model, BertModelConfig):
        config = config_in(directory, "unused", model, data={"sequence_length": 16})
        return replace(config, init_from=str(source))
    data = BertDataConfig(prefix="unused", sequence_length=16, pairs="order" if model.sentence_head else "none")
    config = BertPretrainConfig(model=model, data=data, init_from=str(source))
    config.training = replace(config.training, directory=str(directory))
    return config


def loaded(directory: Path, model: Any, source: Path) -> dict[str, Tensor]:
    return assembled([initial_weights(alone(), configured(directory, model, source))])


def check(weights: dict[str, Tensor], name: str, without: tuple[str, ...] = (), **changes: Any) -> None:
    """Compare with the mapping of names. without: starts of transformers' names that the model does not have."""
    each = case(name)
    if name in BERTS:
        theirs = {key: value for key, value in each.theirs.state_dict().items() if not key.startswith(without or "\0")}
        wanted = canonical(theirs, replace(each.model, **changes), each.family)
    else:
        _, wanted = opened(each.theirs)
    assert weights.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(weights[key], tensor), key


@pytest.mark.parametrize("name", [*most_exhaustive(CONFIGS), *BERTS])
def test_every_family(tmp_path: Path, folders: dict[str, Path], name: str) -> None:
    check(loaded(tmp_path, case(name).model, folders[name]), name)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_several_files_on_several_ranks(tmp_path: Path, name: str) -> None:
    case(name).theirs.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded" / INDEX).exists()
    config = configured(tmp_path / "run", case(name).model, tmp_path / "sharded")
    check(assembled(run_threads(LAYOUT, initial_weights, config)), name)


def test_balanced_experts_with_any_rate(tmp_path: Path) -> None:
    """Files do not contain the rate. Without biases, the model would choose other experts."""
    made = case("ernie4_5_moe")
    made.theirs.save_pretrained(tmp_path / "theirs")
    files = safetensors.torch.load_file(tmp_path / "theirs" / SINGLE)
    wanted = canonical(files, made.model, made.family)
    assert wanted["blocks.1.mlp.router.bias"].abs().min() > 0
    config = configured(tmp_path / "run", replace(made.model, expert_balance_rate=0.02), tmp_path / "theirs")
    weights = assembled(run_threads(LAYOUT, initial_weights, config))
    assert all(torch.equal(weights.pop(name), tensor) for name, tensor in wanted.items())
    assert not weights
    config.model = replace(made.model, expert_balance_rate=0.0)
    with pytest.raises(CheckpointError, match=r"set model\.expert_balance_rate to 0\.001 \(it is 0\.0\)"):
        initial_weights(alone(), config)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write other tensors to a folder."""
    safetensors.torch.save_file(change(safetensors.torch.load_file(folder / SINGLE)), folder / SINGLE)


def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name a BERT's tensors as TensorFlow does: gamma and beta for norms, one bias, and a buffer of positions."""
    biases = [tensors.pop(f"cls.predictions.{name}", None) for name in ("bias", "decoder.bias")]
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensors[name] for name in tensors
    }
    old["bert.embeddings.position_ids"] = torch.arange(64)
    return {**old, "cls.predictions.decoder.bias": next(bias for bias in biases if bias is not None)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", lambda tensors: {key.removeprefix("transformer."): each for key, each in tensors.items()}),
        ("llama", lambda tensors: {key.removeprefix("model."): each for key, each in tensors.items()}),
        ("bert", as_published),
    ],
)
def test_names_of_older_folders(tmp_path: Path, folders: dict[str, Path], name: str, change: Any) -> None:
    shutil.copytree(folders[name], tmp_path / "older")
    rewritten(tmp_path / "older", change)
    check(loaded(tmp_path / "run", case(name).model, tmp_path / "older"), name)


def test_a_sentence_head_may_be_ignored(tmp_path: Path, folders: dict[str, Path]) -> None:
    model = replace(case("bert").model, sentence_head=False)
    weights = loaded(tmp_path, model, folders["bert"])
    check(weights, "bert", without=("bert.pooler.", "cls.seq_relationship."), sentence_head=False)


def test_a_window_longer_than_sequences_is_none(tmp_path: Path, folders: dict[str, Path]) -> None:
    shutil.copytree(folders["mistral"], tmp_path / "wide")
    edit(tmp_path / "wide", sliding_window=4096)
    model = replace(case("mistral").model, max_positions=16, sliding_window=16)
    check(loaded(tmp_path / "run", model, tmp_path / "wide"), "mistral")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"hidden_size": 32}, "set model.hidden_size to 64 (it is 32)"),
        ("gpt2", {"tie_embeddings": False}, "set model.tie_embeddings to True"),
        ("llama", {"rope_theta": 10000.0}, "set model.rope_theta to 500.0"),
        ("mistral", {"sliding_window": None}, "set model.sliding_window to 7"),
        ("qwen3", {"qk_norm": False}, "set model.qk_norm to True"),
        ("bert", {"norm_position": "pre"}, "set model.norm_position to 'post'"),
        ("bert_without_sentence_head", {"sentence_head": True}, "set model.sentence_head to False"),
    ],
)
def test_another_configuration_is_refused_with_its_fields(
    tmp_path: Path, folders: dict[str, Path], name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        loaded(tmp_path, replace(case(name).model, **changes), folders[name])
    assert message in str(raised.value)
    assert str(folders[name]) in str(raised.value)


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def narrow_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "transformer.h.0.attn.c_attn.weight"
    return {**tensors, name: tensors[name][:, :-16].contiguous()}


def old_and_new_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "bert.embeddings.LayerNorm.gamma": 2 * tensors["bert.embeddings.LayerNorm.weight"]}


def without_masked_token_head(folder: Path) -> None:
    case("bert_without_sentence_head").theirs.bert.save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("gpt2", {"model_type": "t5"}, "model_type 't5' .* gpt2, gpt_neox, gpt_oss"),
        ("gpt2", {"n_embd": None}, "a value that its model_type cannot have"),
        ("gpt2", {"activation_function": "tanh"}, "'tanh' is not supported"),
        ("gpt2", {"scale_attn_weights": False}, "set model.attention_scale to 1.0"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "weights are quantized"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, r"are in mxfp4; .*Mxfp4Config\(dequantize=True"),
        ("bert", {"model_type": "gpt2"}, r"model_type 'gpt2' .* taken from albert, bert, megatron-bert"),
        ("bert", {"position_embedding_type": "relative_key"}, 'position_embedding_type is "relative_key"'),
        ("bert", {"type_vocab_size": 3}, "set model.token_types to 3"),
        ("bert", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ("gpt2", lambda folder: (folder / SINGLE).unlink(), "contains neither"),
        (
            "gpt2",
            lambda folder: rewritten(
                folder, lambda tensors: {**tensors, "lm_head.weight": 2.0 * tensors["transformer.wte.weight"]}
            ),
            "set model.tie_embeddings to False .*lm_head.weight differs from transformer.wte.weight",
        ),
        (
            "gpt2",
            lambda folder: rewritten(folder, narrow_keys),
            r"h\.0\.attn\.c_attn\.weight has the shape \(64, 176\), but .* needs \(64, 192\)",
        ),
        (
            "bert",
            lambda folder: rewritten(folder, old_and_new_norm),
            r"contain both '\S+Norm\.(weight|gamma)' and '\S+Norm\.(weight|gamma)', two names of the same tensor",
        ),
        ("bert_without_sentence_head", without_masked_token_head, r"'cls\.predictions\S* is missing"),
    ],
)
def test_other_models_and_damage_are_refused(
    tmp_path: Path, folders: dict[str, Path], name: str, damage: Any, message: str
) -> None:
    folder = shutil.copytree(folders[name], tmp_path / "damaged")
    edit(folder, **damage) if isinstance(damage, dict) else damage(folder)
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path / "run", case(name).model, folder)


@pytest.mark.parametrize(("family", "is_tied"), [("llama", False), ("gpt2", True)])
def test_only_families_that_tie_report_an_own_head(family: str, is_tied: bool) -> None:
    """Llama's default is an untied head, so a config.json without the key is right."""
    tensors = {"lm_head.weight": torch.ones(2, 2), family_of(family).embedding: torch.zeros(2, 2)}
    _, note = with_stored_head(family_of(family), {"model_type": family}, tensors, tensors.__getitem__)
    assert bool(note) == is_tied
