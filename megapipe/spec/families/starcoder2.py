"""StarCoder2 (Lozhkov et al. 2024, arXiv 2402.19173): layer norms and biases."""

from megapipe.spec.decoder_family import GELU, decoder, rotary_fields, window_fields
from megapipe.spec.family import keys

decoder(
    "starcoder2",
    "Starcoder2ForCausalLM",
    epsilon_key="norm_epsilon",
    needs={"normalization": "layer_norm", "bias": "all"},
    words={"gelu_pytorch_tanh": "gelu_tanh", **GELU},
    reads=keys("sliding_window"),
    more=(rotary_fields, window_fields),
    writes={
        "sliding_window": "sliding_window",
        "use_bias": True,
        "embedding_dropout": "embedding_dropout",
        "residual_dropout": "hidden_dropout",
    },
    ignored=keys("embedding_dropout residual_dropout"),
    fixed={"use_bias": (True,)},
    defaults={
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    tensors={
        "blocks.mlp.up": "model.layers.{layer}.mlp.c_fc",
        "blocks.mlp.down": "model.layers.{layer}.mlp.c_proj",
    },
)
