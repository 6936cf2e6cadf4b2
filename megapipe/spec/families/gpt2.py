"""GPT-2 (Radford et al. 2019). Its matrices have their input on axis 0."""

from collections.abc import Mapping
from typing import Any

from megapipe.spec.decoder_family import TIED, UNGATED, Fields, blocks, layer_fields
from megapipe.spec.family import Family, Step, Tensors, keys

_BLOCK = "transformer.h.{layer}"


def _matrix(name: str, *steps: Step) -> Tensors:
    return Tensors((f"{_BLOCK}.{name}",), ("transposed", *steps))


def _scales(config: Mapping[str, Any]) -> Fields:
    """Return the scale of scores: the usual one or 1, which each block may divide by its number, counted from 1."""
    first = (config["n_embd"] // config["n_head"]) ** -0.5 if config["scale_attn_weights"] else 1.0
    numbers = range(1, config["n_layer"] + 1) if config["scale_attn_by_inverse_layer_idx"] else (1,)
    scales = {f"divided_by_{each}": {"attention_scale": first / each} for each in numbers}
    return layer_fields(list(scales), scales)


Family(
    model_type="gpt2",
    kind="gpt",
    fields={
        "vocab_size": "vocabulary_size",
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_heads",
        "n_positions": "max_positions",
        "n_inner": "ffn_hidden_size",
        "layer_norm_epsilon": "norm_epsilon",
        **TIED,
    },
    activation="activation_function",
    words=UNGATED,
    needs={"normalization": "layer_norm", "positions": "learned", "bias": "all"},
    reads=keys("scale_attn_weights scale_attn_by_inverse_layer_idx"),
    more=(lambda config: {"ffn_hidden_size": config["n_inner"] or 4 * config["n_embd"]}, _scales),
    writes={
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": "max_positions",
        "scale_attn_weights": lambda model: blocks(model)[0].score_scale != 1.0,
        "scale_attn_by_inverse_layer_idx": lambda model: len({each.score_scale for each in blocks(model)}) > 1,
        "embd_pdrop": "embedding_dropout",
        "attn_pdrop": "attention_dropout",
        "resid_pdrop": "hidden_dropout",
        "initializer_range": "init_std",
    },
    ignored=keys(
        "summary_type summary_use_proj summary_activation summary_proj_to_labels "
        "summary_first_dropout reorder_and_upcast_attn is_decoder output_past "
        "predict_special_tokens"
    ),
    defaults={
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    tensors={
        "embedding.word": "transformer.wte",
        "embedding.position": "transformer.wpe",
        "blocks.attention_norm": f"{_BLOCK}.ln_1",
        "blocks.attention.qkv": _matrix("attn.c_attn", "query_key_value"),
        "blocks.attention.output": _matrix("attn.c_proj"),
        "blocks.mlp_norm": f"{_BLOCK}.ln_2",
        "blocks.mlp.up": _matrix("mlp.c_fc"),
        "blocks.mlp.down": _matrix("mlp.c_proj"),
        "head.norm": "transformer.ln_f",
        "head.output": "lm_head",
    },
    body="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)
