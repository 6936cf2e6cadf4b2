"""Random transformers models of every family, and the same models as megapipe reads them from a folder."""

import copy
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megapipe.checkpoint.hugging_face import correspondences
from megapipe.config.model import ModelConfig
from megapipe.conversion.hugging_face import HuggingFaceSource
from megapipe.spec.family import family_of
from tests.layers.bound import BoundLayer, all_gradients


@dataclass
class Case:
    """A family and a transformers model with weights of std 0.2."""

    family: str
    theirs: nn.Module

    @cached_property
    def model(self) -> ModelConfig:
        """The configuration that megapipe reads."""
        return opened(self.theirs)[0]


def opened(theirs: nn.Module) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return configuration and weights as megapipe reads them from the folder that transformers writes."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        source = HuggingFaceSource(Path(folder))
        return source.contents.model, {each.name: source.read(each) for each in source.contents.tensors}


def gradients_of(theirs: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a transformers model by our names, through its folder as weights are."""
    graded = copy.deepcopy(theirs)
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None or not parameter.requires_grad, name
        if parameter.grad is not None:
            graded.get_parameter(name).data = parameter.grad
    return opened(graded)[1]


def loss_of(logits: Tensor, context: Any) -> Tensor:
    """Return the loss sum of logits by torch."""
    losses = cross_entropy(logits.flatten(0, 1), context.labels.flatten(), reduction="none")
    return (losses * context.loss_mask.flatten()).sum()


def check_gradients(theirs: nn.Module, layers: list[BoundLayer], tolerance: float) -> None:
    """Compare each gradient by its norm, which is not zero. A router's bias has none."""
    wanted, ours = gradients_of(theirs), all_gradients(layers)
    trained = {name for name in ours if not name.endswith("router.bias")}
    assert trained == {name for name in wanted if not name.endswith("router.bias")}
    for name in trained:
        assert wanted[name].norm() > 0, name
        assert (ours[name] - wanted[name]).norm() <= tolerance * wanted[name].norm(), name


def canonical(theirs: Mapping[str, Tensor], model: ModelConfig, family: str) -> dict[str, Tensor]:
    """Return our tensors by name, from transformers' state dict."""
    pairs = correspondences(model, family_of(family))
    return {pair.spec.name: pair.join([theirs[name] for name in pair.names]) for pair in pairs}


def exported(ours: Mapping[str, Tensor], model: ModelConfig, family: str) -> dict[str, Tensor]:
    """Return transformers' state dict from our tensors by name."""
    pairs = correspondences(model, family_of(family))
    return {
        name: part for pair in pairs for name, part in zip(pair.names, pair.split(ours[pair.spec.name]), strict=True)
    }


def drawn(theirs: nn.Module) -> nn.Module:
    """Matrices with std 0.2, so that logits are of order 1 (at 0.02 nearly any model would agree); norms around 1."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
        if name.endswith("weight") and parameter.dim() == 1:
            parameter.data.add_(1.0)
    for name, buffer in theirs.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(0.0, 0.2, generator=generator)
    return theirs.eval()


def tame(theirs: nn.Module) -> None:
    """Halve the matrices of a drawn model, and bring factors of norms near 1. Large attention scores enlarge rounding,
    from layer to layer and from step to step."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
            elif "Gemma" in type(theirs).__name__:
                parameter.sub_(1.0)  # its norms multiply by 1 + weight


SIZES = {
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # transformers would not train its embedding
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
LAST_WINDOWS = {"use_sliding_window": True, "sliding_window": 7}
GEMMA2 = {"query_pre_attn_scalar": 144, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}
GEMMA3 = {"query_pre_attn_scalar": 24, "num_hidden_layers": 4, "sliding_window_pattern": 3}
DEEPSEEK = {
    **SIZES,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "experts_implementation": "eager",
}
GPT2 = {"vocab_size": 97, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64}
TWO_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
QWEN_MOE = {**GROUPED, **TWO_EXPERTS, "num_experts": 4, "moe_intermediate_size": 48}
ERNIE = {**GROUPED, "moe_intermediate_size": 48, "moe_num_experts": 4, "moe_k": 2, "experts_implementation": "eager"}
UNSHARED = {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    # All three bands of wavelengths.
    "llama": ("Llama", {**GROUPED, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    # One key and value head for all.
    "llama_linear": ("Llama", {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True, **LINEAR}),
    # A window shorter than the sequence, heads wider than hidden / heads.
    "mistral": ("Mistral", {**GROUPED, "head_dim": 32, "sliding_window": 7, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {**GROUPED, **TWO_EXPERTS, "num_local_experts": 4, "head_dim": 16}),
    "llama_with_biases": ("Llama", {**GROUPED, "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    # Windows in the last layer alone.
    "qwen2_windows": ("Qwen2", {**GROUPED, **LAST_WINDOWS, "max_window_layers": 1, "num_hidden_layers": 3}),
    "qwen3_biases": ("Qwen3", {**GROUPED, "head_dim": 32, "attention_bias": True}),
    # Layer norms, biases, a window.
    "starcoder2": ("Starcoder2", {**GROUPED, "sliding_window": 7}),
    # One matrix for query, key and value, and one for gate and up.
    "phi3": ("Phi3", {**GROUPED, "original_max_position_embeddings": 64, "sliding_window": 7}),
    "phi3_long": ("Phi3", {**GROUPED, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "gpt_neox": ("GPTNeoX", {**SIZES, "hidden_act": "gelu"}),
    "gpt_neox_serial": ("GPTNeoX", {**SIZES, "use_parallel_residual": False, "attention_bias": False}),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 32}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 16, "sliding_window": 7, "num_hidden_layers": 3, **GEMMA2}),
    "gemma3": ("Gemma3Text", {**GROUPED, "head_dim": 16, "sliding_window": 7, **GEMMA3}),
    "olmo2": ("Olmo2", GROUPED),
    "smollm3": ("SmolLM3", {**GROUPED, "num_hidden_layers": 4, "no_rope_layer_interval": 3}),
    "qwen2_moe": ("Qwen2Moe", {**QWEN_MOE, "shared_expert_intermediate_size": 80}),
    # A layer without experts between others.
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {**QWEN_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3_moe": ("Qwen3Moe", QWEN_MOE),
    "bloom": ("Bloom", {"vocab_size": 97, "n_layer": 2, "hidden_size": 64, "n_head": 4, "pad_token_id": None}),
    "gpt_oss": (
        "GptOss",
        {
            **GROUPED,
            **TWO_EXPERTS,
            "intermediate_size": 64,  # as wide as the hidden states, as in the published models
            "num_local_experts": 4,
            "head_dim": 32,
            "sliding_window": 7,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    # Experts chosen with biases, heads wider than hidden / heads.
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**ERNIE, "head_dim": 32, **UNSHARED, "tie_word_embeddings": True},
    ),
    # Shared experts, and a layer without experts.
    "ernie4_5_moe_shared": (
        "Ernie4_5_Moe",
        {**ERNIE, "num_hidden_layers": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    ),
    # Queries without a latent.
    "deepseek_v2": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**DEEPSEEK, "num_key_value_heads": 4, "q_lora_rank": 40, "attention_bias": True, "num_mtp_layers": 0},
    ),
}
"""Name of a case -> prefix of transformers' classes, and its configuration."""
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SAFE = {"attn_implementation": "sdpa"}
"""In fp64, the eager softmax of padding that sees nothing is NaN."""
MODERN_BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta": ("Roberta", {**SIZES, **UNDROPPED, "pad_token_id": 1, "type_vocab_size": 1}),
    # A window shorter than the sequence, with other angles, and a first layer without a norm.
    "modernbert": ("ModernBert", {**SIZES, **SAFE, "num_hidden_layers": 5, "local_attention": 8}),
    "modernbert_with_biases": ("ModernBert", {**SIZES, **SAFE, **MODERN_BIASES, **TWO_KINDS, "local_attention": 12}),
    # Another row for the first token, and a table of two types.
    "xlm_roberta": ("XLMRoberta", {**SIZES, **UNDROPPED, "pad_token_id": 3}),
    "albert": ("Albert", {**SIZES, **UNDROPPED, "num_hidden_layers": 3, "embedding_size": 24}),
}
"""The same for encoders with one head."""


FIRST = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen2_moe")
"""Cases that represent the others in tests that take longer than a comparison of logits."""


def most_exhaustive(names: Iterable[str]) -> list[Any]:
    """Return test parameters: those of `FIRST`, and the others for the exhaustive tier."""
    return [name if name in FIRST else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


def case_of(name: str) -> Case:
    """Return a case by its name."""
    prefix, fields = (CONFIGS | ENCODERS)[name]
    return case_of_config(getattr(transformers, f"{prefix}Config")(**{"attn_implementation": "eager", **fields}))


def case_of_config(config: transformers.PreTrainedConfig) -> Case:
    """Return a case with a configuration of transformers."""
    return Case(config.model_type, drawn(model_class(config)(config)))


def model_class(config: transformers.PreTrainedConfig) -> Any:
    """Return transformers' class with the head that we train."""
    prefix = type(config).__name__.removesuffix("Config")
    names = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
    head = "ForMaskedLM" if family_of(config.model_type).kind == "bert" else "ForCausalLM"
    return getattr(transformers, names.get(prefix, prefix + head))
