"""Megatron-LM's two layouts written and read back, bit for bit, over tensor, pipeline and virtual sizes."""

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeScaling
from megapipe.conversion.formats import FORMATS, format_of
from tests.conversion.foreign.weights import DECODER, LATENTS, MODELS, SIZES, assert_holds, drawn, opened, write

LAYOUTS = [
    ("qwen", 2, 1, 2),
    ("gpt2", 2, 2, 1),
    ("qwen_moe", 2, 1, 2),
    ("latents", 2, 1, 2),
    ("latent_experts", 2, 2, 1),
    ("deepseek", 2, 2, 1),
    ("sinks", 2, 1, 2),
    ("gpt_oss", 1, 2, 2),
    ("llama_mtp", 2, 2, 1),
    ("bert", 2, 2, 1),
    *(pytest.param("qwen", *sizes, marks=pytest.mark.exhaustive) for sizes in [(1, 1, 1), (2, 2, 1), (1, 2, 2)]),
]


TE_DIST = ("sigmoids", "latent_experts", "deepseek", "sinks")
"""Shapes that are written to torch_dist with the names of Transformer Engine's layers."""


@pytest.mark.parametrize(("shape", "tensor", "pipeline", "chunks"), LAYOUTS)
def test_torch_layout_there_and_back(shape: str, tensor: int, pipeline: int, chunks: int, tmp_path: Path) -> None:
    contents, values = drawn(MODELS[shape])
    names = "transformer_engine" if chunks == 2 else "local"
    sizes = {"tensor": tensor, "pipeline": pipeline, "chunks": chunks}
    write("megatron", tmp_path / "run", contents, values, **sizes, layer_names=names)
    assert format_of(tmp_path / "run") is FORMATS["megatron"]
    source = opened("megatron", tmp_path / "run")
    assert_holds(source, contents, values)
    source.close()


@pytest.mark.parametrize("shape", [*TE_DIST, "gpt2", "llama", "alternating", "gpt_oss", "llama_mtp", "bert_alone"])
def test_torch_dist_there_and_back(shape: str, tmp_path: Path) -> None:
    contents, values = drawn(MODELS[shape], dtype="BF16" if shape == "llama" else "F32")
    names = "transformer_engine" if shape in TE_DIST else "local"
    write("megatron-dist", tmp_path / "run", contents, values, layer_names=names)
    assert format_of(tmp_path / "run") is FORMATS["megatron-dist"]
    source = opened("megatron-dist", tmp_path / "run")
    assert_holds(source, contents, values)
    source.close()


def test_a_rank_holds_its_share_under_megatrons_names(tmp_path: Path) -> None:
    """Compare with rows that are selected by hand: kv groups, halves of gate and up, padded vocabulary, tied copy."""
    contents, values = drawn(MODELS["qwen"])
    ours = {tensor.name: value for tensor, value in values.items()}
    write("megatron", tmp_path / "run", contents, values, tensor=2, pipeline=2)
    folder = tmp_path / "run" / "release"
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "release"
    found = torch.load(folder / "mp_rank_01_001" / "model_optim_rng.pt", weights_only=False)
    assert found["checkpoint_version"] == 3.0
    assert found["args"].padded_vocab_size == 256
    model = found["model"]
    qkv = ours["blocks.2.attention.qkv.weight"]
    assert torch.equal(model["decoder.layers.0.self_attention.linear_qkv.weight"], qkv[1].reshape(64, 32))
    gate, up = ours["blocks.3.mlp.up.weight"]
    assert torch.equal(model["decoder.layers.1.mlp.linear_fc1.weight"], torch.cat([gate[24:], up[24:]]))
    down = ours["blocks.2.mlp.down.weight"]
    assert torch.equal(model["decoder.layers.0.mlp.linear_fc2.weight"], down[:, 24:])
    assert torch.equal(model["output_layer.weight"], torch.zeros(128, 32))
    first = torch.load(folder / "mp_rank_00_001" / "model_optim_rng.pt", weights_only=False)["model"]
    assert torch.equal(first["output_layer.weight"][:97], ours["embedding.word.weight"])
    (folder / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    (folder / "mp_rank_01_000").rmdir()
    with pytest.raises(CheckpointError, match="tensor rank 1 of pipeline rank 0"):
        opened("megatron", tmp_path / "run")


def test_transformer_engine_fuses_norms_of_latents(tmp_path: Path) -> None:
    """Compare with the names in megatron-core's get_gpt_layer_with_transformer_engine_spec, of an MLP and of experts;
    every tensor rank has the whole down projections."""
    contents, values = drawn(MODELS["latent_experts"])
    write("megatron", tmp_path / "run", contents, values, tensor=2, layer_names="transformer_engine")
    path = tmp_path / "run" / "release" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)["model"]
    attention = "linear_q_proj. linear_kv_down_proj. linear_kv_up_proj. linear_kv_up_proj.layer_norm_ linear_proj."
    for layer, others in enumerate(
        ("mlp.linear_fc1.layer_norm_ mlp.linear_fc1. mlp.linear_fc2.", "pre_mlp_layernorm.")
    ):
        prefix = f"decoder.layers.{layer}."
        found = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
        expected = {f"self_attention.{name}weight" for name in attention.split()}
        expected |= {f"{name}weight" for name in ("input_layernorm.", *others.split())}
        assert {key for key in found if layer == 0 or not key.startswith("mlp.")} == expected
    assert state["decoder.layers.0.self_attention.linear_kv_down_proj.weight"].shape == (16, 32)


def changed(folder: Path, change: object) -> None:
    path = folder / "release" / "mp_rank_00" / "model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def without_a_norm(value: dict) -> None:
    del value["model"]["decoder.layers.1.input_layernorm.weight"]


def with_an_expert(value: dict) -> None:
    value["model"]["decoder.layers.0.mlp.experts.weight"] = torch.zeros(2)


def with_experts_in_args(value: dict) -> None:
    value["args"].num_experts = 8


def of_another_width(value: dict) -> None:
    value["args"].hidden_size = 64


def old(value: dict) -> None:
    value["checkpoint_version"] = 2.0


def without_args(value: dict) -> None:
    del value["args"]


def of_latents(value: dict) -> None:
    value["args"].multi_latent_attention = True


def with_uneven_layers(value: dict) -> None:
    value["args"].num_experts, value["args"].moe_layer_freq = 4, [1, 0]


def integer(value: dict) -> None:
    value["model"]["decoder.final_layernorm.weight"] = torch.ones(32, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_norm, "lacks blocks.1.attention_norm.weight"),
        (with_an_expert, "mlp.experts.weight"),
        (with_experts_in_args, "mlp.linear_fc1.weight"),
        (of_another_width, "the args require"),
        (old, "checkpoint_version 2.0"),
        (without_args, "no args"),
        (integer, "int64"),
        (of_latents, "multi_latent_attention without qk_layernorm, multi_latent_attention with norm_epsilon 1e-05"),
        (with_uneven_layers, r"moe_layer_freq \[1, 0\]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_fit_is_named(change: object, message: str, tmp_path: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    write("megatron", tmp_path / "run", contents, values)
    changed(tmp_path / "run", change)
    with pytest.raises(CheckpointError, match=message):
        opened("megatron", tmp_path / "run")


def test_other_saved_state_is_ignored(tmp_path: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    write("megatron", tmp_path / "run", contents, values)

    def with_state(value: dict) -> None:
        value["optimizer"] = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [argparse.Namespace(lr=1.0)]}
        value["rng_state"] = [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()}]

    changed(tmp_path / "run", with_state)
    assert_holds(opened("megatron", tmp_path / "run"), contents, values)


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist", "dcp"])
def test_pickles_are_read_only_with_consent(kind: str, tmp_path: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    write(kind, tmp_path / "run", contents, values)
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        FORMATS[kind].open_source(tmp_path / "run", False)


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
def test_what_megatron_cannot_express_is_refused(kind: str, tmp_path: Path) -> None:
    contents, values = drawn(BertModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocabulary_size=50))
    with pytest.raises(CheckpointError, match="norm_position is post"):
        write(kind, tmp_path / "run", contents, values)
    for fields in (
        {"expert_balance_rate": 0.1},
        {"router_bias": True},
        {"router_scores": "sigmoid", "router_scale": 2.0},
    ):
        experts = {"num_experts": 4, "bias": "none", "expert_balance_rate": 0.0, "normalize_expert_shares": False}
        contents, values = drawn(ModelConfig(**SIZES, **{**experts, **fields}))
        with pytest.raises(CheckpointError, match=next(iter(fields)).replace("router_scores", "normalize_expert")):
            write(kind, tmp_path / "run", contents, values)
    yarn = {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, truncate=False)}
    narrow = {"layer_kinds": {"narrow": {"ffn_hidden_size": 16}}, "layer_pattern": ("narrow", "base")}
    for fields, message in (
        ({"norm_epsilon": 1e-5}, "norm_epsilon is 1e-05"),
        ({"attention_scale": 0.5}, "attention_scale is 0.5"),
        (yarn, "truncate is False"),
        (narrow, "differ in ffn_hidden_size"),
    ):
        contents, values = drawn(ModelConfig(**SIZES, **DECODER, **{**LATENTS, **fields}))
        with pytest.raises(CheckpointError, match=message):
            write(kind, tmp_path / "run", contents, values)
    contents, values = drawn(replace(MODELS["latents"], query_latent_size=18))
    with pytest.raises(CheckpointError, match=r"query_down\.weight has 18 rows"):
        write("megatron", tmp_path / "run", contents, values, tensor=4)
    contents, values = drawn(MODELS["gpt2"])
    for sizes, message in (({"tensor": 3}, "tensor"), ({"pipeline": 3}, "4 layers"), ({"chunks": 8}, "4 layers")):
        with pytest.raises(CheckpointError, match=message):
            write("megatron", tmp_path / "run", contents, values, **sizes)
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    for kind in ("megatron", "megatron-dist"):
        folder = tmp_path / kind
        write(kind, folder, contents, values)
        (path,) = [*folder.rglob("model_optim_rng.pt"), *folder.rglob("*.distcp")]
        content = bytearray(path.read_bytes())
        victim = next(tensor for tensor in contents.tensors if tensor.name == "blocks.2.mlp.down.weight")
        content[content.index(values[victim].numpy().tobytes()[:64])] ^= 1
        path.write_bytes(content)
        source = opened(kind, folder)
        bad = [tensor.name for tensor in source.contents.tensors if source.verify(tensor)]
        assert bad == [victim.name]
        source.close()


def test_a_cut_distcp_file_is_damage(tmp_path: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    write("megatron-dist", tmp_path / "run", contents, values)
    path = next((tmp_path / "run").rglob("*.distcp"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    source = opened("megatron-dist", tmp_path / "run")
    with pytest.raises(DamagedCheckpointError, match="distcp"):
        source.read(source.contents.tensors[-1])


@pytest.mark.parametrize("names", ["local", "transformer_engine"])
def test_expert_ranks_are_read(names: str, tmp_path: Path) -> None:
    """Two experts each on two ranks, made from one rank with four."""
    contents, values = drawn(MODELS["sigmoids"])
    write("megatron", tmp_path / "run", contents, values, layer_names=names)
    whole = tmp_path / "run" / "release" / "mp_rank_00"
    value = torch.load(whole / "model_optim_rng.pt", weights_only=False)
    value["args"].expert_model_parallel_size = 2
    state = value["model"]
    for rank in range(2):
        value["model"] = {}
        for key, tensor in state.items():
            match = re.fullmatch(r"(.*(?:local_experts\.|experts\.linear_fc.\.weight))(\d)(.*)", key)
            if match is None:
                value["model"][key] = tensor
            elif int(match[2]) // 2 == rank:
                value["model"][f"{match[1]}{int(match[2]) % 2}{match[3]}"] = tensor
        folder = whole.with_name(f"mp_rank_00_{rank:03d}")
        folder.mkdir()
        torch.save(value, folder / "model_optim_rng.pt")
    (whole / "model_optim_rng.pt").unlink()
    whole.rmdir()
    assert_holds(opened("megatron", tmp_path / "run"), contents, values)


def test_uneven_stages_are_read(tmp_path: Path) -> None:
    """Three layers and one, made from two and two."""
    contents, values = drawn(MODELS["gpt2"])
    write("megatron", tmp_path / "run", contents, values, pipeline=2)
    paths = [tmp_path / "run" / "release" / f"mp_rank_00_00{stage}" / "model_optim_rng.pt" for stage in range(2)]
    first, last = (torch.load(path, weights_only=False) for path in paths)
    for key in list(last["model"]):
        if key.startswith("decoder.layers.0."):
            first["model"][key.replace("layers.0.", "layers.2.")] = last["model"].pop(key)
    last["model"] = {key.replace("layers.1.", "layers.0."): value for key, value in last["model"].items()}
    torch.save(first, paths[0])
    torch.save(last, paths[1])
    assert_holds(opened("megatron", tmp_path / "run"), contents, values)
