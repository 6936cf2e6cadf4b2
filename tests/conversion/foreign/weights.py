"""Random checkpoints of every shape that Megatron-LM's GPT can have, and a way there and back."""

from pathlib import Path

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig, RopeScaling
from megapipe.conversion.formats import FORMATS, WEIGHTS, Contents, Source, StoredTensor, TargetOptions
from megapipe.conversion.megapipe_format import parameters_of

SIZES = {"vocabulary_size": 97, "num_layers": 4, "hidden_size": 32, "num_heads": 4, "max_positions": 48}
DECODER = {"normalization": "rms_norm", "activation": "swiglu", "positions": "rotary", "ffn_hidden_size": 48}
OTHERS = ("norm_epsilon", "rope_theta", "rope_scaling", "bias", "qk_norm", "sliding_window", "tie_embeddings")
MODELS = {
    "gpt2": ModelConfig(**SIZES, activation="gelu_tanh"),
    "llama": ModelConfig(**SIZES, **DECODER, num_kv_heads=2, bias="none", tie_embeddings=False, rope_theta=500.0),
    "qwen": ModelConfig(**SIZES, **DECODER, num_kv_heads=2, bias="qkv", qk_norm=True, head_size=16),
    "mistral": ModelConfig(
        **SIZES, **DECODER, bias="none", sliding_window=9, rope_scaling=RopeScaling(kind="linear", factor=2.0)
    ),
}


def drawn(model: ModelConfig, dtype: str = "F32", kinds: tuple[str, ...] = (WEIGHTS,)) -> tuple[Contents, dict]:
    """Contents and every tensor's values: matrices with std 0.2, so that logits are of order 1; norms around 1."""
    generator = torch.Generator().manual_seed(0)
    tensors, values = [], {}
    for kind in kinds:
        for name, spec in parameters_of(model).items():
            tensor = StoredTensor(name, kind, spec.shape, dtype)
            elements = torch.randn(spec.shape, generator=generator) * 0.2
            if "norm.weight" in name:
                elements += 1.0
            tensors.append(tensor)
            values[tensor] = elements.bfloat16() if dtype == "BF16" else elements
    return Contents(model, tuple(tensors)), values


def write(
    kind: str, path: Path, contents: Contents, values: dict[StoredTensor, Tensor], **options: object
) -> list[str]:
    """A folder of a format."""
    target = FORMATS[kind].open_target(path, contents, TargetOptions(**options))
    for tensor in contents.tensors:
        target.add(tensor, values[tensor])
    target.finish()


def opened(kind: str, path: Path) -> Source:
    """The folder as a source, pickles allowed."""
    return FORMATS[kind].open_source(path, True)


def assert_holds(source: Source, contents: Contents, values: dict[StoredTensor, Tensor]) -> None:
    """Model, tensors and every bit are those that were written."""
    assert source.contents.model == resolved(contents.model)
    assert set(source.contents.tensors) == set(contents.tensors)
    for tensor in source.contents.tensors:
        read = source.read(tensor)
        assert read.is_contiguous()
        assert torch.equal(read, values[tensor]), tensor.name
        index = tuple(slice(length // 3, length - length // 4) for length in tensor.shape)
        assert torch.equal(source.read(tensor, index), values[tensor][index]), tensor.name
        assert source.verify(tensor) == []


def resolved(model: ModelConfig) -> ModelConfig:
    """The fields that shape weights and logits, optional sizes spelled out, the rest at their defaults."""
    shaped = {name: getattr(model, name) for name in (*SIZES, *DECODER, *OTHERS)}
    sizes = {"num_kv_heads": model.kv_heads, "head_size": model.head_dim, "ffn_hidden_size": model.ffn_size}
    return ModelConfig(**{**shaped, **sizes})
