"""Communication volumes in the closed forms of the papers; test_covering.py holds them to counted traffic."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.layout.costs import merged, repeated, scalar_exchanges
from megapipe.spec.layers import layer_ops
from megapipe.spec.ops import ELEMENT_BYTES, Exchange, MicrobatchShape, Precision, exchanges
from megapipe.spec.parameters import LayerKind

SIZES = st.integers(1, 4), st.sampled_from([16, 64, 256]), st.sampled_from([1, 2, 4, 8])
PRECISIONS = st.sampled_from(["fp32", "bf16"])


def shaped(heads: int, kv_heads: int | None = None, **fields: object) -> ModelConfig:
    return ModelConfig(num_layers=1, hidden_size=16 * heads, num_heads=heads, num_kv_heads=kv_heads, **fields)  # type: ignore[arg-type]


def exchanged(
    model: ModelConfig, kind: LayerKind = "block", forwards: int = 1, split: bool = False, **shape: Any
) -> list[Exchange]:
    """Exchanges of tensor ranks for one micro-batch. shape: fields of `MicrobatchShape`."""
    ops = layer_ops(kind, MicrobatchShape(model, **shape))
    return exchanges(ops, forwards=forwards, split=split).get("tensor", [])


def total_sent(exchanges: list[Exchange], members: int) -> float:
    return sum(each.sent(members) for each in exchanges)


@given(*SIZES, PRECISIONS)
def test_blocks_send_8_bsh_less_a_ranks_share(micro: int, length: int, tensor: int, precision: Precision) -> None:
    """arXiv 2104.04473, section 3.2: 8 b s h (t - 1) / t elements a layer and micro-batch."""
    model = shaped(8)
    exchanges = exchanged(model, micro_size=micro, sequence_length=length, precision=precision, tensor=tensor)
    elements = 8 * micro * length * model.hidden_size * (tensor - 1) / tensor
    assert total_sent(exchanges, tensor) == pytest.approx(elements * ELEMENT_BYTES[precision])


def test_recomputed_blocks_send_half_as_much_more() -> None:
    model = shaped(8)
    once, twice = (exchanged(model, sequence_length=64, tensor=4, forwards=n) for n in (1, 2))
    assert total_sent(twice, 4) == 1.5 * total_sent(once, 4)


def test_ranks_sum_gradients_of_query_and_key_norms() -> None:
    plain, normed = shaped(8), shaped(8, qk_norm=True)
    without, with_norms = (merged(exchanged(each, sequence_length=64, tensor=2)) for each in (plain, normed))
    assert with_norms["all_reduce"][0] - without["all_reduce"][0] == 2
    assert with_norms["all_reduce"][1] - without["all_reduce"][1] == 2 * normed.head_dim


def test_a_head_exchanges_what_it_predicts() -> None:
    model = shaped(8)
    bert = BertModelConfig(num_layers=1, hidden_size=128, num_heads=8)
    for each, predictions, rows in ((model, None, 2 * 64), (bert, 10, 2 * 10)):
        shape = {"micro_size": 2, "sequence_length": 64, "tensor": 4, "predictions": predictions}
        assert merged(exchanged(each, "head", precision="bf16", **shape)) == {
            "all_reduce": (1, rows * model.hidden_size, 2 * rows * model.hidden_size),
            "all_gather": (1, 4 * 3 * rows, 4 * 12 * rows),
        }


def test_everyone_exchanges_counts_norms_and_losses() -> None:
    counts, norms = scalar_exchanges(num_parameters=100, loss_terms=2, updates=4)
    assert (counts.elements, norms.elements, counts.element_bytes) == (11, 102, 8)


def test_exchanges_add_up() -> None:
    exchange = Exchange("all_reduce", 10, 4, calls=2)
    assert merged([exchange, *repeated([exchange], 3)]) == {"all_reduce": (8, 80, 320)}
    assert exchange.sent(1) == 0


@pytest.mark.parametrize(("halves", "sent"), [(False, 10), (True, 12)])
@given(*SIZES, PRECISIONS)
def test_sharded_blocks_send_10_bsh_or_12_when_split(
    halves: bool, sent: int, micro: int, length: int, tensor: int, precision: Precision
) -> None:
    """docs/sequence_parallel.md: 8 of arXiv 2205.05198, section 4.2.2, and what is gathered again instead of kept."""
    model = shaped(8)
    elements = sent * micro * length * model.hidden_size * (tensor - 1) / tensor
    for chunks in (1, 2):
        shape = {"micro_size": micro, "sequence_length": length, "precision": precision, "tensor": tensor}
        exchanges = exchanged(model, split=halves, sequence_parallel=True, sequence_chunks=chunks, **shape)
        assert total_sent(exchanges, tensor) == pytest.approx(elements * ELEMENT_BYTES[precision])
