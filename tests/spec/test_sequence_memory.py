"""Under sequence parallelism a rank keeps what is predicted, and of a block a t-th of what one rank alone would."""

from typing import Any, Literal

import pytest

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.parallel.mesh import Mesh
from megapipe.spec.layers import model_layers
from tests.spec.sizes import predicted_bytes
from tests.spec.test_memory_measured import DTYPES, HIDDEN_TOKENS, SEQUENCE, SHAPES, saved_bytes, shared_bytes
from tests.support.meshes import run_threads

DROPOUT = {"hidden_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1}
SIZES: dict[str, Any] = {"vocabulary_size": 104, "num_layers": 1, "hidden_size": 64, "num_heads": 4}


def measured(mesh: Mesh, model: ModelConfig, micro_size: int, precision: str, how: dict[str, Any]) -> dict[str, int]:
    """Bytes kept by each layer on this tensor rank."""
    layers = model_layers(model)
    found = {}
    for layer in layers:
        options = {} if layer.kind != "block" else {"recompute": how.get("recompute")}
        if layer.kind == "head":
            options = {"recompute_logits": how.get("recompute_logits", False)}
        kept = saved_bytes(model, layer, micro_size, DTYPES[precision], group=mesh.group("tensor"), **options)
        bert = isinstance(model, BertModelConfig)
        found[layer.name] = kept - (0 if bert else shared_bytes(model, layer))
    return found


@pytest.mark.parametrize("how", [{}, {"recompute": ["norms", "mlp"]}, {"recompute_logits": True}], ids=str)
@pytest.mark.parametrize(
    ("shape", "tensor", "micro_size", "attention", "precision"),
    [
        ("gpt2-dropout", 2, 3, "unfused", "bf16"),
        ("gpt2-dropout", 4, 1, "sdpa", "fp32"),
        ("llama", 2, 1, "sdpa", "bf16"),
        ("qwen3", 2, 3, "unfused", "fp32"),
    ],
)
def test_every_rank_keeps_what_is_predicted(
    shape: str,
    tensor: int,
    micro_size: int,
    attention: Literal["sdpa", "unfused"],
    precision: Literal["fp32", "bf16"],
    how: dict[str, Any],
) -> None:
    model = ModelConfig(**SIZES, attention=attention, **SHAPES[shape])
    parts: list[RecomputedPart] = how.get("recompute", [])
    for found in run_threads({"tensor": tensor}, measured, model, micro_size, precision, how):
        for layer in model_layers(model):
            predicted = predicted_bytes(
                model,
                layer,
                micro_size,
                SEQUENCE,
                precision,
                attention,
                tensor=tensor,
                recompute=parts,
                recompute_logits=how.get("recompute_logits", False),
                sequence_parallel=True,
            )
            assert found[layer.name] == predicted, layer.name


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize(("tensor", "micro_size", "precision"), [(2, 3, "bf16"), (4, 1, "fp32")])
def test_every_rank_of_a_bert_keeps_what_is_predicted(
    norm_position: Literal["post", "pre"], tensor: int, micro_size: int, precision: Literal["fp32", "bf16"]
) -> None:
    model = BertModelConfig(**SIZES, attention="unfused", norm_position=norm_position, **DROPOUT)
    for found in run_threads({"tensor": tensor}, measured, model, micro_size, precision, {}):
        for layer in model_layers(model):
            predicted = predicted_bytes(
                model,
                layer,
                micro_size,
                SEQUENCE,
                precision,
                "unfused",
                tensor=tensor,
                sequence_parallel=True,
                predictions=HIDDEN_TOKENS,
            )
            assert found[layer.name] == predicted, layer.name


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_block_is_table_2_of_the_paper(tensor: int) -> None:
    """sbh/t (34 + 5as/h) bytes in bf16 (2205.05198, table 2), beside the statistics of two norms, eight bytes a row
    each; tensor parallelism alone keeps sbh (10 + 24/t + 5as/(ht))."""
    hidden, heads, length, micro_size = 1024, 16, 512, 2
    model = ModelConfig(
        vocabulary_size=1024, num_layers=1, hidden_size=hidden, num_heads=heads, max_positions=length, **DROPOUT
    )
    stream, rows = length * micro_size * hidden, length * micro_size
    scores = 5 * heads * length / hidden
    block = model_layers(model)[1]

    def kept(sequence_parallel: bool) -> int:
        return predicted_bytes(
            model, block, micro_size, length, "bf16", "unfused", tensor=tensor, sequence_parallel=sequence_parallel
        )

    assert kept(True) == stream * (34 + scores) / tensor + 16 * rows / tensor
    assert kept(False) == stream * (10 + (24 + scores) / tensor) + 16 * rows
