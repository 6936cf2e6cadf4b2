"""Random checkpoints of every shape that Megatron-LM's GPT and BERT can have, and a way there and back."""

import math
from pathlib import Path

import torch
from torch import Tensor

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeScaling
from megapipe.conversion.formats import FORMATS, WEIGHTS, Contents, Source, StoredTensor, TargetOptions
from megapipe.conversion.megapipe_format import parameters_of

SIZES = {"vocabulary_size": 97, "num_layers": 4, "hidden_size": 32, "num_heads": 4, "max_positions": 48}
DECODER = {"normalization": "rms_norm", "activation": "swiglu", "positions": "rotary", "ffn_hidden_size": 48}
OTHERS = (
    "norm_epsilon", "rope_theta", "rope_scaling", "bias", "qk_norm", "sliding_window", "tie_embeddings",
    "attention_sinks", "swiglu_limit", "mtp_layers",
)  # fmt: skip
OF_EXPERTS = (
    "num_experts", "experts_per_token", "normalize_expert_shares", "expert_balance_rate", "router_scores",
    "router_bias", "router_scale", "router_groups", "router_groups_chosen", "shared_expert_size", "shared_expert_gate",
)  # fmt: skip
LATENTS = {"kv_latent_size": 12, "head_size": 8, "rotary_head_size": 4, "norm_epsilon": 1e-6, "bias": "none"}
OF_LATENTS = ("kv_latent_size", "query_latent_size", "rotary_head_size", "value_head_size", "attention_scale")
FIRST_DENSE = {
    "layer_kinds": {"dense": {"num_experts": None, "ffn_hidden_size": 40}},
    "layer_pattern": ("dense", "base", "base", "base"),
}
_GROWTH = 0.1 * 0.7 * math.log(4.0) + 1.0
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 12, "beta_fast": 4.0, "beta_slow": 0.5}
GPT_OSS = {
    **DECODER,
    "activation": "swiglu_clamped",
    "swiglu_limit": 1.25,
    "attention_sinks": True,
    "num_kv_heads": 2,
    "tie_embeddings": False,
    "rope_theta": 500.0,
    "rope_scaling": RopeScaling(**{**YARN, "original_length": 40, "beta_fast": 2.0}, truncate=False),
    "layer_kinds": {"local": {"sliding_window": 9}},
}
OF_BERT = ("norm_position", "token_types", "sentence_head")
SIGMOIDS = {"num_experts": 4, "router_scores": "sigmoid", "router_scale": 2.5, "router_groups": 2}
GATED = {"shared_expert_size": 24, "shared_expert_gate": True, "normalize_expert_shares": False}


def gpt(**fields: object) -> ModelConfig:
    return ModelConfig(**{**SIZES, **fields})


def decoder(**fields: object) -> ModelConfig:
    return gpt(**DECODER, **fields)


def bert(**fields: object) -> BertModelConfig:
    return BertModelConfig(**{**SIZES, "norm_position": "pre", **fields})


TWO_KV_HEADS = {"num_kv_heads": 2, "tie_embeddings": False}
FOUR_EXPERTS = {"num_experts": 4, "expert_balance_rate": 0.0}
WITH_QUERIES = {"tie_embeddings": False, "query_latent_size": 20, "value_head_size": 6}
YARN_SCALED = RopeScaling(**YARN, mscale=1.0, mscale_all_dim=0.7)
LATENT_EXPERTS = {**LATENTS, **FIRST_DENSE, **SIGMOIDS, "shared_expert_size": 24}
MODELS = {
    "gpt2": gpt(activation="gelu_tanh"),
    "llama": decoder(**TWO_KV_HEADS, bias="none", rope_theta=500.0),
    "qwen": decoder(num_kv_heads=2, bias="qkv", qk_norm=True, head_size=16),
    "mistral": decoder(bias="none", sliding_window=9, rope_scaling=RopeScaling(kind="linear", factor=2.0)),
    "qwen_moe": decoder(**GATED, **FOUR_EXPERTS, num_kv_heads=2, bias="qkv"),
    "sigmoids": decoder(bias="none", **SIGMOIDS),
    "biased_experts": gpt(num_experts=3, router_bias=True, expert_balance_rate=0.0),
    "latents": decoder(**LATENTS, **WITH_QUERIES),
    "latent_experts": decoder(
        **LATENT_EXPERTS,
        value_head_size=8,
        attention_scale=12**-0.5 * _GROWTH * _GROWTH,
        rope_scaling=YARN_SCALED,
    ),
    "deepseek": decoder(**LATENT_EXPERTS, **WITH_QUERIES, mtp_layers=1),
    "alternating": decoder(
        **FOUR_EXPERTS, bias="none", layer_kinds=FIRST_DENSE["layer_kinds"], layer_pattern=("base", "dense")
    ),
    "gpt_oss": gpt(**GPT_OSS, **FOUR_EXPERTS, layer_pattern=("local", "base"), router_bias=True),
    "sinks": gpt(**GPT_OSS, layer_pattern=("local", "base", "local"), mtp_layers=1, mtp_loss_weight=0.3),
    "llama_mtp": decoder(num_kv_heads=2, bias="qkv", qk_norm=True, rope_scaling=YARN_SCALED, mtp_layers=2),
    "bert": bert(),
    "bert_alone": bert(
        **TWO_KV_HEADS, activation="swiglu", ffn_hidden_size=48, bias="none", token_types=0, sentence_head=False
    ),
}


def drawn(model: ModelConfig, dtype: str = "F32", kinds: tuple[str, ...] = (WEIGHTS,)) -> tuple[Contents, dict]:
    """Contents and every tensor's values: matrices with std 0.2, so that logits are of order 1; norms around 1."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for kind in kinds:
        for name, spec in parameters_of(model).items():
            mean = 1.0 if "norm.weight" in name else 0.0
            elements = mean + torch.randn(spec.shape, generator=generator) * 0.2
            values[StoredTensor(name, kind, spec.shape, dtype)] = elements.bfloat16() if dtype == "BF16" else elements
    return Contents(model, tuple(values)), values


def write(kind: str, path: Path, contents: Contents, values: dict[StoredTensor, Tensor], **options: object) -> None:
    """A folder of a format."""
    target = FORMATS[kind].open_target(path, contents, TargetOptions(**options))
    for tensor in contents.tensors:
        target.add(tensor, values[tensor])
    target.finish()


def opened(kind: str, path: Path) -> Source:
    """The folder as a source, pickles allowed."""
    return FORMATS[kind].open_source(path, True)


def assert_holds(source: Source, contents: Contents, values: dict[StoredTensor, Tensor]) -> None:
    """Model, tensors and every bit are those that were written."""
    assert source.contents.model == resolved(contents.model)
    assert set(source.contents.tensors) == set(contents.tensors)
    for tensor in source.contents.tensors:
        read = source.read(tensor)
        assert read.is_contiguous()
        assert torch.equal(read, values[tensor]), tensor.name
        index = tuple(slice(length // 3, length - length // 4) for length in tensor.shape)
        assert torch.equal(source.read(tensor, index), values[tensor][index]), tensor.name
        assert source.verify(tensor) == []


def resolved(model: ModelConfig) -> ModelConfig:
    """The fields that shape weights and logits, optional sizes spelled out, the rest at their defaults."""
    own: tuple[str, ...] = OF_BERT if model.kind == "bert" else () if model.num_experts is None else OF_EXPERTS
    own += OF_LATENTS if model.kv_latent_size else ()
    own += ("mtp_loss_weight",) if model.mtp_layers else ()
    shaped = {name: getattr(model, name) for name in (*SIZES, *DECODER, *OTHERS, *FIRST_DENSE, *own)}
    sizes = {"num_kv_heads": model.kv_heads, "head_size": model.own_head_size, "ffn_hidden_size": model.ffn_size}
    return type(model)(**{**shaped, **sizes})
