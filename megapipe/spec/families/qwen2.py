"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): biases on query, key and value."""

from megapipe.spec.decoder_family import QWEN, decoder

decoder(
    "qwen2",
    "Qwen2ForCausalLM",
    needs={"bias": "qkv"},
    fixed={"use_mrope": (False,)},
    defaults={"num_key_value_heads": 32},
    **QWEN,
)
