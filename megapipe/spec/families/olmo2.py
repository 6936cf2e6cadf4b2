"""OLMo 2 (OLMo Team 2024, arXiv 2501.00656): norms of outputs, and of whole query and key projections."""

from megapipe.spec.decoder_family import ATTENTION_BIAS, LAYER, bias_fields, decoder, rotary_fields
from megapipe.spec.family import keys

decoder(
    "olmo2",
    "Olmo2ForCausalLM",
    needs={"norm_position": "output", "qk_norm": True, "qk_norm_over": "projection"},
    reads=keys("attention_bias"),
    more=(rotary_fields, bias_fields),
    writes=ATTENTION_BIAS,
    defaults={"rms_norm_eps": 1e-5},
    tensors={
        "blocks.attention_output_norm": f"{LAYER}.post_attention_layernorm",
        "blocks.mlp_output_norm": f"{LAYER}.post_feedforward_layernorm",
    },
)
