"""Mistral (Jiang et al. 2023, arXiv 2310.06825)."""

from megapipe.spec.decoder_family import decoder, rotary_fields, window_fields
from megapipe.spec.family import keys

decoder(
    "mistral",
    "MistralForCausalLM",
    reads=keys("sliding_window"),
    more=(rotary_fields, window_fields),
    writes={"sliding_window": "sliding_window"},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
