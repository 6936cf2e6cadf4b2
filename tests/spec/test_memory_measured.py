"""The predicted bytes of saved activations beside what autograd saves in the project's own layers."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.layers.sequence_products import SequenceProducts
from megapipe.layers.sequence_shard import shard_sequence
from megapipe.models import bert
from megapipe.models.gpt import Block, build_layer
from megapipe.parallel.groups import Group, SoloGroup
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import LayerSpec
from tests.spec.sizes import predicted_bytes

SEQUENCE = 32
HIDDEN_TOKENS = 5
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
    "grouped": {"num_kv_heads": 2, "bias": "none"},
    "one-kv-head": {"num_kv_heads": 1},
    "llama-one-kv-head": {**LLAMA, "num_kv_heads": 1},
    "qwen3": {**LLAMA, "qk_norm": True, "head_size": 24},
}


def bound_layer(
    model: ModelConfig,
    layer: LayerSpec,
    dtype: torch.dtype,
    recompute_logits: bool = False,
    group: Group | None = None,
) -> nn.Module:
    """group: of tensor ranks, which share the tokens too."""
    build = bert.build_layer if isinstance(model, BertModelConfig) else build_layer
    ranks = group or SoloGroup("tensor")
    module = build(layer, model, ranks, recompute_logits=recompute_logits)  # type: ignore[arg-type]
    for path, spec in layer.parameters.items():
        owner, _, leaf = path.rpartition(".")
        shape = spec.local_shape(ranks.size)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(torch.full(shape, 0.02, dtype=dtype)))
    if group is not None:
        shard_sequence(module, SequenceProducts(group))
    return module


def saved_bytes(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    dtype: torch.dtype,
    recompute_logits: bool = False,
    recompute: list[RecomputedPart] | None = None,
    group: Group | None = None,
    document_starts: Tensor | None = None,
) -> int:
    """Bytes of all storages that autograd keeps, parameters and integer tensors (the micro-batch's own) apart."""
    module = bound_layer(model, layer, dtype, recompute_logits, group)
    if recompute is not None:
        assert isinstance(module, Block)
        module.recompute(recompute)
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    tokens = torch.zeros(micro_size, SEQUENCE, dtype=torch.int64)
    context = MicrobatchContext(
        tokens=tokens, labels=tokens, ordinals=torch.arange(micro_size), document_starts=document_starts
    )
    if isinstance(model, BertModelConfig):
        context = bert_context(micro_size)
    held = SEQUENCE if group is None else SEQUENCE // group.size
    hidden = torch.randn(micro_size, held, model.hidden_size, dtype=dtype, requires_grad=True)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.int64:  # the micro-batch's own
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    known |= {each.untyped_storage().data_ptr() for each in vars(context).values() if isinstance(each, Tensor)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*([] if layer.kind == "embedding" else [hidden]), context=context)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in known)


def bert_context(micro_size: int) -> BertContext:
    tokens = torch.zeros(micro_size, SEQUENCE, dtype=torch.int64)
    hidden = torch.zeros(micro_size, HIDDEN_TOKENS, dtype=torch.int64)
    return BertContext(
        tokens=tokens,
        token_types=tokens,
        lengths=torch.full((micro_size,), SEQUENCE),
        positions=hidden,
        labels=hidden,
        loss_mask=torch.ones(micro_size, HIDDEN_TOKENS),
        sentence_labels=torch.zeros(micro_size, dtype=torch.int64),
        sentence_weights=torch.ones(micro_size),
        ordinals=torch.arange(micro_size),
    )


def shared_bytes(model: ModelConfig, layer: LayerSpec) -> int:
    """Bytes of a block's two rotary tables in fp32, which all micro-batches share and the prediction leaves out."""
    rotary = layer.kind == "block" and model.positions == "rotary"
    return 2 * SEQUENCE * (model.head_dim // 2) * 4 if rotary else 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
@pytest.mark.parametrize("micro_size", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layer_keeps_what_is_predicted(
    shape: str, micro_size: int, attention: Literal["sdpa", "unfused"], precision: Literal["fp32", "bf16"]
) -> None:
    model = ModelConfig(
        vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=4, attention=attention, **SHAPES[shape]
    )
    if shape == "gpt2-dropout" and attention == "unfused":
        model.attention_dropout = 0.1
    for layer in model_layers(model):
        measured = saved_bytes(model, layer, micro_size, DTYPES[precision]) - shared_bytes(model, layer)
        assert measured == predicted_bytes(model, layer, micro_size, SEQUENCE, precision, attention), layer.name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
@pytest.mark.parametrize("micro_size", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("norm_position", "sentence_head"), [("post", True), ("pre", True), ("pre", False)])
def test_every_layer_of_a_bert_keeps_what_is_predicted(
    norm_position: Literal["post", "pre"],
    sentence_head: bool,
    dropout: float,
    micro_size: int,
    attention: Literal["sdpa", "unfused"],
    precision: Literal["fp32", "bf16"],
) -> None:
    model = BertModelConfig(
        vocabulary_size=101,
        num_layers=1,
        hidden_size=64,
        num_heads=4,
        attention=attention,
        norm_position=norm_position,
        sentence_head=sentence_head,
        hidden_dropout=dropout,
        embedding_dropout=dropout,
        attention_dropout=dropout if attention == "unfused" else 0.0,
    )
    parts: list[RecomputedPart]
    for layer in model_layers(model):
        for parts in [], ["attention", "mlp", "norms"]:
            again = parts if layer.kind == "block" else None
            measured = saved_bytes(model, layer, micro_size, DTYPES[precision], recompute=again)
            sizes = micro_size, SEQUENCE, precision, attention
            predicted = predicted_bytes(model, layer, *sizes, recompute=parts, predictions=HIDDEN_TOKENS)
            assert measured == predicted, (layer.name, parts)
    head = model_layers(model)[-1]
    measured = saved_bytes(model, head, micro_size, DTYPES[precision], recompute_logits=True)
    sizes = micro_size, SEQUENCE, precision, attention
    assert measured == predicted_bytes(model, head, *sizes, recompute_logits=True, predictions=HIDDEN_TOKENS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
@pytest.mark.parametrize("micro_size", [1, 3])
@pytest.mark.parametrize("shape", ["gpt2", "llama", "grouped"])
def test_documents_apart_keep_masks_and_angles(
    shape: str, micro_size: int, attention: Literal["sdpa", "unfused"], precision: Literal["fp32", "bf16"]
) -> None:
    model = ModelConfig(
        vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=4, attention=attention, **SHAPES[shape]
    )
    starts = torch.zeros(micro_size, SEQUENCE, dtype=torch.int64)
    starts[:, SEQUENCE // 2 :] = SEQUENCE // 2
    block = model_layers(model)[1]
    parts: list[RecomputedPart]
    for parts in [], ["attention"]:
        again = parts if parts else None
        measured = saved_bytes(model, block, micro_size, DTYPES[precision], recompute=again, document_starts=starts)
        sizes = micro_size, SEQUENCE, precision, attention
        assert measured == predicted_bytes(model, block, *sizes, recompute=parts, isolate_documents=True), parts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
@pytest.mark.parametrize("parts", [["attention"], ["mlp"], ["norms"], ["attention", "mlp", "norms"]], ids="+".join)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_keeps_no_part_that_it_makes_again(
    shape: str,
    parts: list[RecomputedPart],
    attention: Literal["sdpa", "unfused"],
    precision: Literal["fp32", "bf16"],
) -> None:
    model = ModelConfig(
        vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=4, attention=attention, **SHAPES[shape]
    )
    if shape == "gpt2-dropout" and attention == "unfused":
        model.attention_dropout = 0.1
    block = model_layers(model)[1]
    measured = saved_bytes(model, block, 3, DTYPES[precision], recompute=parts) - shared_bytes(model, block)
    assert measured == predicted_bytes(model, block, 3, SEQUENCE, precision, attention, recompute=parts)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_head_that_recomputes_its_logits_keeps_what_is_predicted(precision: Literal["fp32", "bf16"]) -> None:
    model = ModelConfig(vocabulary_size=101, num_layers=1, hidden_size=64, num_heads=4)
    head = model_layers(model)[-1]
    measured = saved_bytes(model, head, 3, DTYPES[precision], recompute_logits=True)
    assert measured == predicted_bytes(model, head, 3, SEQUENCE, precision, "sdpa", recompute_logits=True)
