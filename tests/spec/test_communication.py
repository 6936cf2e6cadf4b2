"""Communication volumes in the closed forms of the papers; test_covering.py holds them to counted traffic."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.model import ModelConfig
from megapipe.spec.communication import (
    Exchange,
    merged,
    pipeline_exchange,
    repeated,
    replica_exchanges,
    scalar_exchanges,
    tensor_exchanges,
    total_sent,
)
from megapipe.spec.context import ContextAttention, all_to_all_bytes, context_exchanges, ring_bytes
from megapipe.spec.gpt import gpt_layers
from megapipe.spec.memory import ELEMENT_BYTES, Precision
from megapipe.spec.sequence import sequence_exchanges

SIZES = st.integers(1, 4), st.sampled_from([16, 64, 256]), st.sampled_from([1, 2, 4, 8])
PRECISIONS = st.sampled_from(["fp32", "bf16"])


def shaped(heads: int, kv_heads: int | None = None, **fields: object) -> ModelConfig:
    return ModelConfig(num_layers=1, hidden_size=16 * heads, num_heads=heads, num_kv_heads=kv_heads, **fields)  # type: ignore[arg-type]


@given(*SIZES, PRECISIONS)
def test_a_block_sends_8_bsh_of_which_a_rank_keeps_its_own_share(
    micro: int, length: int, tensor: int, precision: Precision
) -> None:
    """arXiv 2104.04473, section 3.2: 8 b s h (t - 1) / t elements a layer and micro-batch."""
    model = shaped(8)
    found = tensor_exchanges(model, gpt_layers(model)[1], micro, length, precision, tensor_size=tensor)
    elements = 8 * micro * length * model.hidden_size * (tensor - 1) / tensor
    assert total_sent(found, tensor) == pytest.approx(elements * ELEMENT_BYTES[precision])


def test_a_block_that_runs_again_sends_half_as_much_more() -> None:
    model = shaped(8)
    once, twice = (
        tensor_exchanges(model, gpt_layers(model)[1], 2, 64, "bf16", tensor_size=4, forwards=n) for n in (1, 2)
    )
    assert total_sent(twice, 4) == 1.5 * total_sent(once, 4)


def test_ranks_add_up_gradients_of_norms_that_each_applies_to_its_own_heads() -> None:
    plain, normed = shaped(8), shaped(8, qk_norm=True)
    without, found = (
        merged(tensor_exchanges(each, gpt_layers(each)[1], 1, 64, "fp32", tensor_size=2)) for each in (plain, normed)
    )
    assert found["all_reduce"][0] - without["all_reduce"][0] == 2
    assert found["all_reduce"][1] - without["all_reduce"][1] == 2 * normed.head_dim


def test_a_head_exchanges_what_it_predicts() -> None:
    model = shaped(8)
    head = gpt_layers(model)[-1]
    for predictions, rows in ((None, 2 * 64), (10, 2 * 10)):
        found = merged(tensor_exchanges(model, head, 2, 64, "bf16", tensor_size=4, predictions=predictions))
        assert found == {
            "all_reduce": (1, rows * model.hidden_size, 2 * rows * model.hidden_size),
            "all_gather": (1, 4 * 3 * rows, 4 * 12 * rows),
        }


@given(*SIZES, PRECISIONS)
def test_a_pipeline_edge_sends_bsh(micro: int, length: int, num_messages: int, precision: Precision) -> None:
    model = shaped(8)
    exchange = pipeline_exchange(model, micro, length, precision, num_messages)
    expected = num_messages * micro * length * model.hidden_size * ELEMENT_BYTES[precision]
    assert exchange.sent(2) == exchange.bytes == expected


@given(st.integers(1, 10**9), st.sampled_from([2, 4, 64, 1024]))
def test_replicas_send_two_or_three_times_the_parameters(parameters: int, replicas: int) -> None:
    """arXiv 1910.02054, section 7: 2 Psi for data parallelism and stages 1 and 2, 3 Psi for stage 3, at one precision
    and many replicas."""
    share = (replicas - 1) / replicas
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    for stage in stages:
        sent = total_sent(replica_exchanges(parameters, "fp32", stage=stage), replicas)
        assert sent == pytest.approx((3 if stage == 3 else 2) * 4 * parameters * share)


def test_replicas_gather_weights_in_their_own_precision() -> None:
    """Two gathers and one reduction a step, whatever the number of micro-batches; more where buffers are given up."""
    found = merged(replica_exchanges(1000, "bf16", stage=3, gathers=6, reductions=3))
    assert found == {"reduce_scatter": (3, 3000, 12000), "all_gather": (6, 6000, 12000)}
    assert merged(replica_exchanges(1000, "bf16", stage=1, reductions=3))["reduce_scatter"][0] == 1


def test_everyone_exchanges_counts_norms_and_losses() -> None:
    counts, norms = scalar_exchanges(num_parameters=100, loss_terms=2, updates=4)
    assert (counts.elements, norms.elements, counts.element_bytes) == (11, 102, 8)


def test_exchanges_add_up() -> None:
    exchange = Exchange("all_reduce", 10, 4, calls=2)
    assert merged([exchange, *repeated([exchange], 3)]) == {"all_reduce": (8, 80, 320)}
    assert exchange.sent(1) == 0


@pytest.mark.parametrize(("halves", "sent"), [(False, 10), (True, 12)])
@given(*SIZES, PRECISIONS)
def test_a_block_on_shards_of_the_tokens_sends_10_bsh_and_12_where_backwards_are_split(
    halves: bool, sent: int, micro: int, length: int, tensor: int, precision: Precision
) -> None:
    """docs/sequence_parallel.md: 8 of arXiv 2205.05198, section 4.2.2, and what is gathered again instead of kept."""
    model = shaped(8)
    block = gpt_layers(model)[1]
    elements = sent * micro * length * model.hidden_size * (tensor - 1) / tensor
    for chunks in (1, 2):
        found = sequence_exchanges(
            model, block, micro, length, precision, tensor_size=tensor, halves=halves, chunks=chunks
        )
        assert total_sent(found, tensor) == pytest.approx(elements * ELEMENT_BYTES[precision])


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
@given(st.integers(1, 3), st.sampled_from([2, 4]), st.sampled_from([1, 2]), PRECISIONS)
def test_context_ranks_send_the_bytes_of_the_formulas(
    kind: ContextAttention, micro: int, context: int, tensor: int, precision: Precision
) -> None:
    model = shaped(8, kv_heads=2)
    block, formula = gpt_layers(model)[1], ring_bytes if kind == "ring" else all_to_all_bytes
    expected = formula(model, micro, 64, precision, context, tensor_size=tensor)
    for forwards in (1, 2):
        found = context_exchanges(
            model, block, micro, 64, precision, kind, context, tensor_size=tensor, forwards=forwards
        )
        assert total_sent(found, context) == forwards * expected.forward + expected.backward
