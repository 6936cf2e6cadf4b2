"""Mixtral (Jiang et al. 2024, arXiv 2401.04088). An auxiliary loss balances its experts, so its router has no bias."""

from megapipe.spec.decoder_family import EXPERTS, ROUTER_OUTPUT, decoder, expert_names, rotary_fields, window_fields
from megapipe.spec.family import keys

decoder(
    "mixtral",
    "MixtralForCausalLM",
    fields={"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
    needs=EXPERTS,
    reads=keys("sliding_window"),
    more=(rotary_fields, window_fields),
    writes={"sliding_window": "sliding_window"},
    ignored=ROUTER_OUTPUT,
    # Noise is added only in training, but a router that was trained with it expects it there.
    fixed={"router_jitter_noise": (0.0, None)},
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
    tensors=expert_names("block_sparse_moe", "w1", "w3", "w2"),
)
