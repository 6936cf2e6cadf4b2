"""BERT (Devlin et al. 2018, arXiv 1810.04805), with norms after the residual sums; and Megatron-LM's BERT (Shoeybi et
al. 2019, arXiv 1909.08053, section 5.3), with norms before attention and MLP."""

from typing import Any

from megapipe.spec.encoder_family import POST_NORMS, PRE_NORMS, encoder
from megapipe.spec.family import keys

_HEAD = {
    "head.transform": "cls.predictions.transform.dense",
    "head.transform_norm": "cls.predictions.transform.LayerNorm",
    "head.output.weight": "cls.predictions.decoder.weight",
    "head.output.bias": "cls.predictions.bias",
    "head.sentence": "cls.seq_relationship",
}
_BERT: dict[str, Any] = {
    "body": "bert.",
    "heads": ("cls.",),
    "head": _HEAD,
    "fields": {"max_position_embeddings": "max_positions"},
    "buffers": ("bert.embeddings.position_ids",),
    "repeats": {"cls.predictions.decoder.bias": "cls.predictions.bias"},
    "optional": {"sentence_head": ("bert.pooler.", "cls.seq_relationship.")},
    "ignored": keys(
        "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
        "pooler_size_per_head pooler_type"
    ),
}
encoder("bert", "Bert", norms=POST_NORMS, **_BERT)
encoder("megatron-bert", "MegatronBert", norms=PRE_NORMS, **_BERT)
