"""Which tokens of a sample each rank of a context-parallel group holds: the one rule, in numpy.

Under a causal mask late tokens see more than early ones. `head_tail` cuts a sample into twice as many chunks as ranks
and pairs an early with a late one, so that all ranks have the same work (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

TokenOrder = Literal["head_tail", "contiguous"]
ContextAttention = Literal["ring", "all_to_all"]


def order_of(attention: ContextAttention, causal: bool) -> TokenOrder:
    """The order that balances the work: head_tail for a ring under a causal mask.

    Elsewhere chunks are in rank order: all_to_all shares heads out, which are alike, and without a causal mask so are
    tokens.
    """
    return "head_tail" if attention == "ring" and causal else "contiguous"


def chunks_per_rank(order: TokenOrder) -> int:
    """Stretches of neighbouring tokens that a rank holds."""
    return 2 if order == "head_tail" else 1


def chunks_of(order: TokenOrder, rank: int, size: int) -> tuple[int, ...]:
    """Numbers of the chunks of rank `rank` of `size`, of chunks_per_rank x size in all: i and 2 size - 1 - i, or i."""
    return (rank, 2 * size - 1 - rank) if order == "head_tail" else (rank,)


def token_numbers(order: TokenOrder, rank: int, size: int, length: int) -> np.ndarray:
    """int64 [length / size], ascending: places in a sample of `length` tokens of those that a rank holds.

    Raises ValueError where the chunks do not come out even.
    """
    parts = chunks_per_rank(order) * size
    if length % parts:
        raise ValueError(
            f"a sample of {length} tokens cannot be divided into {parts} equal chunks for {size} context ranks; use a "
            f"multiple of {parts} tokens"
        )
    chunk = length // parts
    return np.concatenate(
        [np.arange(each * chunk, (each + 1) * chunk, dtype=np.int64) for each in chunks_of(order, rank, size)]
    )


@dataclass(frozen=True)
class Share:
    """The part of every sample that rank `rank` of `size` holds."""

    order: TokenOrder
    rank: int
    size: int

    def numbers(self, length: int) -> np.ndarray:
        """As `token_numbers`, of samples of `length` tokens."""
        return token_numbers(self.order, self.rank, self.size, length)
