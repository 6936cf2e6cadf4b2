"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv 2404.14219): matrices that read the same input are stored as one."""

from collections.abc import Mapping
from typing import Any

from megapipe.spec.decoder_family import LAYER, Fields, decoder, described_rope, stretched, window_fields
from megapipe.spec.family import FamilyError, Tensors, keys


def _rotary_fields(config: Mapping[str, Any]) -> Fields:
    fields = stretched(described_rope(config), config)
    kind = fields["rope_scaling.kind"]
    if kind not in ("none", "longrope"):
        raise FamilyError(f"the rotary parameters are of kind {kind}; models of this type have only longrope")
    return fields


def _original_length(model: Any) -> int:
    scaling = model.rope_scaling
    return int(model.max_positions if scaling.kind == "none" else scaling.original_length)


decoder(
    "phi3",
    "Phi3ForCausalLM",
    reads=keys("sliding_window"),
    more=(_rotary_fields, window_fields),
    writes={
        "sliding_window": "sliding_window",
        "original_max_position_embeddings": _original_length,
        "embd_pdrop": "embedding_dropout",
        "resid_pdrop": "hidden_dropout",
    },
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    tensors={
        "blocks.attention.qkv": Tensors((f"{LAYER}.self_attn.qkv_proj",), ("query_key_value",)),
        "blocks.mlp.up": f"{LAYER}.mlp.gate_up_proj",
    },
    order=2,
)
