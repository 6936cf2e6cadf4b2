"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), declared as ops and counted on a toy module."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from megapipe.config.model import ModelConfig
from megapipe.kernels.ops import OPS
from megapipe.layers.norms import Norm
from megapipe.spec.dtypes import FULL_BYTES
from megapipe.spec.linear import gradient, linear_products, matrix
from megapipe.spec.ops import Flops, MicrobatchShape, Op, Value, linear_flops, saved_bytes, total_flops
from megapipe.spec.transformer import norm_weights

LATENT = 24
MODEL = ModelConfig(num_layers=1, hidden_size=64, num_heads=4, normalization="rms_norm", bias="none")


def latent_attention(shape: MicrobatchShape, source: Value) -> Iterator[Op]:
    """Keys and values of all heads are made of one latent vector of a token, all that decoding has to cache."""
    model, width, tokens = shape.model, shape.width, shape.tokens
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim
    latent, normed = Value("latent", tokens * LATENT * width), Value("latent norm", tokens * LATENT * width)
    query, pair = Value("query", tokens * heads * width), Value("key and value", 2 * tokens * heads * width)
    result = Value("attention result", tokens * heads * width)
    for name, read, rows, columns in (
        ("query", source, heads, hidden),
        ("down", source, LATENT, hidden),
        ("up", normed, 2 * heads, LATENT),
        ("output", result, hidden, heads),
    ):
        weight = matrix(f"{name}.weight", (rows, columns), None, model.init_std)
        yield Op(
            name,
            weights=(weight,),
            saves=(read,),
            weight_needs=(read, gradient(name, tokens * rows * width)),
            flops=linear_flops(tokens, weight.num_elements),
            kernels=partial(linear_products, shape, weight, tokens),
        )
    statistics = Value("latent statistics", shape.statistics(tokens))
    weights = tuple(norm_weights(ModelConfig(hidden_size=LATENT, num_heads=1, normalization="rms_norm"), "norm"))
    yield Op("norm", weights=weights, saves=(latent, statistics))
    pairs = 4 * shape.micro_size * shape.sequence_length**2 * heads
    log_sums = Value("attention log-sums", tokens * model.num_heads * FULL_BYTES)
    yield Op("attention", saves=(query, pair, result, log_sums), flops=Flops(pairs, 2 * pairs))


class LatentAttention(nn.Module):
    def __init__(self, ops: list[Op]) -> None:
        super().__init__()
        for op in ops:
            for spec in op.weights:
                self.register_parameter(spec.name.replace(".", "_"), nn.Parameter(torch.full(spec.shape, 0.02)))
        self.norm = Norm("rms_norm", {"weight": (LATENT,)}, 1e-5, OPS)
        self.norm.weight = self.norm_weight

    def forward(self, x: Tensor) -> Tensor:
        latent = self.norm(functional.linear(x, self.down_weight), None)
        query, pair = functional.linear(x, self.query_weight), functional.linear(latent, self.up_weight)
        parts = [query, *pair.chunk(2, dim=-1)]
        heads = [part.unflatten(-1, (MODEL.num_heads, -1)).transpose(1, 2) for part in parts]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return functional.linear(mixed.transpose(1, 2).flatten(2), self.output_weight)


@pytest.mark.parametrize("micro_size", [1, 3])
def test_declared_bytes_and_flops_are_counted_ones(micro_size: int) -> None:
    shape = MicrobatchShape(MODEL, micro_size, 16)
    ops = list(latent_attention(shape, Value("input", shape.stream)))
    module, x = LatentAttention(ops), torch.randn(micro_size, 16, 64, requires_grad=True)
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        module(x).sum().backward()
    assert sum(size for address, size in saved.items() if address not in known) == saved_bytes(ops)
    products = total_flops([op for op in ops if op.name != "attention"])  # torch does not count a fused kernel's
    assert counter.get_total_flops() == products.total
