"""Megatron-LM's names of our parameters and configuration fields (megatron-core's GPTModel and BertModel, both layer
specs).

Its matrices are ours with merged leading axes. The rows of linear_qkv are grouped by kv group: query heads, key and
value of each group. The rows of a gated linear_fc1 are, for each tensor rank, the rows of the gate and then the rows
of the other half. Each expert has its own matrices (SequentialMLP, TEGroupedMLP).
"""

import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megapipe.checkpoint.directory import FreshFolder
from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest import RunState
from megapipe.checkpoint.storage import on_failure
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.formats import RELEASE, TRACKER, Contents
from megapipe.conversion.megapipe_format import model_of, parameters_of
from megapipe.conversion.sandbox import InertObject
from megapipe.spec.family import FamilyError, known_word
from megapipe.spec.layers import tensor_problems
from megapipe.spec.parameters import ParameterSpec

VOCABULARY_DIVISOR = 128
"""By default, Megatron-LM rounds the vocabulary up to a multiple of this on each tensor rank."""
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
_BLOCK = {
    "attention_norm.": "input_layernorm.",
    "attention.qkv.": "self_attention.linear_qkv.",
    "attention.query_norm.": "self_attention.q_layernorm.",
    "attention.key_norm.": "self_attention.k_layernorm.",
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
FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of norms that Transformer Engine fuses into the next layer, if that is not a mixture of experts."""
_UNSUPPORTED = (
    "multi_latent_attention",
    "rotary_interleaved",
    "mtp_num_layers",
    "qk_l2_norm",
    "window_attn_skip_freq",
    "heterogeneous_layers_config_path",
    "no_rope_freq",
    "attention_output_gate",
    "quick_geglu",
)
_NOT_IN_BERT = ("num_experts", "qk_layernorm", "window_size")
_UNSUPPORTED_EXPERTS = (
    "moe_expert_capacity_factor",
    "moe_apply_probs_on_input",
    "moe_latent_size",
    "moe_router_force_load_balancing",
    "moe_router_topk_limited_devices",
)
"""Arguments that change what experts compute in a way that the model configuration cannot express."""
_NORMALIZATIONS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
_UNIT_OFFSET = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
_ACTIVATIONS = {"swiglu": "swiglu", "squared_relu": "relu_squared", "openai_gelu": "gelu_tanh"}
"""Activation by the argument that selects it; without one of them it is the exact GELU."""
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
_LLAMA3 = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}
"""Constants of Megatron-LM's --use-rope-scaling."""


@dataclass(frozen=True)
class ParameterLocation:
    """Location of a parameter.

    key: its name in the layer or model, with the local layers; for experts without the number of the expert. layer:
    index from 0; None outside of layers. transformer_engine: the key with Transformer Engine's layers. expert: for
    parameters of experts, the part of one expert, which the tensor ranks share like the parameter of an MLP.
    """

    spec: ParameterSpec
    key: str
    layer: int | None
    transformer_engine: str
    expert: ParameterSpec | None = None

    @property
    def dist_keys(self) -> tuple[str, str]:
        """The keys in torch_dist, by the layer specification: local and Transformer Engine."""
        if self.expert is not None:
            return (self.key.replace("experts.", "experts.experts."),) * 2
        return _fused(self.key), self.transformer_engine

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


def _fused(key: str) -> str:
    for plain, fused in FUSED_NORMS.items():
        if key.startswith(plain):
            return fused + key.removeprefix(plain)
    return key


def layers_prefix(model: ModelConfig) -> str:
    """Return what the names of layers start with, before their number."""
    return f"{_STACKS[model.kind]}.layers."


def linear_layers(model: ModelConfig) -> tuple[str, ...]:
    """Return the modules of a layer that have an `_extra_state`, which is None without FP8."""
    attention = ("self_attention.linear_qkv", "self_attention.linear_proj")
    if model.num_experts is None:
        return *attention, "mlp.linear_fc1", "mlp.linear_fc2"
    shared = (
        () if model.shared_expert_size is None else ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
    )
    return *attention, *shared, "mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"


def places(model: ModelConfig) -> dict[str, ParameterLocation]:
    """Return each parameter's location. Raises CheckpointError for a model that Megatron-LM cannot express."""
    if model.layer_pattern:
        raise CheckpointError(
            f"model.layer_pattern is {', '.join(model.layer_pattern)}; only models whose blocks are alike can be "
            "converted to and from Megatron-LM: write a Hugging Face folder instead (--to hf)"
        )
    if model.kv_latent_size is not None:
        raise CheckpointError(
            f"model.kv_latent_size is {model.kv_latent_size}; multi-latent attention cannot be converted to and from "
            "Megatron-LM: write a Hugging Face folder instead (--to hf)"
        )
    if model.kind == "bert" and model.num_experts is not None:
        raise CheckpointError(
            f"model.num_experts is {model.num_experts}; Megatron-LM's BERT has no experts: only a GPT with experts "
            "can be converted to and from Megatron-LM"
        )
    mlps = parameters_of(_dense(model))
    return {name: _place(spec, model, mlps) for name, spec in parameters_of(model).items()}


def _dense(model: ModelConfig) -> ModelConfig:
    """Return the model with one MLP of the size of an expert in place of the experts."""
    return replace(model, num_experts=None, shared_expert_size=None, shared_expert_gate=False, router_bias=False)


def _place(spec: ParameterSpec, model: ModelConfig, mlps: Mapping[str, ParameterSpec]) -> ParameterLocation:
    for ours, theirs in _OUTER.items():
        if spec.name.startswith(ours):
            key = theirs.format(stack=_STACKS[model.kind]) + spec.name.removeprefix(ours)
            return ParameterLocation(spec, key, None, key)
    layer, _, path = spec.name.removeprefix("blocks.").partition(".")
    stem = next(ours for ours in _BLOCK if path.startswith(ours))
    key = _BLOCK[stem] + path.removeprefix(stem)
    if spec.name in mlps and spec.shape != mlps[spec.name].shape:
        key = key.replace("mlp.", "mlp.experts.")
        return ParameterLocation(spec, key, int(layer), key, mlps[spec.name])
    before_experts = stem == "mlp_norm." and model.num_experts is not None
    return ParameterLocation(spec, key, int(layer), key if before_experts else _fused(key))


def merged(spec: ParameterSpec, shard: Tensor) -> Tensor:
    """Reshape our shard to the one or two dimensions that it has in Megatron-LM."""
    return shard.reshape(merged_shape(spec, tuple(shard.shape)))


def merged_shape(spec: ParameterSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the output of `merged` for a shard of this shape."""
    if spec.name.endswith(".bias") or len(shape) == 1:
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
    """Return the rows of Megatron-LM's vocabulary over all tensor ranks."""
    unit = VOCABULARY_DIVISOR * tensor_size
    return -(-model.vocabulary_size // unit) * unit


def padded(values: Tensor, rows: int) -> Tensor:
    """Return the values of a vocabulary with zeros up to this number of rows."""
    return nn.functional.pad(values, (0, 0) * (values.ndim - 1) + (0, rows - values.shape[0]))


def check_tensor_size(model: ModelConfig, tensor_size: int) -> None:
    """Raise CheckpointError if the matrices, those of every expert too, cannot be divided over this number of tensor
    ranks."""
    problems = tensor_problems(_dense(model), tensor_size)
    if model.num_experts is not None and tensor_size > 1:
        shared = model.shared_expert_size
        if shared is not None and shared % tensor_size:
            problems.append(f"model.shared_expert_size {shared} is not divisible by {tensor_size} tensor ranks")
        if model.bias == "all":
            problems.append(
                f"model.bias is all, and Megatron-LM does not divide experts with biases over {tensor_size} tensor "
                "ranks: use one"
            )
    if problems:
        raise CheckpointError("; ".join(problems))


def arguments_in(saved: Any, origin: Path) -> Mapping[str, Any]:
    """Return Megatron-LM's arguments. saved: the content of the file `origin`. Raises CheckpointError."""
    described = saved.get("args") if isinstance(saved, dict) else None
    if not isinstance(described, InertObject) or not isinstance(described.state, dict):
        raise CheckpointError(f"{origin} contains no args, which describe the model")
    return described.state


def kind_of_keys(keys: Iterable[str]) -> Literal["gpt", "bert"]:
    """Return the kind of the model with these keys, which its arguments do not contain."""
    stacks = {key.partition(".")[0] for key in keys}
    return "bert" if _STACKS["bert"] in stacks and _STACKS["gpt"] not in stacks else "gpt"


def model_of_arguments(saved: Any, origin: Path, kind: Literal["gpt", "bert"] = "gpt") -> ModelConfig:
    """Return the model that Megatron-LM's arguments describe. saved: the content of the file `origin`.

    Raises CheckpointError for missing arguments, and for a model that the model configuration cannot express.
    """
    arguments = arguments_in(saved, origin)
    unsupported = [name for name in _UNSUPPORTED if arguments.get(name)]
    if arguments.get("normalization") != "RMSNorm":
        unsupported += [f"{name} without RMSNorm" for name in _UNIT_OFFSET if arguments.get(name)]
    if arguments.get("qk_layernorm") and arguments.get("normalization") != "RMSNorm":
        unsupported.append("qk_layernorm without RMSNorm")
    if kind == "bert":
        unsupported += [f"{name} in a BERT" for name in _NOT_IN_BERT if arguments.get(name)]
        if arguments.get("position_embedding_type", "learned_absolute") != "learned_absolute":
            unsupported.append("position_embedding_type in a BERT")
    elif arguments.get("num_experts"):
        unsupported += _unsupported_experts(arguments)
    if unsupported:
        raise CheckpointError(
            f"{origin}: {', '.join(unsupported)} is set, which the model configuration cannot express"
        )
    try:
        return model_of(_fields(arguments, kind))
    except FamilyError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{origin}: its arguments do not describe a model: {error!r}") from error


def _unsupported_experts(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments of experts that the model configuration cannot express."""
    unsupported = [name for name in _UNSUPPORTED_EXPERTS if arguments.get(name)]
    frequency = arguments.get("moe_layer_freq", 1)
    if frequency != 1 and not (isinstance(frequency, list) and all(each == 1 for each in frequency)):
        unsupported.append(f"moe_layer_freq {frequency}")
    balancing = arguments.get("moe_router_load_balancing_type")
    if balancing == "sinkhorn" or (isinstance(balancing, list) and "sinkhorn" in balancing):
        unsupported.append("moe_router_load_balancing_type sinkhorn")
    groups, chosen = arguments.get("moe_router_num_groups"), arguments.get("moe_router_group_topk")
    best = 2 if arguments.get("moe_router_score_function") == "sigmoid" else 1
    if chosen and chosen != groups and arguments.get("moe_router_topk", 2) // chosen != best:
        unsupported.append(f"moe_router_group_topk {chosen} (it must be moe_router_topk / {best})")
    return unsupported


def notes_of_arguments(saved: Any, origin: Path, kind: Literal["gpt", "bert"]) -> tuple[str, ...]:
    """Return lines about arguments that the model follows only in part. saved: the content of the file `origin`."""
    arguments, notes = arguments_in(saved, origin), []
    if kind == "bert" and _activation(arguments) == "gelu_tanh":
        notes.append(
            f"{origin}: Megatron-LM's head for hidden tokens has the exact GELU and its layers the approximation; "
            "here both have the approximation, so that logits differ by about 1e-3"
        )
    coefficient = arguments.get("moe_aux_loss_coeff")
    if arguments.get("num_experts") and any(coefficient if isinstance(coefficient, list) else [coefficient]):
        notes.append(
            f"{origin}: moe_aux_loss_coeff {coefficient} is not part of the model; megapipe balances experts by "
            "model.expert_balance_rate"
        )
    return tuple(notes)


def _activation(arguments: Mapping[str, Any]) -> str:
    biased = arguments.get("add_bias_linear", True)
    gelu = "gelu_tanh" if arguments.get("bias_gelu_fusion") and biased else "gelu"  # that of the fused kernel
    return next((ours for theirs, ours in _ACTIVATIONS.items() if arguments.get(theirs)), gelu)


def _fields(arguments: Mapping[str, Any], kind: Literal["gpt", "bert"] = "gpt") -> dict[str, Any]:
    padded, vocabulary = arguments["padded_vocab_size"], arguments.get("vocab_size")
    heads = arguments["num_attention_heads"]
    grouped = arguments.get("group_query_attention")
    bias = "all" if arguments.get("add_bias_linear", True) else "qkv" if arguments.get("add_qkv_bias") else "none"
    norm = known_word(_NORMALIZATIONS, arguments.get("normalization", "LayerNorm"))
    offset = "_unit_offset" if any(map(arguments.get, _UNIT_OFFSET)) else ""
    positions = arguments.get("position_embedding_type", "learned_absolute")
    experts = arguments.get("num_experts") if kind == "gpt" else None
    width = arguments.get("moe_ffn_hidden_size") if experts else None
    fields = {
        "vocabulary_size": vocabulary if isinstance(vocabulary, int) and 0 < vocabulary <= padded else padded,
        "num_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": arguments["num_query_groups"] if grouped else heads,
        "head_size": arguments.get("kv_channels"),
        "ffn_hidden_size": width or arguments["ffn_hidden_size"],
        "max_positions": arguments["max_position_embeddings"],
        "normalization": norm + offset,
        "norm_epsilon": arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5)),
        "activation": _activation(arguments),
        "positions": known_word(_POSITIONS, positions),
        "rotary_fraction": float(arguments.get("rotary_percent", 1.0)) if positions == "rope" else 1.0,
        "rope_theta": float(arguments.get("rotary_base", 10000)),
        "rope_scaling": _rope_scaling(arguments) if positions == "rope" else {},
        "bias": bias,
        "qk_norm": bool(arguments.get("qk_layernorm")),
        "sliding_window": arguments["window_size"][0] + 1 if arguments.get("window_size") else None,
        "tie_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
    }
    if kind == "bert":
        pairs = bool(arguments.get("bert_binary_head", True))
        return {**fields, "norm_position": "pre", "token_types": 2 if pairs else 0, "sentence_head": pairs}
    return {**fields, **_expert_fields(arguments, bias)} if experts else fields


def _expert_fields(arguments: Mapping[str, Any], bias: str) -> dict[str, Any]:
    topk, scores = arguments.get("moe_router_topk", 2), arguments.get("moe_router_score_function", "softmax")
    groups, chosen = arguments.get("moe_router_num_groups"), arguments.get("moe_router_group_topk")
    shared, balances = arguments.get("moe_shared_expert_intermediate_size"), "moe_router_enable_expert_bias"
    normalizes = topk > 1 if scores == "sigmoid" else not arguments.get("moe_router_pre_softmax")
    return {
        "num_experts": arguments["num_experts"],
        "experts_per_token": topk,
        "normalize_expert_shares": normalizes,
        "router_scores": scores,
        "router_scale": float(arguments.get("moe_router_topk_scaling_factor") or 1.0),
        "router_bias": bias == "all",
        "router_groups": groups if groups and chosen else 1,
        "router_groups_chosen": chosen if groups and chosen else 1,
        "expert_balance_rate": float(arguments.get("moe_router_bias_update_rate", 1e-3))
        if arguments.get(balances)
        else 0.0,
        "shared_expert_size": shared,
        "shared_expert_gate": bool(shared and arguments.get("moe_shared_expert_gate")),
    }


def _rope_scaling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if arguments.get("use_rope_scaling"):
        return {"kind": "llama3", "factor": float(arguments.get("rope_scaling_factor", 8.0)), **_LLAMA3}
    if arguments.get("rotary_seq_len_interpolation_factor"):
        return {"kind": "linear", "factor": float(arguments["rotary_seq_len_interpolation_factor"])}
    return {}


def check_expressible(model: ModelConfig) -> None:
    """Raise CheckpointError for values of fields that Megatron-LM's arguments cannot express."""
    plain = model.head_dim**-0.5
    for field, value, possible in (
        ("kv_latent_size", model.kv_latent_size, (None,)),
        ("bias", model.bias, ("all", "qkv", "none")),
        ("rope_scaling.kind", model.rope_scaling.kind, ("none", "linear", "llama3")),
        ("attention_scale", model.attention_scale, (None, plain)),
        ("attention_softcap", model.attention_softcap, (None,)),
        ("attention_sinks", model.attention_sinks, (False,)),
        ("mtp_layers", model.mtp_layers, (0,)),
        ("attention_chunk_size", model.attention_chunk_size, (None,)),
        ("positions", model.positions, ("learned", "rotary", "none")),
        ("qk_norm_over", model.qk_norm_over, ("head",)),
        ("activation", model.activation, ("gelu", *_ACTIVATIONS.values())),
        ("normalization", model.normalization, ("layer_norm", "rms_norm", "rms_norm_unit_offset")),
        ("norm_position", model.norm_position, ("pre",)),
        ("attention_norm", model.attention_norm, (True,)),
        ("parallel_residual", model.parallel_residual, (False,)),
        ("embedding_norm", model.embedding_norm, (None, False)),
        ("embedding_scale", model.embedding_scale, (1.0,)),
        ("residual_scale", model.residual_scale, (1.0,)),
        ("logit_scale", model.logit_scale, (1.0,)),
        ("logit_softcap", model.logit_softcap, (None,)),
        *_of_bert(model),
        *_of_experts(model),
    ):
        if value not in possible:
            words = " or ".join("null" if each is None else str(each) for each in possible)
            raise CheckpointError(
                f"model.{field} is {value}; Megatron-LM's arguments can express only {words}: write a Hugging Face "
                "folder instead (--to hf)"
            )


def _of_bert(model: ModelConfig) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Return (field, value, values that Megatron-LM's BERT can have)."""
    if not isinstance(model, BertModelConfig):
        return []
    return [
        ("activation", model.activation, ("gelu", "swiglu", "relu_squared")),  # its head has the exact GELU
        ("transform_activation", model.transform_activation, (None, "gelu")),
        ("normalization", model.normalization, ("layer_norm",)),
        ("positions", model.positions, ("learned",)),
        ("first_position", model.first_position, (0,)),
        ("qk_norm", model.qk_norm, (False,)),
        ("sliding_window", model.sliding_window, (None,)),
        ("transform_bias", model.transform_bias, (True,)),
        ("token_types", model.token_types, (2 if model.sentence_head else 0,)),
    ]


def _of_experts(model: ModelConfig) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Return (field, value, values that Megatron-LM's experts can have)."""
    if model.num_experts is None:
        return []
    sigmoid, chosen = model.router_scores == "sigmoid", model.router_groups_chosen
    fields: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("router_bias", model.router_bias, (model.bias == "all",)),
    ]
    if sigmoid:  # they are normalized if there are several
        fields.append(("normalize_expert_shares", model.normalize_expert_shares, (model.experts_per_token > 1,)))
    else:
        fields.append(("expert_balance_rate", model.expert_balance_rate if model.balances_experts else 0.0, (0.0,)))
    if model.bias == "all":
        fields.append(("shared_expert_size", model.shared_expert_size, (None,)))
    if chosen < model.router_groups:
        best = range(model.best_of_group * chosen, (model.best_of_group + 1) * chosen)
        fields.append(("experts_per_token", model.experts_per_token, tuple(best)))
    return fields


def _arguments_of_experts(model: ModelConfig, tensor: int, grouped: bool) -> dict[str, Any]:
    if model.num_experts is None:
        return {"num_experts": None}
    limited = model.router_groups_chosen < model.router_groups
    return {
        "num_experts": model.num_experts,
        "moe_ffn_hidden_size": model.ffn_size,
        "moe_layer_freq": 1,
        "moe_grouped_gemm": grouped,
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": not model.normalize_expert_shares and model.router_scores == "softmax",
        "moe_router_score_function": model.router_scores,
        "moe_router_topk_scaling_factor": None if model.router_scale == 1 else model.router_scale,
        "moe_router_num_groups": model.router_groups if limited else None,
        "moe_router_group_topk": model.router_groups_chosen if limited else None,
        "moe_router_enable_expert_bias": model.balances_experts,
        "moe_router_bias_update_rate": model.expert_balance_rate,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": model.shared_expert_size,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": tensor,
    }


def arguments_of(
    contents: Contents, tensor: int, pipeline: int, chunks: int, dtype: torch.dtype, grouped: bool = False
) -> Namespace:
    """Return the arguments that Megatron-LM compares with its command line, or uses with --use-checkpoint-args.

    grouped: the experts have the names of Transformer Engine's grouped layers.
    Raises CheckpointError for a model that Megatron-LM's arguments cannot express.
    """
    model = contents.model
    scaling = model.rope_scaling
    if scaling.kind == "llama3" and any(getattr(scaling, name) != value for name, value in _LLAMA3.items()):
        raise CheckpointError(f"Megatron-LM's --use-rope-scaling always has {_LLAMA3}; this model has other values")
    if model.qk_norm and model.normalization == "layer_norm":
        raise CheckpointError(
            f"model.qk_norm with model.normalization {model.normalization} cannot be converted: Megatron-LM has one "
            "kind of norm in a model; only rms norms can be converted with model.qk_norm"
        )
    check_expressible(model)
    run = contents.run
    reverse = {ours: theirs for theirs, ours in (_NORMALIZATIONS | _POSITIONS).items()}
    return Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.num_heads,
        group_query_attention=model.kv_heads != model.num_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        seq_length=model.max_positions,
        max_position_embeddings=model.max_positions,
        position_embedding_type=reverse[model.positions],
        add_position_embedding=model.positions == "learned",
        use_rotary_position_embeddings=model.positions == "rotary",
        rotary_base=int(model.rope_theta) if model.rope_theta.is_integer() else model.rope_theta,
        rotary_percent=model.rotary_fraction,
        rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=scaling.factor if scaling.kind == "linear" else None,
        use_rope_scaling=scaling.kind == "llama3",
        rope_scaling_factor=scaling.factor if scaling.kind == "llama3" else 8.0,
        normalization=reverse[model.normalization.removesuffix("_unit_offset")],
        norm_epsilon=model.norm_epsilon,
        apply_layernorm_1p=model.normalization == "rms_norm_unit_offset",
        **{theirs: model.activation == ours for theirs, ours in _ACTIVATIONS.items()},
        bias_gelu_fusion=False,
        add_bias_linear=model.bias == "all",
        add_qkv_bias=model.bias != "none",
        qk_layernorm=model.qk_norm,
        window_size=None if model.sliding_window is None else (model.sliding_window - 1, 0),
        untie_embeddings_and_output_weights=not model.tie_embeddings,
        vocab_size=model.vocabulary_size,
        padded_vocab_size=padded_rows(model, tensor),
        make_vocab_size_divisible_by=VOCABULARY_DIVISOR,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        **_arguments_of_experts(model, tensor, grouped),
        **({"bert_binary_head": model.sentence_head} if isinstance(model, BertModelConfig) else {}),
        params_dtype=dtype,
        iteration=0 if run is None else run.step,
        consumed_train_samples=0 if run is None else run.consumed_samples,
        consumed_valid_samples=0,
    )
