"""GPT-NeoX and Pythia (Black et al. 2022, arXiv 2204.06745): parallel residuals, a part of each head rotates."""

from collections.abc import Mapping
from typing import Any

from megapipe.spec.decoder_family import SIZES, TIED, UNGATED, Fields, described_rope, rope_scaling, stretched
from megapipe.spec.family import Family, keys

_LAYER = "gpt_neox.layers.{layer}"


def _rotary(config: Mapping[str, Any]) -> Fields:
    theta, fraction = config["rotary_emb_base"], config["rotary_pct"]
    usual = {"rope_theta": theta, "partial_rotary_factor": fraction}
    return stretched({**usual, **described_rope(config)}, config)


Family(
    model_type="gpt_neox",
    kind="gpt",
    fields={
        **SIZES,
        "intermediate_size": "ffn_hidden_size",
        "layer_norm_eps": "norm_epsilon",
        "max_position_embeddings": "max_positions",
        "use_parallel_residual": "parallel_residual",
        **TIED,
    },
    activation="hidden_act",
    words=UNGATED,
    needs={"normalization": "layer_norm", "positions": "rotary"},
    reads=keys("attention_bias rotary_pct rotary_emb_base rope_parameters rope_scaling"),
    more=(_rotary, lambda config: {"bias": "all" if config["attention_bias"] else "mlp"}),
    writes={
        "architectures": ["GPTNeoXForCausalLM"],
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "rotary_fraction",
        "rope_scaling": rope_scaling,
        "attention_bias": lambda model: model.has_bias("attention.output"),
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "initializer_range": "init_std",
    },
    ignored=keys("is_decoder"),
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000.0,
    },
    tensors={
        "embedding.word": "gpt_neox.embed_in",
        "blocks.attention_norm": f"{_LAYER}.input_layernorm",
        "blocks.attention.qkv": f"{_LAYER}.attention.query_key_value",
        "blocks.attention.output": f"{_LAYER}.attention.dense",
        "blocks.mlp_norm": f"{_LAYER}.post_attention_layernorm",
        "blocks.mlp.up": f"{_LAYER}.mlp.dense_h_to_4h",
        "blocks.mlp.down": f"{_LAYER}.mlp.dense_4h_to_h",
        "head.norm": "gpt_neox.final_layer_norm",
        "head.output": "embed_out",
    },
    body="gpt_neox.",
    heads=("embed_out.",),
    buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)
