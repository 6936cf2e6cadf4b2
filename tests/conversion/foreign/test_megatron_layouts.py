"""Megatron-LM's two layouts written and read back, bit for bit, over tensor, pipeline and virtual sizes."""

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeScaling
from megapipe.conversion.formats import FORMATS, format_of
from tests.conversion.foreign.weights import (
    DECODER,
    GPT_OSS,
    LATENTS,
    MODELS,
    SIZES,
    assert_holds,
    drawn,
    opened,
    write,
)

LAYOUTS = [
    ("qwen", {"tensor": 2, "chunks": 2}),
    ("gpt2", {"tensor": 2, "pipeline": 2}),
    ("qwen_moe", {"tensor": 2, "chunks": 2}),
    ("deepseek", {"tensor": 2, "pipeline": 2}),
    ("sinks", {"tensor": 2, "chunks": 2}),
    ("bert", {"tensor": 2, "pipeline": 2}),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in [
            ("latents", {"tensor": 2, "chunks": 2}),
            ("latent_experts", {"tensor": 2, "pipeline": 2}),
            ("gpt_oss", {"pipeline": 2, "chunks": 2}),
            ("llama_mtp", {"tensor": 2, "pipeline": 2}),
            *(("qwen", sizes) for sizes in ({}, {"tensor": 2, "pipeline": 2}, {"pipeline": 2, "chunks": 2})),
        ]
    ),
]
TE_DIST = ("sigmoids", "latent_experts", "deepseek", "sinks")
"""Shapes that are written to torch_dist with the names of Transformer Engine's layers."""
DIST = [
    *("gpt2", "llama", "latent_experts", "deepseek", "alternating", "gpt_oss", "bert_alone"),
    *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in ("sigmoids", "sinks", "llama_mtp")),
]


def check_round_trip(kind: str, shape: str, folder: Path, engine: bool, dtype: str = "F32", **sizes: int) -> None:
    """engine: with the names of Transformer Engine's layers."""
    contents, values = drawn(MODELS[shape], dtype)
    write(kind, folder, contents, values, layer_names="transformer_engine" if engine else "local", **sizes)
    assert format_of(folder) is FORMATS[kind]
    source = opened(kind, folder)
    assert_holds(source, contents, values)
    source.close()


@pytest.mark.parametrize(("shape", "sizes"), LAYOUTS, ids=str)
def test_torch_layout_there_and_back(shape: str, sizes: dict[str, int], tmp_path: Path) -> None:
    check_round_trip("megatron", shape, tmp_path / "run", "chunks" in sizes, **sizes)


@pytest.mark.parametrize("shape", DIST)
def test_torch_dist_there_and_back(shape: str, tmp_path: Path) -> None:
    dtype = "BF16" if shape == "llama" else "F32"
    check_round_trip("megatron-dist", shape, tmp_path / "run", shape in TE_DIST, dtype)


def test_a_rank_holds_its_share_under_megatrons_names(tmp_path: Path) -> None:
    """Compare with rows that are selected by hand: kv groups, halves of gate and up, padded vocabulary, tied copy."""
    contents, values = drawn(MODELS["qwen"])
    ours = {tensor.name: value for tensor, value in values.items()}
    write("megatron", tmp_path / "run", contents, values, tensor=2, pipeline=2)
    folder = tmp_path / "run" / "release"
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "release"
    saved = torch.load(folder / "mp_rank_01_001" / "model_optim_rng.pt", weights_only=False)
    assert saved["checkpoint_version"] == 3.0
    assert saved["args"].padded_vocab_size == 256
    model = saved["model"]
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
        keys = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
        expected = {f"self_attention.{name}weight" for name in attention.split()}
        expected |= {f"{name}weight" for name in ("input_layernorm.", *others.split())}
        assert {key for key in keys if layer == 0 or not key.startswith("mlp.")} == expected
    assert state["decoder.layers.0.self_attention.linear_kv_down_proj.weight"].shape == (16, 32)


def test_modules_that_predict_further_tokens_have_megatrons_names(tmp_path: Path) -> None:
    """Compare with the names in megatron-core's get_mtp_layer_spec_for_backend. They are on the last stage, with a
    copy of the word embeddings; each tensor rank has its rows of the projection."""
    contents, values = drawn(MODELS["deepseek"])
    ours = {tensor.name: value for tensor, value in values.items()}
    write("megatron", tmp_path / "run", contents, values, tensor=2, pipeline=2, layer_names="transformer_engine")
    folders = [tmp_path / "run" / "release" / f"mp_rank_01_00{stage}" for stage in range(2)]
    first, last = (torch.load(each / "model_optim_rng.pt", weights_only=False)["model"] for each in folders)
    assert not any(key.startswith("mtp.") for key in first)
    keys = {key.removeprefix("mtp.layers.0.") for key in last if key.startswith("mtp.")}
    attention = (
        "linear_q_down_proj. linear_q_up_proj. linear_q_up_proj.layer_norm_ linear_kv_down_proj. linear_kv_up_proj. "
        "linear_kv_up_proj.layer_norm_ linear_proj."
    )
    expected = {f"self_attention.{name}weight" for name in attention.split()}
    expected |= {"input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"}
    expected |= {f"mlp.shared_experts.linear_fc{number}.weight" for number in (1, 2)}
    expected |= {f"mlp.experts.linear_fc{number}.weight{expert}" for number in (1, 2) for expert in range(4)}
    expected = {f"transformer_layer.{name}" for name in expected}
    assert keys == expected | {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"}
    assert torch.equal(last["mtp.layers.0.eh_proj.weight"], ours["head.mtp.0.projection.weight"][16:])
    assert torch.equal(last["mtp.layers.0.enorm.weight"], ours["head.mtp.0.embedding_norm.weight"])
    assert torch.equal(last["embedding.word_embeddings.weight"], first["embedding.word_embeddings.weight"])


def test_experts_with_sinks_have_megatrons_names(tmp_path: Path) -> None:
    """Compare with the names in megatron-core's get_gpt_layer_with_transformer_engine_spec; core attention with sinks
    has an extra state."""
    contents, values = drawn(MODELS["gpt_oss"])
    ours = {tensor.name: value for tensor, value in values.items()}
    write("megatron", tmp_path / "run", contents, values, layer_names="transformer_engine")
    path = tmp_path / "run" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)["model"]
    keys = {key.removeprefix("decoder.layers.1.") for key in state if key.startswith("decoder.layers.1.")}
    expected = {
        f"self_attention.{name}.{leaf}" for name in ("linear_qkv", "linear_proj") for leaf in ("weight", "bias")
    }
    expected |= {f"mlp.router.{leaf}" for leaf in ("weight", "bias")}
    leaves = [f"{leaf}{expert}" for leaf in ("weight", "bias") for expert in range(4)]
    expected |= {f"mlp.experts.linear_fc{number}.{leaf}" for number in (1, 2) for leaf in leaves}
    expected |= {"self_attention.linear_qkv.layer_norm_weight", "pre_mlp_layernorm.weight"}
    assert keys == expected | {"self_attention.core_attention.softmax_offset"}
    sinks = ours["blocks.1.attention.sinks.weight"]
    assert torch.equal(state["decoder.layers.1.self_attention.core_attention.softmax_offset"], sinks.flatten())
    for names in ("local", "transformer_engine"):
        write("megatron-dist", tmp_path / names, contents, values, layer_names=names)
        stored = FileSystemReader(tmp_path / names / "release").read_metadata().state_dict_metadata
        extra = "decoder.layers.self_attention.core_attention._extra_state/shard_3_4"
        assert (extra in stored) == (names == "transformer_engine")


def changed(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "release" / "mp_rank_00" / "model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def with_arguments(**arguments: object) -> Callable[[dict], None]:
    return lambda value: vars(value["args"]).update(arguments)


def in_model(name: str, tensor: torch.Tensor) -> Callable[[dict], None]:
    return lambda value: value["model"].update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda value: value["model"].pop("decoder.layers.1.input_layernorm.weight"),
            "lacks blocks.1.attention_norm.weight",
        ),
        (in_model("decoder.layers.0.mlp.experts.weight", torch.zeros(2)), "mlp.experts.weight"),
        (in_model("decoder.final_layernorm.weight", torch.ones(32, dtype=torch.int64)), "int64"),
        (lambda value: value.update(checkpoint_version=2.0), "checkpoint_version 2.0"),
        (lambda value: value.pop("args"), "no args"),
        (with_arguments(num_experts=8), "mlp.linear_fc1.weight"),
        (with_arguments(hidden_size=64), "the args require"),
        (
            with_arguments(multi_latent_attention=True),
            "multi_latent_attention without qk_layernorm, multi_latent_attention with norm_epsilon 1e-05",
        ),
        (with_arguments(num_experts=4, moe_layer_freq=[1, 0]), r"moe_layer_freq \[1, 0\]"),
        (with_arguments(num_layers=10**12), "num_layers is 1000000000000; it must be a whole number from 1 to"),
        (
            with_arguments(mtp_num_layers=10**12),
            "mtp_num_layers is 1000000000000; it must be a whole number from 1 to",
        ),
        (with_arguments(mtp_num_layers=2, mtp_use_repeated_layer=True), "mtp_use_repeated_layer"),
        (with_arguments(softmax_type="off-by-one"), "softmax_type off-by-one"),
        (
            with_arguments(swiglu=False, quick_geglu=True),
            "quick_geglu without activation_func_clamp_value and glu_lin",
        ),
        (with_arguments(activation_func_clamp_value=7.0), "swiglu with activation_func_clamp_value or glu_linear_off"),
        (with_arguments(window_size=(8, 0), window_attn_skip_freq=[1, 0]), r"window_attn_skip_freq \[1, 0\] is set"),
        (
            with_arguments(window_size=(8, 0), window_attn_skip_freq=2, mtp_num_layers=1),
            "window_attn_skip_freq 2 with mtp_num_layers 1 .its blocks must have the window of the last layer",
        ),
        (with_arguments(rotary_base="wide"), "do not describe a model: ValueError"),
        (with_arguments(num_experts=4, moe_router_topk="two", moe_router_group_topk=2), "a model: TypeError"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_does_not_fit_is_named(change: Callable[[dict], object], message: str, tmp_path: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    write("megatron", tmp_path / "run", contents, values)
    changed(tmp_path / "run", change)
    with pytest.raises(CheckpointError, match=message):
        opened("megatron", tmp_path / "run")


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
def test_files_with_too_many_layers_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    """Before layers are created: a million of them would take hours."""
    write(kind, tmp_path / "run", *drawn(MODELS["mistral"]))
    name = {"megatron": "model_optim_rng.pt", "megatron-dist": "common.pt"}[kind]
    (path,) = (tmp_path / "run").rglob(name)
    value = torch.load(path, weights_only=False)
    with_arguments(num_layers=20_000, window_attn_skip_freq=[1] * 10_000 + [0] + [1] * 9_999)(value)
    torch.save(value, path)
    started = process_time()
    with pytest.raises(CheckpointError, match="a model of 20000 layers but contains parameters of at most"):
        opened(kind, tmp_path / "run")
    assert process_time() - started < 10.0


@pytest.mark.parametrize(
    ("frequency", "pattern"), [(3, ("local", "local", "base")), (1, ()), ([1, 1, 1, 0, 1], ("local",) * 3 + ("base",))]
)
def test_windows_of_megatrons_layers(frequency: object, pattern: tuple[str, ...], tmp_path: Path) -> None:
    """Compare with is_layer_window_attention of megatron-core: in every third layer, none, or those of a list."""
    contents, values = drawn(MODELS["mistral"])
    write("megatron", tmp_path / "run", contents, values)
    changed(tmp_path / "run", with_arguments(window_attn_skip_freq=frequency))
    model = opened("megatron", tmp_path / "run").contents.model
    assert (model.sliding_window, model.layer_pattern) == (None, pattern)
    assert model.layer_kinds == ({"local": {"sliding_window": 9}} if pattern else {})


def test_names_of_newer_versions_and_notes(tmp_path: Path) -> None:
    """The block that predicts a further token has another name, experts a fused activation that limits first, and
    --enable-gpt-oss sets YaRN itself."""
    contents, values = drawn(MODELS["sinks"])
    write("megatron", tmp_path / "run", contents, values, pipeline=2)
    path = tmp_path / "run" / "release" / "mp_rank_00_001" / "model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    value["model"] = {
        key.replace("transformer_layer", "mtp_model_layer"): each for key, each in value["model"].items()
    }
    torch.save(value, path)
    source = opened("megatron", tmp_path / "run")
    assert source.contents.notes == ()
    assert_holds(source, contents, values)
    contents, values = drawn(MODELS["gpt_oss"])
    write("megatron", tmp_path / "preset", contents, values)

    def with_preset(value: dict) -> None:
        for name in [each for each in vars(value["args"]) if each.startswith("yarn_")]:
            delattr(value["args"], name)
        with_arguments(position_embedding_type="rope", enable_gpt_oss=True, bias_gelu_fusion=True)(value)

    changed(tmp_path / "preset", with_preset)
    read = opened("megatron", tmp_path / "preset").contents
    assert read.model.rope_scaling == RopeScaling(kind="yarn", factor=32.0, original_length=131072, truncate=False)
    (note,) = read.notes
    assert "Megatron-LM limits the inputs of quick_geglu before it adds the bias" in note


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
    two_windows = {**GPT_OSS["layer_kinds"], "wide": {"sliding_window": 12}}
    for fields, message in (
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ({"bias": "mlp"}, "bias is mlp"),
        ({"layer_kinds": two_windows, "layer_pattern": ("local", "wide")}, "differ in sliding_window"),
    ):
        contents, values = drawn(replace(MODELS["gpt_oss"], **fields))
        with pytest.raises(CheckpointError, match=message):
            write(kind, tmp_path / "run", contents, values)
    contents, values = drawn(replace(MODELS["sinks"], hidden_size=30, num_kv_heads=4, head_size=8))
    with pytest.raises(CheckpointError, match=r"projection\.weight has 30 rows, .* choose another --tensor"):
        write("megatron", tmp_path / "run", contents, values, tensor=4)
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


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ("sigmoids", "local"),
        ("sigmoids", "transformer_engine"),
        ("deepseek", "local"),
        ("gpt_oss", "transformer_engine"),
    ],
)
def test_expert_ranks_are_read(shape: str, names: str, tmp_path: Path) -> None:
    """Two experts each on two ranks, made from one rank with four."""
    contents, values = drawn(MODELS[shape])
    write("megatron", tmp_path / "run", contents, values, layer_names=names)
    whole = tmp_path / "run" / "release" / "mp_rank_00"
    value = torch.load(whole / "model_optim_rng.pt", weights_only=False)
    value["args"].expert_model_parallel_size = 2
    state = value["model"]
    for rank in range(2):
        value["model"] = {}
        for key, tensor in state.items():
            match = re.fullmatch(r"(.*(?:local_experts\.|experts\.linear_fc.\.(?:weight|bias)))(\d)(.*)", key)
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
