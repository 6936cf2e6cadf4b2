"""ALBERT (Lan et al. 2019, arXiv 1909.11942): a BERT whose blocks all share the same weights, and whose embeddings are
narrower than its hidden states."""

from megapipe.spec.encoder_family import encoder
from megapipe.spec.family import Tensors, keys

_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"
_ATTENTION = tuple(f"albert.{_LAYER}.attention.{part}" for part in ("query", "key", "value"))
encoder(
    "albert",
    "Albert",
    body="albert.",
    heads=("predictions.", "sop_classifier."),
    norms={
        "blocks.attention_norm": f"{_LAYER}.attention.LayerNorm",
        "blocks.mlp_norm": f"{_LAYER}.full_layer_layer_norm",
        "blocks.attention.output": f"{_LAYER}.attention.dense",
        "blocks.mlp.up": f"{_LAYER}.ffn",
        "blocks.mlp.down": f"{_LAYER}.ffn_output",
        "embedding.projection": "encoder.embedding_hidden_mapping_in",
        "head.pooler": "pooler",
    },
    head={
        "blocks.attention.qkv": Tensors(_ATTENTION, ("query_key_value",)),
        "head.transform": "predictions.dense",
        "head.transform_norm": "predictions.LayerNorm",
        "head.output.weight": "predictions.decoder.weight",
        "head.output.bias": "predictions.bias",
        "head.sentence": "sop_classifier.classifier",
    },
    fields={"embedding_size": "embedding_size", "max_position_embeddings": "max_positions"},
    needs={"shared_blocks": True},
    fixed={"num_hidden_groups": (1,), "inner_group_num": (1,)},
    writes={"num_hidden_groups": 1, "inner_group_num": 1},
    defaults={"hidden_act": "gelu_new", "embedding_size": 128},
    buffers=("embeddings.position_ids", "embeddings.token_type_ids"),
    repeats={"predictions.decoder.bias": "predictions.bias"},
    optional={"sentence_head": ("albert.pooler.", "sop_classifier.")},
    # Keys of the published files that transformers does not read, and dropout.
    ignored=keys("classifier_dropout_prob down_scale_factor gap_size net_structure_type num_memory_blocks"),
)
