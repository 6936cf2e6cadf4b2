"""Llama 1 to 3 (Touvron et al. 2023, arXiv 2302.13971; Llama Team 2024, arXiv 2407.21783)."""

from megapipe.spec.decoder_family import decoder

decoder("llama", "LlamaForCausalLM", fixed={"rope_interleaved": (False,), "is_llama_config": (True,)}, order=0)
