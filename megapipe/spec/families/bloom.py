"""BLOOM (BigScience Workshop 2022, arXiv 2211.05100): ALiBi, and a norm of the embeddings."""

from collections.abc import Mapping
from typing import Any

from megapipe.spec.decoder_family import TIED
from megapipe.spec.family import OMITTED, Family, FamilyError, keys

_BLOCK = "transformer.h.{layer}"
_AFTER_NORM = "apply_residual_connection_post_layernorm"


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of the MLP, which has no key. Raises FamilyError if heads do not divide the hidden states, and
    for slow_but_exact with pretraining_tp above 1, where transformers leaves out biases."""
    hidden, heads = config["hidden_size"], config["n_head"]
    if hidden % heads:
        raise FamilyError(f"hidden_size is {hidden}; it must be a multiple of n_head {heads}")
    if config["slow_but_exact"] and config["pretraining_tp"] != 1:
        raise FamilyError(
            f"slow_but_exact is true with pretraining_tp {config['pretraining_tp']}, where "
            "transformers leaves out biases; set slow_but_exact to false"
        )
    return {"ffn_hidden_size": 4 * hidden, "head_size": hidden // heads}


Family(
    model_type="bloom",
    kind="gpt",
    fields={
        "vocab_size": "vocabulary_size",
        "n_layer": "num_layers",
        "hidden_size": "hidden_size",
        "n_head": "num_heads",
        "layer_norm_epsilon": "norm_epsilon",
        **TIED,
    },
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    # Not a key of BLOOM: its activation is always this one.
    activation="activation_function",
    words={"gelu_tanh": "gelu_tanh"},
    needs={"normalization": "layer_norm", "positions": "alibi", "bias": "all", "embedding_norm": True},
    reads=keys(f"{_AFTER_NORM} slow_but_exact pretraining_tp"),
    more=(_sizes, lambda config: {"norm_position": "stream" if config[_AFTER_NORM] else "pre"}),
    writes={
        "architectures": ["BloomForCausalLM"],
        "activation_function": OMITTED,
        _AFTER_NORM: lambda model: model.norm_position == "stream",
        "seq_length": "max_positions",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "initializer_range": "init_std",
    },
    # The last lines are keys of the published files that transformers does not read.
    ignored=keys(
        "is_decoder "
        "skip_bias_add skip_bias_add_qkv attention_softmax_in_fp32 masked_softmax_fusion "
        "bias_dropout_fusion offset_alibi n_inner unk_token_id"
    ),
    defaults={
        "activation_function": "gelu_tanh",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        _AFTER_NORM: False,
        "slow_but_exact": False,
        "pretraining_tp": 1,
    },
    tensors={
        "embedding.word": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "blocks.attention_norm": f"{_BLOCK}.input_layernorm",
        "blocks.attention.qkv": f"{_BLOCK}.self_attention.query_key_value",
        "blocks.attention.output": f"{_BLOCK}.self_attention.dense",
        "blocks.mlp_norm": f"{_BLOCK}.post_attention_layernorm",
        "blocks.mlp.up": f"{_BLOCK}.mlp.dense_h_to_4h",
        "blocks.mlp.down": f"{_BLOCK}.mlp.dense_4h_to_h",
        "head.norm": "transformer.ln_f",
        "head.output": "lm_head",
    },
    body="transformer.",
)
