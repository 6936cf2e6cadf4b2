"""Megatron-LM's names of our parameters (megatron-core's GPTModel and BertModel, both layer specs).

Megatron-LM's matrices are ours with merged leading axes. The rows of linear_qkv are grouped by kv group: query heads,
key and value of each group. The rows of a gated linear_fc1 are, for each tensor rank, the rows of the gate and then
the rows of the other half. Each expert has its own matrices (SequentialMLP, TEGroupedMLP). In multi-latent attention
(MLASelfAttention), rotated channels are the last ones of each head, in pairs, and the local layers, but not those of
Transformer Engine, divide the down projections over tensor ranks. Blocks for multi-token prediction (MTP) are not
among the numbered layers; they are on the last stage, which has a copy of the word embeddings for them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from megapipe.checkpoint.directory import FreshFolder
from megapipe.checkpoint.hugging_face import Join, rotary_last
from megapipe.checkpoint.manifest import RunState
from megapipe.checkpoint.storage import CheckpointError, on_failure
from megapipe.config.model import ModelConfig
from megapipe.conversion.formats import RELEASE, TRACKER, LayerNames
from megapipe.conversion.megapipe_format import parameters_of
from megapipe.spec.layers import tensor_problems
from megapipe.spec.parameters import ParameterSpec

CHECKPOINT_VERSION = 3.0
VOCABULARY_DIVISOR = 128
"""By default, Megatron-LM rounds the vocabulary up to a multiple of this on each tensor rank."""
WORD_KEY = "embedding.word_embeddings.weight"
_STACKS = {"gpt": "decoder", "bert": "encoder"}
"""Name of the module with the layers, by the kind of the model."""
_OUTER = {
    "embedding.word.": "embedding.word_embeddings.",
    "embedding.position.": "embedding.position_embeddings.",
    "embedding.token_type.": "embedding.tokentype_embeddings.",
    "head.norm.": "{stack}.final_layernorm.",
    "head.output.": "output_layer.",
    "head.transform.": "lm_head.dense.",
    "head.transform_norm.": "lm_head.layer_norm.",
    "head.pooler.": "pooler.dense.",
    "head.sentence.": "binary_head.",
}
_MTP_NAME = re.compile(r"head\.mtp\.([0-9]+)\.(block\.)?(.+)")
_MTP_MODULES = {
    "embedding_norm.": "enorm.",
    "hidden_norm.": "hnorm.",
    "projection.": "eh_proj.",
    "norm.": "final_layernorm.",
}
"""Modules of one MTP depth, except its block: our name -> Megatron-LM's name."""
MTP_BLOCK, NEWER_MTP_BLOCK = "transformer_layer.", "mtp_model_layer."
"""Names of the block of an MTP depth; later versions of Megatron-LM use the second one, in the torch layout only."""
_BLOCK = {
    "attention_norm.": "input_layernorm.",
    "attention.qkv.": "self_attention.linear_qkv.",
    "attention.sinks.weight": "self_attention.core_attention.softmax_offset",
    "attention.query_norm.": "self_attention.q_layernorm.",
    "attention.key_norm.": "self_attention.k_layernorm.",
    "attention.query.": "self_attention.linear_q_proj.",
    "attention.query_down.": "self_attention.linear_q_down_proj.",
    "attention.query_latent_norm.": "self_attention.q_layernorm.",
    "attention.query_up.": "self_attention.linear_q_up_proj.",
    "attention.kv_down.": "self_attention.linear_kv_down_proj.",
    "attention.kv_latent_norm.": "self_attention.kv_layernorm.",
    "attention.kv_up.": "self_attention.linear_kv_up_proj.",
    "attention.output.": "self_attention.linear_proj.",
    "mlp_norm.": "pre_mlp_layernorm.",
    "mlp.up.": "mlp.linear_fc1.",
    "mlp.down.": "mlp.linear_fc2.",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.score_bias": "mlp.router.bias",
    "mlp.router.bias": "mlp.router.expert_bias",
    "mlp.shared.up.": "mlp.shared_experts.linear_fc1.",
    "mlp.shared.down.": "mlp.shared_experts.linear_fc2.",
    "mlp.shared.gate.": "mlp.shared_experts.gate_",
}
_ROTARY = ("attention.query.", "attention.query_up.", "attention.kv_down.")
"""Matrices with rows of rotated channels, in multi-latent attention."""
_DIVIDED: dict[str, tuple[LayerNames, ...]] = {
    "attention.query_down.": ("local",),
    "attention.kv_down.": ("local",),
    "projection.": ("local", "transformer_engine"),
}
"""Matrices whose rows are divided over tensor ranks, although every rank needs the output of all rows, and the layer
implementations that divide them."""
_FUSED_MLP = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_FUSED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", **_FUSED_MLP}
"""Norms that Transformer Engine fuses into the next linear layer, if this is not a mixture of experts: name of the
norm -> start of the names of its parameters in that layer."""
_FUSED_LATENT = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    **_FUSED_MLP,
}
"""The same with multi-latent attention."""


@dataclass(frozen=True)
class ParameterLocation:
    """Location of a parameter.

    key: Megatron-LM's name in the layer or model, with the local layers; for experts, without the number of the
    expert. layer: index of the layer from 0; None outside of the numbered layers. transformer_engine: the key with
    Transformer Engine's layers. local_dist: the key in torch_dist with the local layers. expert: for parameters of
    experts, the part of one expert, which is divided over tensor ranks like the parameter of an MLP. regrouped:
    function from Megatron-LM's rows to ours, and its inverse; None if the rows are the same. divided: the layer
    implementations that divide the rows over tensor ranks, although megapipe does not.
    """

    spec: ParameterSpec
    key: str
    layer: int | None
    transformer_engine: str
    local_dist: str
    expert: ParameterSpec | None = None
    regrouped: tuple[Join, Join] | None = None
    divided: tuple[LayerNames, ...] = ()

    @property
    def dist_keys(self) -> tuple[str, str]:
        """The keys in torch_dist, by the layer specification: local and Transformer Engine."""
        if self.expert is not None:
            return (self.key.replace("experts.", "experts.experts."),) * 2
        return self.local_dist, self.transformer_engine

    def to_megapipe(self, values: Tensor) -> Tensor:
        """Return our form of the whole parameter. values: Megatron-LM's form."""
        return values if self.regrouped is None else self.regrouped[0]([values])[0]

    def to_megatron(self, values: Tensor) -> Tensor:
        """Return Megatron-LM's form of the whole parameter. values: our form."""
        return values if self.regrouped is None else self.regrouped[1]([values])[0]

    def shards(self, divided: bool) -> ParameterSpec:
        """Return `piece` with the axis that is divided over tensor ranks.

        divided: whether tensor ranks divide the rows, which they only do for a parameter with `self.divided`.
        """
        return replace(self.piece, partition_axis=0) if divided and self.divided else self.piece

    @property
    def piece(self) -> ParameterSpec:
        """The parameter, or the part of one expert."""
        return self.spec if self.expert is None else self.expert

    @property
    def num_pieces(self) -> int:
        """Number of tensors that contain the parameter."""
        return 1 if self.expert is None else self.spec.shape[0]

    def keys(self, piece: int) -> tuple[str, str]:
        """Return the keys of a piece, local and Transformer Engine."""
        if self.expert is None:
            return self.key, self.transformer_engine
        local = self.key.replace("experts.", f"experts.local_experts.{piece}.")
        return local, f"{self.transformer_engine}{piece}"

    @property
    def dist_shape(self) -> tuple[int, ...]:
        """The shape in torch_dist, without the axis of the layers."""
        stacked = () if self.expert is None else (self.num_pieces,)
        return *stacked, *merged_shape(self.piece, self.piece.shape)


def _fused(key: str, norms: Mapping[str, str]) -> str:
    for plain, fused in norms.items():
        if key.startswith(plain):
            return fused + key.removeprefix(plain)
    return key


def layers_prefix(model: ModelConfig) -> str:
    """Return the start of the names of layers, before the number of the layer."""
    return f"{_STACKS[model.kind]}.layers."


def mtp_prefix(depth: int) -> str:
    """Return the start of the names of the modules of one MTP depth, counted from 0."""
    return f"mtp.layers.{depth}."


def stateful_modules(model: ModelConfig, names: LayerNames) -> tuple[str, ...]:
    """Return the modules of a layer that have an `_extra_state`, which is None without FP8. model: configuration of
    the layer's kind."""
    if model.kv_latent_size is None:
        projections = ["qkv"]
    else:
        queries = ["q_proj"] if model.query_latent_size is None else ["q_down_proj", "q_up_proj"]
        projections = [*queries, "kv_down_proj", "kv_up_proj"]
    attention = [f"self_attention.linear_{name}" for name in (*projections, "proj")]
    if model.attention_sinks and names == "transformer_engine":
        attention.append("self_attention.core_attention")
    if model.num_experts is None:
        return *attention, "mlp.linear_fc1", "mlp.linear_fc2"
    shared = (
        () if model.shared_expert_size is None else ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
    )
    return *attention, *shared, "mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"


def models_of_layers(model: ModelConfig) -> list[ModelConfig]:
    """Return for each layer the configuration of its kind.

    Raises CheckpointError unless layers differ only in whether they have experts (and then in the width of their MLP),
    and in whether they have a window.
    """
    kinds: dict[bool, ModelConfig] = {}
    window = window_of(model)
    for block in model.kinds_of_layers.values():
        block = replace(block, ffn_hidden_size=block.ffn_size, sliding_window=block.sliding_window or window)
        same = kinds.setdefault(block.num_experts is not None, block)
        other = _without_mlp(next(iter(kinds.values())))
        pairs = ((same, block), (other, _without_mlp(block)))
        for field in fields(block):
            for one, two in pairs:
                if getattr(one, field.name) != getattr(two, field.name):
                    raise CheckpointError(
                        f"model.layer_pattern has blocks that differ in {field.name}; "
                        "Megatron-LM's blocks can differ only in having experts, and in "
                        "having a window of one size: write a Hugging Face folder (--to hf)"
                    )
    return [model.of_kind(model.kind_of_layer(layer)) for layer in range(model.num_layers)]


def window_of(model: ModelConfig) -> int | None:
    """Return the window of the first layer that has one."""
    return next(filter(None, (each.sliding_window for each in model.kinds_of_layers.values())), None)


_MLP_FIELDS = (
    "num_experts", "ffn_hidden_size", "experts_per_token", "normalize_expert_shares",
    "expert_balance_rate", "expert_bias", "router_scores", "router_scale", "router_bias",
    "router_groups", "router_groups_chosen", "shared_expert_size", "shared_expert_gate",
)  # fmt: skip
"""Fields in which layers with experts may differ from those without."""


def _without_mlp(model: ModelConfig) -> ModelConfig:
    return replace(model, **{name: getattr(ModelConfig, name) for name in _MLP_FIELDS})


def parameter_locations(model: ModelConfig) -> dict[str, ParameterLocation]:
    """Return the location of each parameter, by our name. Raises CheckpointError for a model that Megatron-LM cannot
    express."""
    if model.kind == "bert" and model.num_experts is not None:
        raise CheckpointError(
            f"model.num_experts is {model.num_experts}; Megatron-LM's BERT has no experts: "
            "only a GPT with experts can be converted to and from Megatron-LM"
        )
    layers = models_of_layers(model)
    mlps = {name: parameters_of(_dense(block)) for name, block in model.kinds_of_layers.items()}
    locations = {}
    for name, spec in parameters_of(model).items():
        stem = next((stem for stem in _OUTER if name.startswith(stem)), None)
        if stem is not None:
            key = _OUTER[stem].format(stack=_STACKS[model.kind]) + name.removeprefix(stem)
            locations[name] = ParameterLocation(spec, key, None, key, key)
        elif (match := _MTP_NAME.fullmatch(name)) is not None:
            locations[name] = _mtp_location(spec, match, layers[-1], mlps[model.kind_of_head])
        else:
            layer, path = name.removeprefix("blocks.").split(".", 1)
            kind = model.kind_of_layer(int(layer))
            locations[name] = _layer_location(spec, path, layers[int(layer)], mlps[kind], int(layer))
    return locations


def _mtp_location(
    spec: ParameterSpec, name: re.Match[str], model: ModelConfig, mlps: Mapping[str, ParameterSpec]
) -> ParameterLocation:
    """Return the location of an MTP parameter. name: match of _MTP_NAME, with the depth, `block.` or None, and the
    path. model, mlps: see `_layer_location`, for the last layer."""
    prefix, path = mtp_prefix(int(name[1])), name[3]
    if name[2] is None:
        stem = next(stem for stem in _MTP_MODULES if path.startswith(stem))
        key = prefix + _MTP_MODULES[stem] + path.removeprefix(stem)
        return ParameterLocation(spec, key, None, key, key, divided=_DIVIDED.get(stem, ()))
    prefix += MTP_BLOCK
    location = _layer_location(spec, path, model, mlps, None)
    return replace(
        location,
        key=prefix + location.key,
        transformer_engine=prefix + location.transformer_engine,
        local_dist=prefix + location.local_dist,
    )


def _dense(model: ModelConfig) -> ModelConfig:
    """Return the configuration with one MLP, of the size of an expert, in place of the experts."""
    return replace(model, num_experts=None, shared_expert_size=None, shared_expert_gate=False, router_bias=False)


def _layer_location(
    spec: ParameterSpec, path: str, model: ModelConfig, mlps: Mapping[str, ParameterSpec], layer: int | None
) -> ParameterLocation:
    """Return the location of a parameter of a layer. path: our name of it in the layer. model: configuration of the
    layer's kind. mlps: our parameters with one MLP in place of experts, see `_dense`. layer: see
    `ParameterLocation`."""
    stem = next(stem for stem in _BLOCK if path.startswith(stem))
    key = _BLOCK[stem] + path.removeprefix(stem)
    if spec.name in mlps and spec.shape != mlps[spec.name].shape:
        key = key.replace("mlp.", "mlp.experts.")
        return ParameterLocation(spec, key, layer, key, key, mlps[spec.name])
    latent = model.kv_latent_size is not None
    fused = _fused(key, _FUSED_LATENT if latent else _FUSED)
    before_experts = stem == "mlp_norm." and model.num_experts is not None
    return ParameterLocation(
        spec,
        key,
        layer,
        key if before_experts else fused,
        key if latent else fused,
        regrouped=rotary_last(model, spec) if stem in _ROTARY else None,
        divided=_DIVIDED.get(stem, ()),
    )


def merged(spec: ParameterSpec, shard: Tensor) -> Tensor:
    """Reshape our shard to the one or two dimensions that it has in Megatron-LM."""
    return shard.reshape(merged_shape(spec, tuple(shard.shape)))


def merged_shape(spec: ParameterSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the output of `merged` for a shard of this shape."""
    if spec.name.endswith((".bias", ".sinks.weight")) or len(shape) == 1:
        return (math.prod(shape),)
    return math.prod(shape[:-1]), shape[-1]


class IterationFolder(FreshFolder):
    """The new folder of a run with one iteration, or, for weights without a run, with a release.

    name: name of the folder `inner`, in which the iteration's files are written.
    """

    def __init__(self, path: Path, run: RunState | None) -> None:
        super().__init__(path)
        self._tracked = RELEASE if run is None else str(run.step)
        self.name = RELEASE if run is None else f"iter_{run.step:07d}"
        with on_failure(self.abandon):
            self.inner = self.make_folder(self.name)

    def finish(self) -> None:
        """Write the tracker, which names the iteration, and rename the folder to its final path. Raises
        CheckpointError."""
        self.write(TRACKER, self._tracked)
        super().finish()


def padded_rows(model: ModelConfig, tensor_size: int) -> int:
    """Return the number of rows of Megatron-LM's padded vocabulary, over all tensor ranks."""
    unit = VOCABULARY_DIVISOR * tensor_size
    return -(-model.vocabulary_size // unit) * unit


def padded(values: Tensor, rows: int) -> Tensor:
    """Return `values`, which has one row per token of the vocabulary, with zeros appended up to `rows` rows."""
    return nn.functional.pad(values, (0, 0) * (values.ndim - 1) + (0, rows - values.shape[0]))


def check_tensor_size(model: ModelConfig, tensor_size: int) -> None:
    """Raise CheckpointError if matrices, including those of each expert, cannot be divided over this number of tensor
    ranks."""
    problems: list[str] = []
    for block in model.kinds_of_layers.values():
        problems += tensor_problems(_dense(block), tensor_size)
        if block.num_experts is None or tensor_size == 1:
            continue
        shared = block.shared_expert_size
        if shared is not None and shared % tensor_size:
            problems.append(f"model.shared_expert_size {shared} is not divisible by {tensor_size} tensor ranks")
        if block.bias == "all":
            problems.append(
                "model.bias is all, and Megatron-LM does not divide experts with biases over "
                f"{tensor_size} tensor ranks: use one"
            )
    if problems:
        raise CheckpointError("; ".join(dict.fromkeys(problems)))


def kind_of_keys(keys: Iterable[str]) -> Literal["gpt", "bert"]:
    """Return the kind of the model with these keys. Megatron-LM's arguments do not contain the kind."""
    stacks = {key.partition(".")[0] for key in keys}
    return "bert" if _STACKS["bert"] in stacks and _STACKS["gpt"] not in stacks else "gpt"
