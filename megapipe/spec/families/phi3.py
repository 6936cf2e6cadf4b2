"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv 2404.14219): matrices of one input are one."""

from megapipe.spec.decoder_family import decoder, with_window
from megapipe.spec.family import Tensors, keys

_LAYER = "model.layers.{layer}"

decoder(
    "phi3",
    "Phi3ForCausalLM",
    reads=keys("sliding_window"),
    more=with_window,
    writes={
        "sliding_window": "sliding_window",
        "embd_pdrop": "embedding_dropout",
        "resid_pdrop": "hidden_dropout",
    },
    # Only longrope reads original_max_position_embeddings.
    ignored=keys("embd_pdrop resid_pdrop original_max_position_embeddings"),
    defaults={"rms_norm_eps": 1e-5},
    tensors={
        "blocks.attention.qkv": Tensors((f"{_LAYER}.self_attn.qkv_proj",), ("query_key_value",)),
        "blocks.mlp.up": f"{_LAYER}.mlp.gate_up_proj",
    },
    order=2,
)
