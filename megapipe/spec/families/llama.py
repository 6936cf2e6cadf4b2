"""Llama 1 to 3 (Touvron et al. 2023, arXiv 2302.13971; Llama Team 2024, arXiv 2407.21783)."""

from megapipe.spec.decoder_family import BIASES, bias_fields, decoder, rotary_fields
from megapipe.spec.family import keys

decoder(
    "llama",
    "LlamaForCausalLM",
    reads=keys("attention_bias mlp_bias"),
    more=(rotary_fields, bias_fields),
    writes=BIASES,
    fixed={"rope_interleaved": (False,), "is_llama_config": (True,)},
    order=0,
)
