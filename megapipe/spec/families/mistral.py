"""Mistral (Jiang et al. 2023, arXiv 2310.06825)."""

from megapipe.spec.decoder_family import decoder, with_window
from megapipe.spec.family import keys

decoder(
    "mistral",
    "MistralForCausalLM",
    reads=keys("sliding_window"),
    more=with_window,
    writes={"sliding_window": "sliding_window"},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
