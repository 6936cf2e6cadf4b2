"""Qwen3 with experts in every layer (Yang et al. 2025, arXiv 2505.09388)."""

from megapipe.spec.decoder_family import QWEN, ROUTER_OUTPUT, SPARSE, decoder, expert_names
from megapipe.spec.family import keys

decoder(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ffn_key="moe_intermediate_size",
    fields={
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "normalize_expert_shares",
    },
    aliases={"num_local_experts": "num_experts"},
    needs={"qk_norm": True, "expert_balance_rate": 0.0},
    defaults={
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    tensors=expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    fixed=SPARSE,
    reads=QWEN["reads"],
    more=QWEN["more"],
    # intermediate_size is the width of layers without experts, of which there are none.
    ignored=QWEN["ignored"] | ROUTER_OUTPUT | keys("intermediate_size"),
    writes={**QWEN["writes"], "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": "ffn_hidden_size"},
)
