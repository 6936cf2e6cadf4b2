"""Bytes that autograd saves and that a split backward hands over, counted, beside what the ops declare: exactly."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.graph import gradient_edge
from megapipe.layers.split import SplitTape
from megapipe.models.gpt import Block
from megapipe.parallel.mesh import Mesh
from megapipe.spec.dtypes import Precision
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import LayerSpec
from tests.spec.sizes import predicted_bytes
from tests.spec.test_memory_measured import (
    DTYPES,
    HIDDEN_TOKENS,
    LLAMA,
    SEQUENCE,
    bert_context,
    bound_layer,
    saved_bytes,
    shared_bytes,
)
from tests.support.meshes import run_threads

SIZES: dict[str, Any] = {"vocabulary_size": 104, "num_layers": 1, "hidden_size": 64, "num_heads": 4}
SIZES |= {"attention": "unfused", "hidden_dropout": 0.1}
MODELS: dict[str, ModelConfig] = {
    "gpt2": ModelConfig(**SIZES),
    "llama": ModelConfig(**SIZES, **(LLAMA | {"num_kv_heads": 4})),
    "experts": ModelConfig(**SIZES, num_experts=4),
    "pre-norm bert": BertModelConfig(**SIZES, norm_position="pre"),
    "post-norm bert": BertModelConfig(**SIZES, norm_position="post"),
}
PARTS: tuple[RecomputedPart, ...] = ("attention", "mlp", "norms")
Counted = dict[str, tuple[int, int]]


def choices() -> Iterator[tuple[list[RecomputedPart], int, Precision]]:
    """Every subset of recomputed parts, with sizes of a micro-batch and precisions."""
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    subsets = [list(chosen) for count in range(4) for chosen in combinations(PARTS, count)]
    yield from product(subsets, (1, 3), precisions)


def counted(mesh: Mesh, model: ModelConfig) -> list[Counted]:
    """By kind of layer, bytes saved by a forward and handed to the weight half, for each choice on this rank."""
    found = []
    for parts, micro_size, precision in choices():
        arguments = mesh, model, micro_size, DTYPES[precision], parts
        layers = model_layers(model)
        found.append({layer.kind: (saved(*arguments, layer), handed_over(*arguments, layer)) for layer in layers})
    return found


def saved(
    mesh: Mesh, model: ModelConfig, micro_size: int, dtype: torch.dtype, parts: list[RecomputedPart], layer: LayerSpec
) -> int:
    group = mesh.group("tensor") if mesh.size("tensor") > 1 else None
    recompute = parts if layer.kind == "block" else None
    found = saved_bytes(model, layer, micro_size, dtype, group=group, recompute=recompute)
    return found - (0 if isinstance(model, BertModelConfig) else shared_bytes(model, layer))


def handed_over(
    mesh: Mesh, model: ModelConfig, micro_size: int, dtype: torch.dtype, parts: list[RecomputedPart], layer: LayerSpec
) -> int:
    group = mesh.group("tensor")
    module = bound_layer(model, layer, dtype, group=group if group.size > 1 else None)
    if isinstance(module, Block):
        module.recompute(parts)
    tokens = torch.zeros(micro_size, SEQUENCE, dtype=torch.int64)
    context: Any = MicrobatchContext(tokens=tokens, labels=tokens, ordinals=torch.arange(micro_size))
    if isinstance(model, BertModelConfig):
        context = bert_context(micro_size)
    tape = SplitTape()
    hidden = torch.randn(micro_size, SEQUENCE // group.size, model.hidden_size, dtype=dtype, requires_grad=True)
    inputs = [] if layer.kind == "embedding" else [hidden]
    (output,) = module(*inputs, context=replace(context, tape=tape))
    tape.backward_input([gradient_edge(output)], [torch.ones_like(output)], inputs)
    kept: dict[int, Tensor] = {t.untyped_storage().data_ptr(): t for t in tape.kept if t.is_floating_point()}
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("post-norm bert", 2),
        *(
            pytest.param(name, tensor, marks=[pytest.mark.slow])
            for name, tensor in product(MODELS, (1, 2, 4))
            if (name, tensor) != ("post-norm bert", 2)
        ),
    ],
)
def test_counted_bytes_are_declared_ones(name: str, tensor: int) -> None:
    """Over all ranks: which experts get how many rows the data decides, but not how many there are."""
    model = MODELS[name]
    ranks: list[list[Counted]] = run_threads({"tensor": tensor}, counted, model)
    for (parts, micro_size, precision), *of_ranks in zip(choices(), *ranks, strict=True):
        for layer in model_layers(model):
            predicted = [
                predicted_bytes(
                    model,
                    layer,
                    micro_size,
                    SEQUENCE,
                    precision,
                    "unfused",
                    recompute=parts,
                    halves=halves,
                    tensor=tensor,
                    sequence_parallel=tensor > 1,
                    predictions=HIDDEN_TOKENS if isinstance(model, BertModelConfig) else None,
                )
                for halves in (False, True)
            ]
            found = [sum(column) for column in zip(*(each[layer.kind] for each in of_ranks), strict=True)]
            expected = [tensor * each for each in predicted]
            if name == "experts":  # its tokens' and rows' numbers are the micro-batch's own
                found, expected = found[1:], expected[1:]
            assert found == expected, (layer.kind, parts, micro_size, precision)
