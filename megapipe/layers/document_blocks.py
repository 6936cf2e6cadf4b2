"""Attention within documents on a GPU: torch's flex_attention over the blocks of keys that a block of queries sees.

Blocks that hold nothing visible cost nothing (Dong et al., "Flex Attention", arXiv 2412.05496, section 3.2), where a
mask costs the whole square of the sample's length. Which blocks those are follows from where documents begin, without
a look at a token and without a square in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Queries, and keys, of a block."""


@dataclass(frozen=True)
class BlockLists:
    """Which blocks of keys each block of queries sees: int32 [b, 1, blocks] how many, [b, 1, blocks, blocks] which,
    those that are seen first. partial: some of their keys by some queries. full: all of their keys by all queries.
    """

    num_partial: np.ndarray
    partial: np.ndarray
    num_full: np.ndarray
    full: np.ndarray


def block_lists(document_starts: np.ndarray, window: int | None, block: int = BLOCK) -> BlockLists:
    """For document_starts int64 [b, s]; each token sees its own document up to itself, at most `window` in all."""
    length = document_starts.shape[1]
    first = document_starts
    if window is not None:
        first = np.maximum(first, np.arange(length) - (window - 1))
    begins = np.arange(0, length, block)
    last = np.minimum(begins + block, length) - 1
    # The first visible key never falls from one query to the next.
    queries, keys = np.arange(len(begins))[:, None], np.arange(len(begins))
    lowest, whole_from = first[:, begins, None] // block, -(-first[:, last, None] // block)
    full = (keys >= whole_from) & (keys < queries) & (last == begins + block - 1)[:, None]
    partial = (keys >= lowest) & (keys <= queries) & ~full
    return BlockLists(*_listed(partial), *_listed(full))


def _listed(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [b, n, n] to how many of each row, and which, ascending, followed by the others."""
    order = np.argsort(~wanted, axis=-1, kind="stable").astype(np.int32)
    return wanted.sum(axis=-1, dtype=np.int32)[:, None], order[:, None]


def document_blocks(lists: Sequence[Tensor], document_starts: Tensor, window: int | None) -> BlockMask:
    """What flex_attention takes. lists: those of BlockLists in order, and document_starts [b, s], on one device."""

    def visible(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (key >= document_starts[sample, query])
        return seen if window is None else seen & (query - key < window)

    length = document_starts.shape[1]
    num_partial, partial, num_full, full = lists
    return BlockMask.from_kv_blocks(
        num_partial,
        partial,
        num_full,
        full,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float) -> Tensor:
    """Mixed values [b, heads, s, d] of query [b, heads, s, d] and of keys and values [b, kv heads, s, d]."""
    compiles = query.device.type == "cuda" and not torch.compiler.is_compiling()
    function = _compiled() if compiles else flex_attention
    mixed: Tensor = function(
        query, key, value, block_mask=blocks, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return mixed


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """Uncompiled, flex_attention makes the whole square of scores."""
    return torch.compile(flex_attention)
