"""BERT (Devlin et al. 2018, arXiv 1810.04805), with norms after the residual sums; and Megatron-LM's BERT (Shoeybi et
al. 2019, arXiv 1909.08053, section 5.3), with norms before attention and MLP."""

from typing import Any

from megapipe.spec.decoder_family import GELU, SIZES, TIED
from megapipe.spec.family import Family, Tensors, keys

_LAYER = "bert.encoder.layer.{layer}"
_SENTENCE_HEAD = ("bert.pooler.", "cls.seq_relationship.")
NAMES: dict[str, str | Tensors] = {
    "embedding.word": "bert.embeddings.word_embeddings",
    "embedding.position": "bert.embeddings.position_embeddings",
    "embedding.token_type": "bert.embeddings.token_type_embeddings",
    "embedding.norm": "bert.embeddings.LayerNorm",
    "blocks.attention.qkv": Tensors(
        tuple(f"{_LAYER}.attention.self.{name}" for name in ("query", "key", "value")), ("query_key_value",)
    ),
    "blocks.attention.output": f"{_LAYER}.attention.output.dense",
    "blocks.mlp.up": f"{_LAYER}.intermediate.dense",
    "blocks.mlp.down": f"{_LAYER}.output.dense",
    "head.norm": "bert.encoder.ln",
    "head.transform": "cls.predictions.transform.dense",
    "head.transform_norm": "cls.predictions.transform.LayerNorm",
    "head.output.weight": "cls.predictions.decoder.weight",
    "head.output.bias": "cls.predictions.bias",
    "head.pooler": "bert.pooler.dense",
    "head.sentence": "cls.seq_relationship",
}


def _bert(model_type: str, name: str, norm_position: str, norms: dict[str, str]) -> Family:
    """Register a BERT. name: prefix of transformers' classes. norms: of a block."""

    def architectures(model: Any) -> list[str]:
        return [name + ("ForPreTraining" if model.sentence_head else "ForMaskedLM")]

    return Family(
        model_type=model_type,
        kind="bert",
        fields={
            **SIZES,
            "max_position_embeddings": "max_positions",
            "intermediate_size": "ffn_hidden_size",
            "layer_norm_eps": "norm_epsilon",
            **TIED,
        },
        activation="hidden_act",
        words=GELU,
        needs={
            "normalization": "layer_norm",
            "positions": "learned",
            "bias": "all",
            "qk_norm": False,
            "norm_position": norm_position,
        },
        writes={
            "architectures": architectures,
            "hidden_dropout_prob": "hidden_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "initializer_range": "init_std",
            "type_vocab_size": 2,
        },
        ignored=keys(
            "hidden_dropout_prob attention_probs_dropout_prob directionality pooler_fc_size "
            "pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type"
        ),
        fixed={"type_vocab_size": (2,), "position_embedding_type": ("absolute",), "is_decoder": (False,)},
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "tie_word_embeddings": True},
        tensors={**NAMES, **norms},
        body="bert.",
        heads=("cls.",),
        buffers=("bert.embeddings.position_ids",),
        # Names in TensorFlow, which the published files of BERT use.
        old_ends={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        repeats={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        optional={"sentence_head": _SENTENCE_HEAD},
    )


_bert(
    "bert",
    "Bert",
    "post",
    {
        "blocks.attention_norm": f"{_LAYER}.attention.output.LayerNorm",
        "blocks.mlp_norm": f"{_LAYER}.output.LayerNorm",
    },
)
_bert(
    "megatron-bert",
    "MegatronBert",
    "pre",
    {"blocks.attention_norm": f"{_LAYER}.attention.ln", "blocks.mlp_norm": f"{_LAYER}.ln"},
)
