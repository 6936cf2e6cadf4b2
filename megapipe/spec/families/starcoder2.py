"""StarCoder2 (Lozhkov et al. 2024, arXiv 2402.19173): layer norms and biases."""

from megapipe.spec.decoder_family import MLP, UNGATED, decoder, rotary_fields, window_fields
from megapipe.spec.family import keys

decoder(
    "starcoder2",
    "Starcoder2ForCausalLM",
    epsilon_key="norm_epsilon",
    needs={"normalization": "layer_norm"},
    words={"gelu_pytorch_tanh": "gelu_tanh", **UNGATED},
    reads=keys("sliding_window use_bias"),
    more=(rotary_fields, window_fields, lambda config: {"bias": "all" if config["use_bias"] else "none"}),
    writes={
        "sliding_window": "sliding_window",
        "use_bias": lambda model: model.has_bias("attention.output"),
        "embedding_dropout": "embedding_dropout",
        "residual_dropout": "hidden_dropout",
    },
    defaults={
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    tensors={
        "blocks.mlp.up": f"{MLP}.c_fc",
        "blocks.mlp.down": f"{MLP}.c_proj",
    },
)
