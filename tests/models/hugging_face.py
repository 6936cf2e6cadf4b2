"""Random transformers models beside our configuration of the same shape."""

from dataclasses import dataclass

import torch
import transformers
from torch import nn

from megapipe.config.model import ModelConfig, RopeScaling
from megapipe.models.gpt_hugging_face import Family

SIZES = {"vocabulary_size": 97, "num_layers": 2, "hidden_size": 64, "num_heads": 4, "max_positions": 64}
DECODER = {"normalization": "rms_norm", "activation": "swiglu", "positions": "rotary", "ffn_hidden_size": 176}


@dataclass
class Case:
    """A shape: our model configuration, the family, and a transformers model with weights of std 0.2."""

    family: Family
    model: ModelConfig
    theirs: nn.Module


def _drawn(theirs: nn.Module) -> nn.Module:
    """Matrices with std 0.2, so that logits are of order 1 (at 0.02 nearly any model would agree); norms around 1."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
        if name.endswith("weight") and parameter.dim() == 1:
            parameter.data.add_(1.0)
    return theirs.eval()


def _decoder_config(kind: type, **fields: object) -> transformers.PretrainedConfig:
    return kind(
        vocab_size=97,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=4,
        max_position_embeddings=64,
        attn_implementation="eager",
        **fields,
    )


def gpt2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=97,
        n_layer=2,
        n_embd=64,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    model = ModelConfig(**SIZES, activation="gelu_tanh")
    return Case("gpt2", model, _drawn(transformers.GPT2LMHeadModel(config)))


def llama() -> Case:
    """Grouped-query, untied, llama3 stretching with all three bands of wavelengths present."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = _decoder_config(
        transformers.LlamaConfig,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters=rope,
    )
    model = ModelConfig(
        **SIZES,
        **DECODER,
        num_kv_heads=2,
        bias="none",
        tie_embeddings=False,
        rope_theta=500.0,
        rope_scaling=RopeScaling(kind="llama3", factor=4.0, original_length=32),
    )
    return Case("llama", model, _drawn(transformers.LlamaForCausalLM(config)))


def llama_linear() -> Case:
    """One key and value head for all, linear stretching."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    config = _decoder_config(
        transformers.LlamaConfig,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=rope,
    )
    model = ModelConfig(
        **SIZES, **DECODER, num_kv_heads=1, bias="none", rope_scaling=RopeScaling(kind="linear", factor=2.0)
    )
    return Case("llama", model, _drawn(transformers.LlamaForCausalLM(config)))


def mistral() -> Case:
    """A window shorter than the sequence, heads wider than hidden / heads."""
    config = _decoder_config(
        transformers.MistralConfig,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=7,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = ModelConfig(
        **SIZES, **DECODER, num_kv_heads=2, head_size=32, sliding_window=7, bias="none", tie_embeddings=False
    )
    return Case("mistral", model, _drawn(transformers.MistralForCausalLM(config)))


def qwen2() -> Case:
    """Biases on query, key and value alone."""
    config = _decoder_config(
        transformers.Qwen2Config,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = ModelConfig(**SIZES, **DECODER, num_kv_heads=2, bias="qkv", norm_epsilon=1e-6, rope_theta=1e6)
    return Case("qwen2", model, _drawn(transformers.Qwen2ForCausalLM(config)))


def qwen3() -> Case:
    """Queries and keys normalised."""
    config = _decoder_config(
        transformers.Qwen3Config,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = ModelConfig(
        **SIZES,
        **DECODER,
        num_kv_heads=2,
        head_size=16,
        bias="none",
        qk_norm=True,
        norm_epsilon=1e-6,
        rope_theta=1e6,
        tie_embeddings=False,
    )
    return Case("qwen3", model, _drawn(transformers.Qwen3ForCausalLM(config)))


def mixtral() -> Case:
    """Two of four experts for every token. Its state dict stacks experts, which its files have one by one."""
    config = _decoder_config(
        transformers.MixtralConfig,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        experts_implementation="eager",
    )
    model = ModelConfig(
        **SIZES,
        **DECODER,
        num_kv_heads=2,
        bias="none",
        rope_theta=1e6,
        tie_embeddings=False,
        num_experts=4,
        expert_balance_rate=0.0,
    )
    return Case("mixtral", model, _drawn(transformers.MixtralForCausalLM(config)))


def ernie4_5_moe() -> Case:
    """Two of four experts for every token, chosen with biases; heads wider than hidden / heads. Files as Mixtral's."""
    config = _decoder_config(
        transformers.Ernie4_5_MoeConfig,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=48,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        experts_implementation="eager",
    )
    model = ModelConfig(
        **SIZES,
        **{**DECODER, "ffn_hidden_size": 48},
        num_kv_heads=2,
        head_size=32,
        bias="none",
        num_experts=4,
    )
    return Case("ernie4_5_moe", model, _drawn(transformers.Ernie4_5_MoeForCausalLM(config)))


CASES = {case.__name__: case for case in (gpt2, llama, llama_linear, mistral, qwen2, qwen3)}
FOLDERS = {**CASES, "mixtral": mixtral, "ernie4_5_moe": ernie4_5_moe}
"""Also the families whose files are not their state dict."""
