"""What waits for a weight half, beside the paper's closed form and what the layers themselves keep on their tape."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.graph import gradient_edge
from megapipe.layers.split import SplitTape
from megapipe.models.gpt import Block
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import LayerSpec
from tests.spec.sizes import predicted_bytes
from tests.spec.test_memory_measured import DTYPES, HIDDEN_TOKENS, LLAMA, SEQUENCE, bert_context, bound_layer


@given(st.integers(1, 4), st.integers(1, 128), st.sampled_from([4, 8]), st.sampled_from([1, 2, 4]))
def test_a_block_equals_the_papers_formula(micro: int, sequence: int, heads: int, tensor: int) -> None:
    """arXiv 2401.10241, table 1: 32 s b h; ours adds inputs and gradients of two norms, 8 s b h, and their statistics.
    Over tensor ranks the products' own 24 s b h are shared, the residual stream's 8 are not."""
    model = ModelConfig(num_layers=1, hidden_size=16 * heads, num_heads=heads)
    kept = predicted_bytes(model, model_layers(model)[1], micro, sequence, "bf16", tensor=tensor, halves=True)
    sbh = sequence * micro * model.hidden_size
    assert kept == sbh * (24 // tensor + 8) + sbh * 8 + 2 * 8 * sequence * micro


def waiting_bytes(
    model: ModelConfig, layer: LayerSpec, micro_size: int, dtype: torch.dtype, recompute: list[RecomputedPart]
) -> int:
    """Bytes of the floating-point storages on a layer's tape behind the input half."""
    module = bound_layer(model, layer, dtype)
    if isinstance(module, Block):
        module.recompute(recompute)
    tokens = torch.zeros(micro_size, SEQUENCE, dtype=torch.int64)
    context: Any = MicrobatchContext(tokens=tokens, labels=tokens, ordinals=torch.arange(micro_size))
    if isinstance(model, BertModelConfig):
        context = bert_context(micro_size)
    tape = SplitTape()
    hidden = torch.randn(micro_size, SEQUENCE, model.hidden_size, dtype=dtype, requires_grad=True)
    inputs = [] if layer.kind == "embedding" else [hidden]
    (output,) = module(*inputs, context=replace(context, tape=tape))
    tape.backward_input([gradient_edge(output)], [torch.ones_like(output)], inputs)
    kept: dict[int, Tensor] = {t.untyped_storage().data_ptr(): t for t in tape.kept if t.is_floating_point()}
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_size", [1, 3])
@pytest.mark.parametrize("parts", [[], ["attention", "mlp", "norms"]], ids=["kept", "selective"])
@pytest.mark.parametrize("shape", ["gpt2", "llama", "bert"])
def test_every_layer_keeps_what_is_predicted(
    shape: str, parts: list[RecomputedPart], micro_size: int, precision: Literal["fp32", "bf16"]
) -> None:
    """Within a twentieth: gradients of lookups may be one tensor, and a loss weighs its rows by a few numbers."""
    sizes: dict[str, Any] = {"vocabulary_size": 101, "num_layers": 1, "hidden_size": 64, "num_heads": 4}
    sizes |= {"attention": "unfused", "hidden_dropout": 0.1}
    if shape == "bert":
        model: ModelConfig = BertModelConfig(norm_position="pre", **sizes)
        layers = model_layers(model)  # type: ignore[arg-type]
    else:
        model = ModelConfig(**sizes, **(LLAMA if shape == "llama" else {}))
        layers = model_layers(model)
    for layer in layers[1:]:
        measured = waiting_bytes(model, layer, micro_size, DTYPES[precision], parts)
        hidden = HIDDEN_TOKENS if shape == "bert" else None
        predicted = predicted_bytes(
            model, layer, micro_size, SEQUENCE, precision, predictions=hidden, recompute=parts, halves=True
        )
        assert measured == pytest.approx(predicted, rel=0.05), layer.name
