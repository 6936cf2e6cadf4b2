"""A BERT's initial weights from folders that transformers wrote, on any layout, and clear refusals.

The mapping itself is held to transformers' logits in tests/models; here it is the oracle for what the folders give.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megapipe.checkpoint import CheckpointError
from megapipe.checkpoint.hugging_face import INDEX, SINGLE
from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.models.bert_hugging_face import from_hugging_face
from megapipe.parallel.mesh import Mesh
from megapipe.spec.layers import model_layers
from megapipe.training.replica import Replica
from megapipe.training.resume import Checkpointer
from tests.checkpoint.toy import alone
from tests.models.test_bert_hugging_face import case_of
from tests.support.gpt_runs import Shard, assembled, shards
from tests.support.meshes import run_threads


def config_of(folder: Path, model: BertModelConfig, source: Path) -> BertPretrainConfig:
    data = BertDataConfig(prefix="unused", sequence_length=16, pairs="order" if model.sentence_head else "none")
    config = BertPretrainConfig(model=model, data=data, init_from=str(source))
    config.training = replace(config.training, directory=str(folder))
    return config


def initial(mesh: Mesh, config: BertPretrainConfig) -> list[Shard]:
    sizes = mesh.shape.sizes
    config.parallel = replace(config.parallel, tensor=sizes["tensor"], pipeline=sizes["pipeline"])
    with Checkpointer(config, mesh) as checkpointer:
        replica = Replica(config, mesh, model_layers(config.model))
        assert checkpointer.restore(replica) is None
    states = replica.states()
    return shards(states, [state.master for state in states])


def check(found: dict[str, Tensor], theirs: torch.nn.Module, model: BertModelConfig) -> None:
    state = {
        name: tensor
        for name, tensor in theirs.state_dict().items()
        if model.sentence_head or not name.startswith(("bert.pooler.", "cls.seq_relationship."))
    }
    wanted = from_hugging_face(state, model)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize(("sentence_head", "activation"), [(True, "gelu"), (False, "gelu_tanh")])
def test_folders_of_both_kinds_with_and_without_the_sentence_head(
    tmp_path: Path, norm_position: str, sentence_head: bool, activation: str
) -> None:
    case = case_of(sentence_head, activation, norm_position)
    case.theirs.save_pretrained(tmp_path / "theirs")
    found = assembled([initial(alone(), config_of(tmp_path, case.model, tmp_path / "theirs"))])
    check(found, case.theirs, case.model)


def test_several_files_on_several_ranks(tmp_path: Path) -> None:
    case = case_of()
    case.theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert (tmp_path / "theirs" / INDEX).exists()
    config = config_of(tmp_path, case.model, tmp_path / "theirs")
    check(assembled(run_threads({"tensor": 2, "pipeline": 2}, initial, config)), case.theirs, case.model)


def test_a_head_that_the_model_leaves_out_is_left_in_the_folder(tmp_path: Path) -> None:
    case = case_of()
    case.theirs.save_pretrained(tmp_path / "theirs")
    model = replace(case.model, sentence_head=False)
    check(assembled([initial(alone(), config_of(tmp_path, model, tmp_path / "theirs"))]), case.theirs, model)


def test_names_as_bert_was_published_with(tmp_path: Path) -> None:
    """gamma and beta for norms, an untied bias by its second name, and a buffer of positions."""
    case = case_of()
    case.theirs.save_pretrained(tmp_path / "theirs")
    tensors = safetensors.torch.load_file(tmp_path / "theirs" / SINGLE)
    bias = tensors.pop("cls.predictions.bias", None)
    bias = tensors.pop("cls.predictions.decoder.bias") if bias is None else bias
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert old.keys() != tensors.keys()
    old["bert.embeddings.position_ids"] = torch.arange(64)
    safetensors.torch.save_file({**old, "cls.predictions.decoder.bias": bias}, tmp_path / "theirs" / SINGLE)
    found = assembled([initial(alone(), config_of(tmp_path, case.model, tmp_path / "theirs"))])
    check(found, case.theirs, case.model)


def test_a_norm_under_its_old_and_its_new_name_is_refused(tmp_path: Path) -> None:
    case = case_of()
    case.theirs.save_pretrained(tmp_path / "theirs")
    tensors = safetensors.torch.load_file(tmp_path / "theirs" / SINGLE)
    name = "bert.embeddings.LayerNorm.weight"
    old = name.replace("weight", "gamma")
    safetensors.torch.save_file({**tensors, old: 2 * tensors[name]}, tmp_path / "theirs" / SINGLE)
    with pytest.raises(CheckpointError, match=r"contain both '\S+' and '\S+', two names of the same tensor") as raised:
        initial(alone(), config_of(tmp_path, case.model, tmp_path / "theirs"))
    assert f"'{old}'" in str(raised.value)
    assert f"'{name}'" in str(raised.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs")
    case_of().theirs.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_layers": 1}, "set model.num_layers to 2"),
        ({"norm_position": "pre"}, "set model.norm_position to 'post'"),
        ({"vocabulary_size": 128}, "set model.vocabulary_size to 97"),
        ({"norm_epsilon": 1e-5}, "set model.norm_epsilon to 1e-12"),
        ({"positions": "rotary"}, "set model.positions to 'learned'"),
        ({"tie_embeddings": False}, "set model.tie_embeddings to True"),
    ],
)
def test_another_configuration_is_refused_with_the_fields_to_set(
    tmp_path: Path, folder: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        initial(alone(), config_of(tmp_path, replace(case_of().model, **changes), folder))
    assert told in str(raised.value)
    assert str(folder) in str(raised.value)


def test_a_sentence_head_that_the_folder_lacks_is_told(tmp_path: Path) -> None:
    case = case_of(sentence_head=False)
    case.theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"set model\.sentence_head to False"):
        initial(alone(), config_of(tmp_path, replace(case.model, sentence_head=True), tmp_path / "theirs"))


def test_a_bert_without_its_masked_token_head_is_told(tmp_path: Path) -> None:
    case = case_of()
    case.theirs.bert.save_pretrained(tmp_path / "theirs")
    config = config_of(tmp_path, replace(case.model, sentence_head=False), tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"'cls\.predictions\S* is missing"):
        initial(alone(), config)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, r"model_type 'gpt2' .* taken from bert, megatron-bert"),
        ({"position_embedding_type": "relative_key"}, 'position_embedding_type is "relative_key"'),
        ({"type_vocab_size": 3}, "type_vocab_size is 3"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
    ids=str,
)
def test_variants_that_cannot_be_told_are_refused(
    tmp_path: Path, folder: Path, changes: dict[str, Any], told: str
) -> None:
    shutil.copytree(folder, tmp_path / "variant")
    file = tmp_path / "variant/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=told):
        initial(alone(), config_of(tmp_path, case_of().model, tmp_path / "variant"))
