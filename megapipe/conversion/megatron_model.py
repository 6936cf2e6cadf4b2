"""Megatron-LM's names of our parameters and configuration fields (megatron-core's GPTModel, both layer specs).

Its matrices are ours with merged leading axes. The rows of linear_qkv are grouped by kv group: query heads, key and
value of each group. The rows of a gated linear_fc1 are, for each tensor rank, the rows of the gate and then the rows
of the other half.
"""

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.directory import FreshFolder
from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest import RunState
from megapipe.checkpoint.storage import on_failure
from megapipe.config.model import ModelConfig
from megapipe.conversion.formats import RELEASE, TRACKER, Contents
from megapipe.conversion.megapipe_format import model_of, parameters_of
from megapipe.conversion.sandbox import InertObject
from megapipe.spec.family import FamilyError, known_word
from megapipe.spec.layers import tensor_problems
from megapipe.spec.parameters import ParameterSpec

VOCABULARY_DIVISOR = 128
"""By default, Megatron-LM rounds the vocabulary up to a multiple of this on each tensor rank."""
_OUTER = {
    "embedding.word.weight": "embedding.word_embeddings.weight",
    "embedding.position.weight": "embedding.position_embeddings.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "head.norm.bias": "decoder.final_layernorm.bias",
    "head.output.weight": "output_layer.weight",
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
}
FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of norms that Transformer Engine fuses into the next layer; torch_dist always uses them."""
LINEAR_LAYERS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer that have an `_extra_state`, which is None without FP8."""
_UNSUPPORTED = (
    "num_experts",
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
_NORMALIZATIONS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
_UNIT_OFFSET = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
_ACTIVATIONS = {"swiglu": "swiglu", "squared_relu": "relu_squared", "openai_gelu": "gelu_tanh"}
"""Activation by the argument that selects it; without one of them it is the exact GELU."""
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
_LLAMA3 = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}
"""Constants of Megatron-LM's --use-rope-scaling."""


@dataclass(frozen=True)
class ParameterLocation:
    """Location of a parameter. key: its name in the layer or model. layer: index from 0; None outside of layers."""

    spec: ParameterSpec
    key: str
    layer: int | None

    @property
    def fused_key(self) -> str:
        """The key with Transformer Engine's layers."""
        for plain, fused in FUSED_NORMS.items():
            if self.layer is not None and self.key.startswith(plain):
                return fused + self.key.removeprefix(plain)
        return self.key


def places(model: ModelConfig) -> dict[str, ParameterLocation]:
    """Return each parameter's location. Raises CheckpointError for a model that Megatron-LM's GPT cannot express."""
    if model.kind != "gpt":
        raise CheckpointError("only GPT models can be converted to and from Megatron-LM; this checkpoint is a BERT")
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
    if model.num_experts is not None:
        raise CheckpointError(
            f"model.num_experts is {model.num_experts}; only dense models can be converted to and from "
            "Megatron-LM: write a Hugging Face folder instead (--to hf)"
        )
    return {name: _place(spec) for name, spec in parameters_of(model).items()}


def _place(spec: ParameterSpec) -> ParameterLocation:
    if spec.name in _OUTER:
        return ParameterLocation(spec, _OUTER[spec.name], None)
    layer, _, path = spec.name.removeprefix("blocks.").partition(".")
    stem = next(ours for ours in _BLOCK if path.startswith(ours))
    return ParameterLocation(spec, _BLOCK[stem] + path.removeprefix(stem), int(layer))


def merged(spec: ParameterSpec, shard: Tensor) -> Tensor:
    """Reshape our shard to the one or two dimensions that it has in Megatron-LM."""
    return shard.flatten() if spec.name.endswith(".bias") or shard.ndim == 1 else shard.flatten(0, -2)


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


def check_tensor_size(model: ModelConfig, tensor_size: int) -> None:
    """Raise CheckpointError if the matrices cannot be divided over this number of tensor ranks."""
    problems = tensor_problems(model, tensor_size)
    if problems:
        raise CheckpointError("; ".join(problems))


def model_of_arguments(saved: Any, origin: Path) -> ModelConfig:
    """Return the model that Megatron-LM's arguments describe. saved: the content of the file `origin`.

    Raises CheckpointError for missing arguments, and for a model that the model configuration cannot express.
    """
    described = saved.get("args") if isinstance(saved, dict) else None
    if not isinstance(described, InertObject) or not isinstance(described.state, dict):
        raise CheckpointError(f"{origin} contains no args, which describe the model")
    arguments = described.state
    unsupported = [name for name in _UNSUPPORTED if arguments.get(name)]
    if arguments.get("normalization") != "RMSNorm":
        unsupported += [f"{name} without RMSNorm" for name in _UNIT_OFFSET if arguments.get(name)]
    if arguments.get("qk_layernorm") and arguments.get("normalization") != "RMSNorm":
        unsupported.append("qk_layernorm without RMSNorm")
    if unsupported:
        raise CheckpointError(
            f"{origin}: {', '.join(unsupported)} is set, which the model configuration cannot express"
        )
    try:
        return model_of(_fields(arguments))
    except FamilyError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{origin}: its arguments do not describe a model: {error!r}") from error


def _fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    padded, vocabulary = arguments["padded_vocab_size"], arguments.get("vocab_size")
    heads = arguments["num_attention_heads"]
    grouped = arguments.get("group_query_attention")
    bias = "all" if arguments.get("add_bias_linear", True) else "qkv" if arguments.get("add_qkv_bias") else "none"
    fused_gelu = arguments.get("bias_gelu_fusion") and bias == "all"  # the fused kernel computes the approximation
    gelu = "gelu_tanh" if fused_gelu else "gelu"
    activation = next((ours for theirs, ours in _ACTIVATIONS.items() if arguments.get(theirs)), gelu)
    norm = known_word(_NORMALIZATIONS, arguments.get("normalization", "LayerNorm"))
    offset = "_unit_offset" if any(map(arguments.get, _UNIT_OFFSET)) else ""
    positions = arguments.get("position_embedding_type", "learned_absolute")
    return {
        "vocabulary_size": vocabulary if isinstance(vocabulary, int) and 0 < vocabulary <= padded else padded,
        "num_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": arguments["num_query_groups"] if grouped else heads,
        "head_size": arguments.get("kv_channels"),
        "ffn_hidden_size": arguments["ffn_hidden_size"],
        "max_positions": arguments["max_position_embeddings"],
        "normalization": norm + offset,
        "norm_epsilon": arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5)),
        "activation": activation,
        "positions": known_word(_POSITIONS, positions),
        "rotary_fraction": float(arguments.get("rotary_percent", 1.0)) if positions == "rope" else 1.0,
        "rope_theta": float(arguments.get("rotary_base", 10000)),
        "rope_scaling": _rope_scaling(arguments),
        "bias": bias,
        "qk_norm": bool(arguments.get("qk_layernorm")),
        "sliding_window": arguments["window_size"][0] + 1 if arguments.get("window_size") else None,
        "tie_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
    }


def _rope_scaling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if arguments.get("use_rope_scaling"):
        return {"kind": "llama3", "factor": float(arguments.get("rope_scaling_factor", 8.0)), **_LLAMA3}
    if arguments.get("rotary_seq_len_interpolation_factor"):
        return {"kind": "linear", "factor": float(arguments["rotary_seq_len_interpolation_factor"])}
    return {}


def _check_expressible(model: ModelConfig) -> None:
    """Raise CheckpointError for values of fields that Megatron-LM's arguments cannot express."""
    plain = model.head_dim**-0.5
    for field, value, possible in (
        ("kv_latent_size", model.kv_latent_size, (None,)),
        ("bias", model.bias, ("all", "qkv", "none")),
        ("rope_scaling.kind", model.rope_scaling.kind, ("none", "linear", "llama3")),
        ("attention_scale", model.attention_scale, (None, plain)),
        ("attention_softcap", model.attention_softcap, (None,)),
        ("attention_sinks", model.attention_sinks, (False,)),
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
    ):
        if value not in possible:
            words = " or ".join("null" if each is None else str(each) for each in possible)
            raise CheckpointError(
                f"model.{field} is {value}; Megatron-LM's arguments can express only {words}: write a Hugging Face "
                "folder instead (--to hf)"
            )


def arguments_of(contents: Contents, tensor: int, pipeline: int, chunks: int, dtype: torch.dtype) -> Namespace:
    """Return the arguments that Megatron-LM compares with its command line, or uses with --use-checkpoint-args.

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
    _check_expressible(model)
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
        num_experts=None,
        params_dtype=dtype,
        iteration=0 if run is None else run.step,
        consumed_train_samples=0 if run is None else run.consumed_samples,
        consumed_valid_samples=0,
    )
