"""Every token of a sample is on one rank, in ascending order, heads and tails together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.spec.token_order import Share, TokenOrder, chunks_per_rank, order_of


@given(st.sampled_from(["head_tail", "contiguous"]), st.integers(1, 9), st.integers(1, 9))
def test_ranks_hold_every_token_once(order: TokenOrder, size: int, chunk: int) -> None:
    length = chunks_per_rank(order) * size * chunk
    numbers_of_ranks = [Share(order, rank, size).numbers(length) for rank in range(size)]
    assert sorted(np.concatenate(numbers_of_ranks)) == list(range(length))
    for numbers in numbers_of_ranks:
        assert len(numbers) == length // size
        assert (np.diff(numbers) > 0).all()
    if order == "head_tail":
        assert len({int(numbers.sum()) for numbers in numbers_of_ranks}) == 1, "as far from the start on average"


def test_the_chunks_of_two_ranks() -> None:
    assert Share("head_tail", 0, 2).numbers(8).tolist() == [0, 1, 6, 7]
    assert Share("head_tail", 1, 2).numbers(8).tolist() == [2, 3, 4, 5]
    assert Share("contiguous", 1, 2).numbers(8).tolist() == [4, 5, 6, 7]


def test_indivisible_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"10 tokens cannot be divided into 4 equal chunks for 2 context ranks"):
        Share("head_tail", 0, 2).numbers(10)


def test_only_a_causal_ring_needs_head_and_tail() -> None:
    assert order_of("ring", causal=True) == "head_tail"
    assert {order_of("ring", causal=False), order_of("all_to_all", causal=True)} == {"contiguous"}
