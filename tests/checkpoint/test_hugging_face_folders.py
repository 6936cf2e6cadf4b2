"""Initial weights from folders that transformers wrote: every family on any layout, and clear refusals.

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

from megapipe.checkpoint import CheckpointError
from megapipe.checkpoint.hugging_face import INDEX, SINGLE
from megapipe.checkpoint.hugging_face_heads import with_stored_head
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.models.gpt_hugging_face import from_hugging_face
from megapipe.parallel.mesh import Mesh
from megapipe.spec.layers import model_layers
from megapipe.training.replica import Replica
from megapipe.training.resume import Checkpointer
from tests.checkpoint.runs import config_in
from tests.checkpoint.toy import alone
from tests.models.hugging_face import CASES, FOLDERS, Case
from tests.support.gpt_runs import Shard, assembled, shards
from tests.support.meshes import run_threads


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Case -> folder as `save_pretrained` writes it."""
    base = tmp_path_factory.mktemp("hugging-face")
    for name, make in CASES.items():
        make().theirs.save_pretrained(base / name)
    return {name: base / name for name in CASES}


def make(folder: Path, model: ModelConfig, source: Path) -> PretrainConfig:
    config = config_in(folder, "unused", model, data={"sequence_length": 16}, parallel={"tensor": 1})
    return replace(config, init_from=str(source))


def initial(mesh: Mesh, config: PretrainConfig) -> list[Shard]:
    sizes = mesh.shape.sizes
    config.parallel = replace(config.parallel, tensor=sizes["tensor"], pipeline=sizes["pipeline"])
    with Checkpointer(config, mesh) as checkpointer:
        replica = Replica(config, mesh, model_layers(config.model))
        assert checkpointer.restore(replica) is None
    states = replica.states()
    return shards(states, [state.master for state in states])


def expected(case: Case) -> dict[str, torch.Tensor]:
    return from_hugging_face(dict(case.theirs.state_dict()), case.model, case.family)


def check(found: dict[str, torch.Tensor], case: Case) -> None:
    wanted = expected(case)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", CASES)
def test_every_family(tmp_path: Path, folders: dict[str, Path], name: str) -> None:
    case = CASES[name]()
    check(assembled([initial(alone(), make(tmp_path, case.model, folders[name]))]), case)


def test_balanced_experts_with_any_rate(tmp_path: Path) -> None:
    """Files do not store the rate. Without biases, the model would choose other experts."""
    case = FOLDERS["ernie4_5_moe"]()
    case.theirs.save_pretrained(tmp_path / "theirs")
    files = safetensors.torch.load_file(tmp_path / "theirs" / SINGLE)
    wanted = from_hugging_face(files, case.model, case.family)
    assert wanted["blocks.1.mlp.router.bias"].abs().min() > 0
    config = make(tmp_path / "run", replace(case.model, expert_balance_rate=0.02), tmp_path / "theirs")
    found = assembled(run_threads({"tensor": 2, "pipeline": 2}, initial, config))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    config.model = replace(case.model, expert_balance_rate=0.0)
    with pytest.raises(CheckpointError, match=r"set model\.expert_balance_rate to 0\.001 \(it is 0\.0\)"):
        initial(alone(), config)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_several_files_on_several_ranks(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    case.theirs.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded" / INDEX).exists()
    config = make(tmp_path / "run", case.model, tmp_path / "sharded")
    check(assembled(run_threads({"tensor": 2, "pipeline": 2}, initial, config)), case)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_names_without_the_language_models_prefix(tmp_path: Path, folders: dict[str, Path], name: str) -> None:
    """As the first GPT-2 files were published, and as a model without its head is saved."""
    shutil.copytree(folders[name], tmp_path / "bare")
    tensors = safetensors.torch.load_file(tmp_path / "bare" / SINGLE)
    bare = {key.removeprefix("transformer.").removeprefix("model."): tensor for key, tensor in tensors.items()}
    assert bare.keys() != tensors.keys()
    safetensors.torch.save_file(bare, tmp_path / "bare" / SINGLE)
    case = CASES[name]()
    check(assembled([initial(alone(), make(tmp_path / "run", case.model, tmp_path / "bare"))]), case)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("gpt2", {"hidden_size": 32}, "set model.hidden_size to 64 (it is 32)"),
        ("gpt2", {"num_layers": 1}, "set model.num_layers to 2"),
        ("gpt2", {"activation": "gelu"}, "set model.activation to 'gelu_tanh'"),
        ("gpt2", {"vocabulary_size": 128}, "set model.vocabulary_size to 97"),
        ("gpt2", {"max_positions": 32}, "set model.max_positions to 64"),
        ("gpt2", {"tie_embeddings": False}, "set model.tie_embeddings to True"),
        ("llama", {"num_kv_heads": None}, "set model.num_kv_heads to 2"),
        ("llama", {"rope_theta": 10000.0}, "set model.rope_theta to 500.0"),
        ("llama", {"norm_epsilon": 1e-6}, "set model.norm_epsilon to 1e-05"),
        ("llama_linear", {"ffn_hidden_size": 192}, "set model.ffn_hidden_size to 176"),
        ("mistral", {"sliding_window": None}, "set model.sliding_window to 7"),
        ("qwen2", {"bias": "none"}, "set model.bias to 'qkv'"),
        ("qwen3", {"qk_norm": False}, "set model.qk_norm to True"),
    ],
)
def test_another_configuration_is_refused_with_the_fields_to_set(
    tmp_path: Path, folders: dict[str, Path], name: str, changes: dict[str, Any], told: str
) -> None:
    model = replace(CASES[name]().model, **changes)
    with pytest.raises(CheckpointError) as raised:
        initial(alone(), make(tmp_path, model, folders[name]))
    assert told in str(raised.value)
    assert str(folders[name]) in str(raised.value)


def test_a_window_as_long_as_the_model_sees_is_none(tmp_path: Path, folders: dict[str, Path]) -> None:
    case = CASES["mistral"]()
    model = replace(case.model, max_positions=16, sliding_window=16)
    shutil.copytree(folders["mistral"], tmp_path / "wide")
    edit(tmp_path / "wide" / "config.json", sliding_window=4096)
    check(assembled([initial(alone(), make(tmp_path / "run", model, tmp_path / "wide"))]), case)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "t5"}, "model_type 't5' .* gpt2, llama"),
        ({"n_embd": None}, "a value that its model_type cannot have"),
        ({"activation_function": "relu"}, "'relu' is not supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
    ids=str,
)
def test_variants_that_cannot_be_told_are_refused(
    tmp_path: Path, folders: dict[str, Path], changes: dict[str, Any], told: str
) -> None:
    shutil.copytree(folders["gpt2"], tmp_path / "variant")
    edit(tmp_path / "variant" / "config.json", **changes)
    with pytest.raises(CheckpointError, match=told):
        initial(alone(), make(tmp_path / "run", CASES["gpt2"]().model, tmp_path / "variant"))


def break_index(folder: Path, place: str) -> None:
    tensors = safetensors.torch.load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, place)}))


def drop(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / SINGLE)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    safetensors.torch.save_file({**tensors, "adapter.weight": torch.zeros(2)}, folder / SINGLE)


def cut(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:1000])


def pickled(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: break_index(folder, "../escape.safetensors"), "not in its folder"),
        (lambda folder: break_index(folder, "/etc/passwd"), "not in its folder"),
        (lambda folder: break_index(folder, "model-00001-of-00002.safetensors"), "is missing"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": 3}'), "no weight_map"),
        (lambda folder: (folder / "config.json").write_text("{"), "not readable JSON"),
        (lambda folder: (folder / SINGLE).unlink(), "contains neither"),
        (drop, r"'transformer\.h\.1\.mlp\.c_fc\.weight' is missing, .*adapter.* is unknown"),
        (cut, "not a readable safetensors file"),
        (pickled, "pickle, which can carry code"),
    ],
)
def test_broken_and_hostile_folders_are_refused(
    tmp_path: Path, folders: dict[str, Path], damage: Any, told: str
) -> None:
    shutil.copytree(folders["gpt2"], tmp_path / "broken")
    damage(tmp_path / "broken")
    with pytest.raises(CheckpointError, match=told):
        initial(alone(), make(tmp_path / "run", CASES["gpt2"]().model, tmp_path / "broken"))


def own_head(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / SINGLE)
    head = 2.0 * tensors["transformer.wte.weight"]
    safetensors.torch.save_file({**tensors, "lm_head.weight": head}, folder / SINGLE)


def narrow_keys(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / SINGLE)
    name = "transformer.h.0.attn.c_attn.weight"
    safetensors.torch.save_file({**tensors, name: tensors[name][:, :-16].contiguous()}, folder / SINGLE)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (own_head, "set model.tie_embeddings to False .*lm_head.weight differs from transformer.wte.weight"),
        (narrow_keys, r"h\.0\.attn\.c_attn\.weight has the shape \(64, 176\), but .* needs \(64, 192\)"),
        (lambda folder: edit(folder / "config.json", scale_attn_weights=False), "scale_attn_weights is false"),
        (lambda folder: edit(folder / "config.json", quantization_config={"bits": 4}), "weights are quantized"),
    ],
)
def test_initial_weights_are_not_taken_from_another_model(
    tmp_path: Path, folders: dict[str, Path], damage: Any, told: str
) -> None:
    shutil.copytree(folders["gpt2"], tmp_path / "other")
    damage(tmp_path / "other")
    with pytest.raises(CheckpointError, match=told):
        initial(alone(), make(tmp_path / "run", CASES["gpt2"]().model, tmp_path / "other"))


@pytest.mark.parametrize(("family", "is_tied"), [("llama", False), ("gpt2", True)])
def test_an_own_head_is_noted_only_where_the_family_ties_it(family: str, is_tied: bool) -> None:
    """Llama's default is an untied head, so that a config.json without the key says nothing wrong."""
    tensors = {"lm_head.weight": torch.ones(2, 2), "model.embed_tokens.weight": torch.zeros(2, 2)}
    _, note = with_stored_head({"model_type": family}, tensors, tensors.__getitem__)
    assert bool(note) == is_tied
