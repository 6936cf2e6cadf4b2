"""Megatron-LM's two layouts written and read back, bit for bit, over tensor, pipeline and virtual sizes."""

import argparse
import re
import shutil
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
    LATENTS,
    MODELS,
    SIZES,
    assert_holds,
    drawn,
    opened,
    write,
)

STAGES, CHUNKS, STAGED_CHUNKS = {"tensor": 2, "pipeline": 2}, {"tensor": 2, "chunks": 2}, {"pipeline": 2, "chunks": 2}
LAYOUTS = [
    *((shape, STAGES) for shape in ("gpt2", "deepseek", "bert")),
    *((shape, CHUNKS) for shape in ("qwen", "qwen_moe", "sinks")),
]
MORE_LAYOUTS = [
    *((shape, STAGES) for shape in ("latent_experts", "llama_mtp", "qwen")),
    *(("latents", CHUNKS), ("gpt_oss", STAGED_CHUNKS), ("qwen", STAGED_CHUNKS), ("qwen", {})),
]
TE_DIST = ("sigmoids", "latent_experts", "deepseek", "sinks")
"""Shapes that are written to torch_dist with the names of Transformer Engine's layers."""
DIST = [
    *("gpt2", "llama", "latent_experts", "deepseek", "alternating", "gpt_oss", "bert_alone"),
    *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in ("sigmoids", "sinks", "llama_mtp")),
]


LAYER = "decoder.layers."


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def check_round_trip(kind: str, shape: str, folder: Path, engine: bool, dtype: str = "F32", **sizes: int) -> None:
    """engine: with the names of Transformer Engine's layers."""
    contents, values = drawn(MODELS[shape], dtype)
    write(kind, folder, contents, values, layer_names="transformer_engine" if engine else "local", **sizes)
    assert format_of(folder) is FORMATS[kind]
    source = opened(kind, folder)
    assert_holds(source, contents, values)
    source.close()


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_LAYOUTS)],
    ids=str,
)
def test_torch_layout_there_and_back(shape: str, sizes: dict[str, int], run: Path) -> None:
    check_round_trip("megatron", shape, run, "chunks" in sizes, **sizes)


@pytest.mark.parametrize("shape", DIST)
def test_torch_dist_there_and_back(shape: str, run: Path) -> None:
    dtype = "BF16" if shape == "llama" else "F32"
    check_round_trip("megatron-dist", shape, run, shape in TE_DIST, dtype)


def file_of(folder: Path, rank: str = "00") -> Path:
    """Return the file of a tensor rank, or of a tensor rank and a stage, as in 01_000."""
    return folder / "release" / f"mp_rank_{rank}" / "model_optim_rng.pt"


def loaded(folder: Path, rank: str = "00") -> dict:
    return torch.load(file_of(folder, rank), weights_only=False)


def written(shape: str, folder: Path, **options: object) -> dict[str, torch.Tensor]:
    """Write a shape as ranks of Megatron-LM; return our tensors by name."""
    contents, values = drawn(MODELS[shape])
    write("megatron", folder, contents, values, **options)
    return {tensor.name: value for tensor, value in values.items()}


def test_a_rank_holds_its_share_under_megatrons_names(run: Path) -> None:
    """Compare with rows that are selected by hand: kv groups, halves of gate and up, padded vocabulary, tied copy."""
    ours = written("qwen", run, tensor=2, pipeline=2)
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "release"
    saved = loaded(run, "01_001")
    assert saved["checkpoint_version"] == 3.0
    assert saved["args"].padded_vocab_size == 256
    model = saved["model"]
    qkv, down = ours["blocks.2.attention.qkv.weight"], ours["blocks.2.mlp.down.weight"]
    assert torch.equal(model["decoder.layers.0.self_attention.linear_qkv.weight"], qkv[1].reshape(64, 32))
    gate, up = ours["blocks.3.mlp.up.weight"]
    assert torch.equal(model["decoder.layers.1.mlp.linear_fc1.weight"], torch.cat([gate[24:], up[24:]]))
    assert torch.equal(model["decoder.layers.0.mlp.linear_fc2.weight"], down[:, 24:])
    assert torch.equal(model["output_layer.weight"], torch.zeros(128, 32))
    first = loaded(run, "00_001")["model"]
    assert torch.equal(first["output_layer.weight"][:97], ours["embedding.word.weight"])
    shutil.rmtree(file_of(run, "01_000").parent)
    with pytest.raises(CheckpointError, match="tensor rank 1 of pipeline rank 0"):
        opened("megatron", run)


def named(prefix: str, names: str) -> list[str]:
    return [f"{prefix}{name}" for name in names.split()]


QUERIES = named("self_attention.linear_q_", "down_proj.weight up_proj.weight up_proj.layer_norm_weight")
LATENT_ATTENTION = [
    *named("self_attention.linear_kv_", "down_proj.weight up_proj.weight up_proj.layer_norm_weight"),
    *("input_layernorm.weight", "self_attention.linear_proj.weight"),
]
DENSE = named("mlp.linear_", "fc1.layer_norm_weight fc1.weight fc2.weight")
EXPERTS = [f"mlp.experts.linear_fc{number}.weight{expert}" for number in (1, 2) for expert in range(4)]
SIGMOIDS = ["pre_mlp_layernorm.weight", *named("mlp.router.", "weight expert_bias")]
SHARED = named("mlp.shared_experts.linear_", "fc1.weight fc2.weight")
BIASED_EXPERTS = [
    *named("self_attention.linear_", "qkv.weight qkv.bias qkv.layer_norm_weight proj.weight proj.bias"),
    *named("", "self_attention.core_attention.softmax_offset pre_mlp_layernorm.weight"),
    *named("mlp.router.", "weight bias"),
    *(*EXPERTS, *(name.replace("weight", "bias") for name in EXPERTS)),
]


HEADS = named("", "enorm.weight hnorm.weight eh_proj.weight final_layernorm.weight")
DEEPSEEK = [*QUERIES, *LATENT_ATTENTION, *SIGMOIDS, *SHARED, *EXPERTS]
LATENTS_AND_MLP = ["self_attention.linear_q_proj.weight", *LATENT_ATTENTION, *DENSE]


@pytest.mark.parametrize(
    ("shape", "rank", "prefix", "names"),
    [
        ("latent_experts", "01_000", "decoder.layers.0.", LATENTS_AND_MLP),
        ("deepseek", "01_001", "decoder.layers.1.", DEEPSEEK),
        ("deepseek", "01_001", "mtp.layers.0.", [*HEADS, *(f"transformer_layer.{name}" for name in DEEPSEEK)]),
        ("deepseek", "01_000", "mtp.", []),
        ("gpt_oss", "00_001", "decoder.layers.1.", BIASED_EXPERTS),
    ],
)
def test_layers_of_transformer_engine_have_megatrons_names(
    shape: str, rank: str, prefix: str, names: list[str], run: Path
) -> None:
    """Compare with the names in megatron-core's get_gpt_layer_with_transformer_engine_spec, where norms are fused and
    core attention has the sinks, and in its get_mtp_layer_spec_for_backend, whose blocks are on the last stage."""
    written(shape, run, tensor=int(rank[:2]) + 1, pipeline=2, layer_names="transformer_engine")
    keys = loaded(run, rank)["model"].keys()
    assert sorted(key.removeprefix(prefix) for key in keys if key.startswith(prefix)) == sorted(names)


def test_latents_and_further_tokens_are_shared_like_megatrons(run: Path) -> None:
    """Every tensor rank has the whole down projections, its rows of the projection of further tokens, and, on the last
    stage, a copy of the word embeddings."""
    ours = written("deepseek", run, tensor=2, pipeline=2, layer_names="transformer_engine")
    first, last = (loaded(run, f"01_00{stage}")["model"] for stage in range(2))
    assert first[f"{LAYER}0.self_attention.linear_kv_down_proj.weight"].shape == (16, 32)
    assert torch.equal(last["mtp.layers.0.eh_proj.weight"], ours["head.mtp.0.projection.weight"][16:])
    assert torch.equal(last["mtp.layers.0.enorm.weight"], ours["head.mtp.0.embedding_norm.weight"])
    assert torch.equal(last["embedding.word_embeddings.weight"], first["embedding.word_embeddings.weight"])


@pytest.mark.parametrize("names", ["local", "transformer_engine"])
def test_core_attention_has_sinks_and_an_extra_state(names: str, tmp_path: Path) -> None:
    ours = written("gpt_oss", tmp_path / "torch", layer_names=names)
    sinks = loaded(tmp_path / "torch")["model"][f"{LAYER}1.self_attention.core_attention.softmax_offset"]
    assert torch.equal(sinks, ours["blocks.1.attention.sinks.weight"].flatten())
    write("megatron-dist", tmp_path / "dist", *drawn(MODELS["gpt_oss"]), layer_names=names)
    stored = FileSystemReader(tmp_path / "dist" / "release").read_metadata().state_dict_metadata
    extra = f"{LAYER}self_attention.core_attention._extra_state/shard_3_4"
    assert (extra in stored) == (names == "transformer_engine")


def changed(folder: Path, change: Callable[[dict], object], rank: str = "00") -> None:
    value = loaded(folder, rank)
    change(value)
    torch.save(value, file_of(folder, rank))


def with_arguments(**arguments: object) -> Callable[[dict], None]:
    return lambda value: vars(value["args"]).update(arguments)


def in_model(name: str, tensor: torch.Tensor) -> Callable[[dict], None]:
    return lambda value: value["model"].update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value["model"].pop(f"{LAYER}1.input_layernorm.weight"), "lacks blocks.1.attention_norm.weight"),
        (in_model(f"{LAYER}0.mlp.experts.weight", torch.zeros(2)), "mlp.experts.weight"),
        (in_model("decoder.final_layernorm.weight", torch.ones(32, dtype=torch.int64)), "int64"),
        (lambda value: value.update(checkpoint_version=2.0), "checkpoint_version 2.0"),
        (lambda value: value.pop("args"), "no args"),
        ({"num_experts": 8}, "mlp.linear_fc1.weight"),
        ({"hidden_size": 64}, "the args require"),
        (
            {"multi_latent_attention": True},
            "multi_latent_attention without qk_layernorm, multi_latent_attention with norm_epsilon 1e-05",
        ),
        ({"num_experts": 4, "moe_layer_freq": [1, 0]}, r"moe_layer_freq \[1, 0\]"),
        ({"num_layers": 10**12}, "num_layers is 1000000000000; it must be a whole number from 1 to"),
        ({"mtp_num_layers": 10**12}, "mtp_num_layers is 1000000000000; it must be a whole number from 1 to"),
        ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, "mtp_use_repeated_layer"),
        ({"softmax_type": "off-by-one"}, "softmax_type off-by-one"),
        ({"swiglu": False, "quick_geglu": True}, "quick_geglu without activation_func_clamp_value and glu_lin"),
        ({"activation_func_clamp_value": 7.0}, "swiglu with activation_func_clamp_value or glu_linear_off"),
        ({"window_size": (8, 0), "window_attn_skip_freq": [1, 0]}, r"window_attn_skip_freq \[1, 0\] is set"),
        (
            {"window_size": (8, 0), "window_attn_skip_freq": 2, "mtp_num_layers": 1},
            "window_attn_skip_freq 2 with mtp_num_layers 1 .its blocks must have the window of the last layer",
        ),
        ({"rotary_base": "wide"}, "do not describe a model: ValueError"),
        ({"num_experts": 4, "moe_router_topk": "two", "moe_router_group_topk": 2}, "a model: TypeError"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_does_not_fit_is_named(change: Callable | dict[str, object], message: str, run: Path) -> None:
    """change: of the file, or arguments."""
    written("llama", run)
    changed(run, with_arguments(**change) if isinstance(change, dict) else change)
    with pytest.raises(CheckpointError, match=message):
        opened("megatron", run)


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
def test_files_with_too_many_layers_are_refused_at_once(kind: str, run: Path) -> None:
    """Before layers are created: a million of them would take hours."""
    write(kind, run, *drawn(MODELS["mistral"]))
    (path,) = [*(run).rglob("model_optim_rng.pt"), *(run).rglob("common.pt")]
    value = torch.load(path, weights_only=False)
    with_arguments(num_layers=20_000, window_attn_skip_freq=[1] * 10_000 + [0] + [1] * 9_999)(value)
    torch.save(value, path)
    started = process_time()
    with pytest.raises(CheckpointError, match="a model of 20000 layers but contains parameters of at most"):
        opened(kind, run)
    assert process_time() - started < 10.0


@pytest.mark.parametrize(
    ("frequency", "pattern"), [(3, ("local", "local", "base")), (1, ()), ([1, 1, 1, 0, 1], ("local",) * 3 + ("base",))]
)
def test_windows_of_megatrons_layers(frequency: object, pattern: tuple[str, ...], run: Path) -> None:
    """Compare with is_layer_window_attention of megatron-core: in every third layer, none, or those of a list."""
    written("mistral", run)
    changed(run, with_arguments(window_attn_skip_freq=frequency))
    model = opened("megatron", run).contents.model
    assert (model.sliding_window, model.layer_pattern) == (None, pattern)
    assert model.layer_kinds == ({"local": {"sliding_window": 9}} if pattern else {})


def test_names_of_newer_versions_are_read(run: Path) -> None:
    """The block that predicts a further token has another name."""

    def with_new_names(value: dict) -> None:
        model = value["model"].items()
        value["model"] = {key.replace("transformer_layer", "mtp_model_layer"): each for key, each in model}

    contents, values = drawn(MODELS["sinks"])
    write("megatron", run, contents, values, pipeline=2)
    changed(run, with_new_names, "00_001")
    source = opened("megatron", run)
    assert source.contents.notes == ()
    assert_holds(source, contents, values)


def test_presets_set_yarn_and_give_a_note(run: Path) -> None:
    """--enable-gpt-oss sets YaRN itself, and experts have a fused activation that limits first."""

    def with_preset(value: dict) -> None:
        for name in [each for each in vars(value["args"]) if each.startswith("yarn_")]:
            delattr(value["args"], name)
        with_arguments(position_embedding_type="rope", enable_gpt_oss=True, bias_gelu_fusion=True)(value)

    written("gpt_oss", run)
    changed(run, with_preset)
    read = opened("megatron", run).contents
    assert read.model.rope_scaling == RopeScaling(kind="yarn", factor=32.0, original_length=131072, truncate=False)
    (note,) = read.notes
    assert "Megatron-LM limits the inputs of quick_geglu before it adds the bias" in note


def test_other_saved_state_is_ignored(run: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    write("megatron", run, contents, values)

    def with_state(value: dict) -> None:
        value["optimizer"] = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [argparse.Namespace(lr=1.0)]}
        value["rng_state"] = [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()}]

    changed(run, with_state)
    assert_holds(opened("megatron", run), contents, values)


def with_experts(**fields: object) -> ModelConfig:
    plain = {"num_experts": 4, "bias": "none", "expert_balance_rate": 0.0, "normalize_expert_shares": False}
    return ModelConfig(**{**SIZES, **plain, **fields})


def with_latents(**fields: object) -> ModelConfig:
    return ModelConfig(**{**SIZES, **DECODER, **LATENTS, **fields})


NARROW = {"layer_kinds": {"narrow": {"ffn_hidden_size": 16}}, "layer_pattern": ("narrow", "base")}
TWO_WINDOWS = {"local": {"sliding_window": 9}, "wide": {"sliding_window": 12}}
INEXPRESSIBLE = {
    "norm_position is post": BertModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocabulary_size=50),
    "expert_balance_rate": with_experts(expert_balance_rate=0.1),
    "router_bias": with_experts(router_bias=True),
    "normalize_expert": with_experts(router_scores="sigmoid", router_scale=2.0),
    "norm_epsilon is 1e-05": with_latents(norm_epsilon=1e-5),
    "attention_scale is 0.5": with_latents(attention_scale=0.5),
    "truncate is False": with_latents(rope_scaling=RopeScaling(kind="yarn", factor=4.0, truncate=False)),
    "differ in ffn_hidden_size": with_latents(**NARROW),
    "swiglu_alpha is 1.0": replace(MODELS["gpt_oss"], swiglu_alpha=1.0),
    "bias is mlp": replace(MODELS["gpt_oss"], bias="mlp"),
    "differ in sliding_window": replace(MODELS["gpt_oss"], layer_kinds=TWO_WINDOWS, layer_pattern=("local", "wide")),
}


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
@pytest.mark.parametrize("message", INEXPRESSIBLE)
def test_what_megatron_cannot_express_is_refused(kind: str, message: str, run: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        write(kind, run, *drawn(INEXPRESSIBLE[message]))
    assert list(run.parent.iterdir()) == []


def test_sizes_that_do_not_divide_are_refused(run: Path) -> None:
    odd = {"hidden_size": 30, "num_kv_heads": 4, "head_size": 8}
    for shape, fields, sizes, message in (
        ("sinks", odd, {"tensor": 4}, r"projection\.weight has 30 rows, .* choose another --tensor"),
        ("latents", {"query_latent_size": 18}, {"tensor": 4}, r"query_down\.weight has 18 rows"),
        ("gpt2", {}, {"tensor": 3}, "tensor"),
        ("gpt2", {}, {"pipeline": 3}, "4 layers"),
        ("gpt2", {}, {"chunks": 8}, "4 layers"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write("megatron", run, *drawn(replace(MODELS[shape], **fields)), **sizes)
    assert list(run.parent.iterdir()) == []


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
def test_a_flipped_bit_is_found(kind: str, run: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    write(kind, run, contents, values)
    (path,) = [*run.rglob("model_optim_rng.pt"), *run.rglob("*.distcp")]
    content = bytearray(path.read_bytes())
    victim = next(tensor for tensor in contents.tensors if tensor.name == "blocks.2.mlp.down.weight")
    content[content.index(values[victim].numpy().tobytes()[:64])] ^= 1
    path.write_bytes(content)
    source = opened(kind, run)
    assert [tensor.name for tensor in source.contents.tensors if source.verify(tensor)] == [victim.name]
    source.close()


def test_a_cut_distcp_file_is_damage(run: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    write("megatron-dist", run, contents, values)
    path = next((run).rglob("*.distcp"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    source = opened("megatron-dist", run)
    with pytest.raises(DamagedCheckpointError, match="distcp"):
        source.read(source.contents.tensors[-1])


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        *(("sigmoids", "local"), ("sigmoids", "transformer_engine")),
        *(("deepseek", "local"), ("gpt_oss", "transformer_engine")),
    ],
)
def test_expert_ranks_are_read(shape: str, names: str, run: Path) -> None:
    """Two experts each on two ranks, made from one rank with four."""
    contents, values = drawn(MODELS[shape])
    write("megatron", run, contents, values, layer_names=names)
    value = loaded(run)
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
        file_of(run, f"00_{rank:03d}").parent.mkdir()
        torch.save(value, file_of(run, f"00_{rank:03d}"))
    shutil.rmtree(file_of(run).parent)
    assert_holds(opened("megatron", run), contents, values)


def test_uneven_stages_are_read(run: Path) -> None:
    """Three layers and one, made from two and two."""
    contents, values = drawn(MODELS["gpt2"])
    write("megatron", run, contents, values, pipeline=2)
    first, last = (loaded(run, f"00_00{stage}") for stage in range(2))
    for key in list(last["model"]):
        if key.startswith("decoder.layers.0."):
            first["model"][key.replace("layers.0.", "layers.2.")] = last["model"].pop(key)
    last["model"] = {key.replace("layers.1.", "layers.0."): value for key, value in last["model"].items()}
    torch.save(first, file_of(run, "00_000"))
    torch.save(last, file_of(run, "00_001"))
    assert_holds(opened("megatron", run), contents, values)
