"""What ranks that share samples keep and send, counted beside the formulas."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.layers.shared_samples import share_samples
from megapipe.layout.token_order import ContextAttention, Share, order_of
from megapipe.models import bert, gpt
from megapipe.models.gpt import Block
from megapipe.parallel import collectives
from megapipe.parallel.groups import Group, SoloGroup, Work
from megapipe.parallel.in_process import InProcessMesh
from megapipe.spec.attention import kv_copies
from megapipe.spec.dtypes import Precision
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import LayerSpec
from tests.spec.sizes import predicted_bytes, sent_bytes
from tests.support.meshes import run_threads
from tests.support.partial_groups import PartialGroup

SEQUENCE = 32
SIZE = 2
PREDICTIONS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LLAMA: dict[str, Any] = {
    "num_kv_heads": 2,
    "normalization": "rms_norm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": "none",
    "tie_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2-dropout": {"hidden_dropout": 0.1, "embedding_dropout": 0.1},
    "llama": LLAMA,
    "one-kv-head": {"num_kv_heads": 1},
    "qwen3": {**LLAMA, "qk_norm": True, "head_size": 24},
}


class CountingGroup(PartialGroup):
    """Another's group that counts what its shifts send."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.name, group.ranks, group.rank)
        self.group = group
        self.sent = 0

    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        self.sent += tensor.nbytes
        return self.group.shift(tensor, into)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.group.all_gather(tensor)


def bound_block(model: ModelConfig, dtype: torch.dtype, layer: LayerSpec) -> nn.Module:
    build = bert.build_layer if isinstance(model, BertModelConfig) else gpt.build_layer
    module = build(layer, model, SoloGroup("tensor"))  # type: ignore[arg-type]
    for path, spec in layer.parameters.items():
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(torch.full(spec.shape, 0.02, dtype=dtype)))
    return module


def context_of(model: ModelConfig, micro_size: int, share: Share) -> MicrobatchContext:
    numbers = torch.from_numpy(share.numbers(SEQUENCE))
    tokens = torch.zeros(micro_size, len(numbers), dtype=torch.int64)
    if not isinstance(model, BertModelConfig):
        ordinals = torch.arange(micro_size)
        return MicrobatchContext(tokens=tokens, labels=tokens, ordinals=ordinals, token_numbers=numbers)
    hidden = torch.zeros(micro_size, PREDICTIONS, dtype=torch.int64)
    return BertContext(
        tokens=tokens,
        token_types=tokens,
        lengths=torch.full((micro_size,), SEQUENCE),
        positions=hidden,
        labels=hidden,
        loss_mask=torch.ones(micro_size, PREDICTIONS),
        sentence_labels=torch.zeros(micro_size, dtype=torch.int64),
        sentence_weights=torch.ones(micro_size),
        ordinals=torch.arange(micro_size),
        token_numbers=numbers,
    )


def measured(
    mesh: InProcessMesh,
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    kind: ContextAttention,
    dtype: torch.dtype,
    recompute: list[RecomputedPart],
) -> tuple[int, tuple[int, int]]:
    """Bytes that a rank's forward leaves for its backward, and what both send."""
    group = CountingGroup(mesh.group("context"))
    share = Share(order_of(kind, not isinstance(model, BertModelConfig)), group.rank, group.size)
    module = bound_block(model, dtype, layer)
    if isinstance(module, Block):
        module.recompute(recompute)
        share_samples(module.attention, group, kind)
    context = context_of(model, micro_size, share)
    hidden = torch.randn(micro_size, SEQUENCE // group.size, model.hidden_size, dtype=dtype, requires_grad=True)
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    known |= {each.untyped_storage().data_ptr() for each in vars(context).values() if isinstance(each, Tensor)}
    if layer.kind == "block" and model.positions == "rotary":
        tables = module.attention.rotary.tables(SEQUENCE, hidden, share)  # type: ignore[union-attr]
        known |= {table.untyped_storage().data_ptr() for table in tables}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.int64:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (output, *_) = module(*([] if layer.kind == "embedding" else [hidden]), context=context)
    kept = sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in known)
    forward = group.sent
    output.sum().backward()
    return kept, (forward, group.sent - forward)


def measure(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    kind: ContextAttention,
    precision: Precision,
    recompute: list[RecomputedPart] | None = None,
    size: int = SIZE,
) -> list[tuple[int, tuple[int, int]]]:
    arguments = (model, layer, micro_size, kind, DTYPES[precision], recompute or [])
    return run_threads({"context": size}, measured, *arguments)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
@pytest.mark.parametrize("micro_size", [1, 3])
@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layer_keeps_what_is_predicted(
    shape: str,
    kind: ContextAttention,
    micro_size: int,
    attention: Literal["sdpa", "unfused"],
    precision: Precision,
) -> None:
    model = ModelConfig(
        vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=4, attention=attention, **SHAPES[shape]
    )
    if shape == "gpt2-dropout" and attention == "unfused":
        model.attention_dropout = 0.1
    for layer in model_layers(model):
        expected = predicted_bytes(
            model, layer, micro_size, SEQUENCE, precision, attention, context_attention=kind, context=SIZE
        )
        for kept, _ in measure(model, layer, micro_size, kind, precision):
            assert kept == expected, layer.name


@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
@pytest.mark.parametrize("micro_size", [1, 3])
@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_every_layer_of_a_bert_keeps_what_is_predicted(
    kind: ContextAttention, micro_size: int, attention: Literal["sdpa", "unfused"]
) -> None:
    model = BertModelConfig(vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=4, attention=attention)
    for layer in model_layers(model):
        expected = predicted_bytes(
            model,
            layer,
            micro_size,
            SEQUENCE,
            "fp32",
            attention,
            predictions=PREDICTIONS,
            context_attention=kind,
            context=SIZE,
        )
        for kept, _ in measure(model, layer, micro_size, kind, "fp32"):
            assert kept == expected, layer.name


@pytest.mark.parametrize("parts", [["attention"], ["mlp", "norms"]], ids=str)
def test_what_is_made_again_is_not_kept(parts: list[RecomputedPart]) -> None:
    model = ModelConfig(vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=4, attention="unfused")
    block = model_layers(model)[1]
    for kind in ("ring", "all_to_all"):
        how = {"context_attention": kind, "context": SIZE}
        expected = predicted_bytes(model, block, 2, SEQUENCE, "fp32", "unfused", recompute=parts, **how)
        assert [kept for kept, _ in measure(model, block, 2, kind, "fp32", parts)] == [expected] * SIZE  # type: ignore


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_a_ring_sends_what_is_predicted(shape: str, size: int, precision: Precision) -> None:
    model = ModelConfig(vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=4, **SHAPES[shape])
    expected = sent_bytes(model, 3, SEQUENCE, precision, "ring", size)
    found = measure(model, model_layers(model)[1], 3, "ring", precision, size=size)
    assert [sent for _, sent in found] == [expected] * size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", ["gpt2", "llama", "one-kv-head"])
def test_an_all_to_all_sends_what_is_predicted(shape: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=4, **SHAPES[shape])
    sent: list[int] = []
    exchange = collectives._exchanged

    def counting(x: Tensor, group: Group) -> Tensor:
        sent.append(sum(part.nbytes for rank, part in enumerate(x) if rank != group.rank))
        return exchange(x, group)

    monkeypatch.setattr(collectives, "_exchanged", counting)
    expected = sent_bytes(model, 3, SEQUENCE, "fp32", "all_to_all", size)
    measure(model, model_layers(model)[1], 3, "all_to_all", "fp32", size=size)
    assert len(sent) == 4 * size
    assert sum(sent) == size * sum(expected)


def test_tensor_ranks_share_what_is_sent() -> None:
    model = replace(ModelConfig(hidden_size=64, num_heads=8), num_kv_heads=4)
    for kind in ("ring", "all_to_all"):
        whole, half = (sent_bytes(model, 1, SEQUENCE, "bf16", kind, 2, tensor=tensor) for tensor in (1, 2))
        assert tuple(2 * each for each in half) == whole


def test_key_heads_are_copied_until_they_divide() -> None:
    assert [kv_copies(4, 2, size) for size in (1, 2, 4, 8)] == [1, 1, 1, 2]
    assert kv_copies(2, 6, 4) == 2
    with pytest.raises(ValueError, match="8 query heads cannot be divided evenly over 3 context ranks"):
        kv_copies(4, 2, 3)
