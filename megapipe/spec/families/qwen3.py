"""Qwen3 (Yang et al. 2025, arXiv 2505.09388): norms of queries and keys."""

from megapipe.spec.decoder_family import ATTENTION_BIAS, QWEN, bias_fields, decoder
from megapipe.spec.family import keys

decoder(
    "qwen3",
    "Qwen3ForCausalLM",
    needs={"qk_norm": True},
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    reads=QWEN["reads"] | keys("attention_bias"),
    more=(*QWEN["more"], bias_fields),
    writes={**QWEN["writes"], **ATTENTION_BIAS},
)
