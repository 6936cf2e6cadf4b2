"""The tokens of a sample that each rank of a context-parallel group holds, and the pieces of ring attention.

Under a causal mask late tokens see more than early ones. `head_tail` cuts a sample into twice as many chunks as ranks
and pairs an early with a late one, so that all ranks have the same work (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

import numpy as np

from megapipe.spec.ops import ContextAttention

TokenOrder = Literal["head_tail", "contiguous"]
PieceKind = Literal["full", "causal", "masked"]

STRIP = 1024
"""Maximum number of queries of a masked piece, so that the size of its scores is not quadratic in a long sample."""


def order_of(attention: ContextAttention, causal: bool) -> TokenOrder:
    """Return the order that balances the work: head_tail for a ring under a causal mask.

    Otherwise chunks are in rank order: all_to_all distributes heads, which cost the same, and without a causal mask
    tokens cost the same too.
    """
    return "head_tail" if attention == "ring" and causal else "contiguous"


def chunks_per_rank(order: TokenOrder) -> int:
    """Return the number of chunks of adjacent tokens that a rank holds."""
    return 2 if order == "head_tail" else 1


def chunks_of(order: TokenOrder, rank: int, size: int) -> tuple[int, ...]:
    """Return the numbers of the chunks of rank i = `rank` of `size`: i and 2 size - 1 - i for head_tail, or else i."""
    return (rank, 2 * size - 1 - rank) if order == "head_tail" else (rank,)


@dataclass(frozen=True)
class Share:
    """The part of every sample that rank `rank` of `size` holds."""

    order: TokenOrder
    rank: int
    size: int

    def numbers(self, length: int) -> np.ndarray:
        """Return the positions of the tokens that the rank holds of a sample of `length` tokens: int64
        [length / size], ascending.

        Raises ValueError if the chunks do not have equal lengths.
        """
        parts = chunks_per_rank(self.order) * self.size
        if length % parts:
            raise ValueError(
                f"a sample of {length} tokens cannot be divided into {parts} equal chunks for "
                f"{self.size} context ranks; use a multiple of {parts} tokens"
            )
        chunk, chunks = length // parts, chunks_of(self.order, self.rank, self.size)
        return (chunk * np.array(chunks)[:, None] + np.arange(chunk)).ravel()


@dataclass(frozen=True)
class Piece:
    """Some queries of a rank against some keys of the same or another rank, as ranges of what each holds.

    kind: full, every query sees every key; causal, both are the same tokens and a query sees those up to itself;
    masked, a mask says what is seen.
    """

    queries: range
    keys: range
    kind: PieceKind

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that are computed; kernels skip what a causal piece hides."""
        rows, columns = len(self.queries), len(self.keys)
        return rows * (rows + 1) // 2 if self.kind == "causal" else rows * columns


@dataclass(frozen=True)
class Visibility:
    """The rules that decide which tokens a token sees, in every sample.

    causal: no token sees later ones. window: each token sees itself and the window - 1 tokens before it, and without a
    causal mask also those after it. masked: what a token sees also depends on the sample, by documents or padding.
    """

    causal: bool
    window: int | None = None
    masked: bool = False


def pieces(
    visibility: Visibility, order: TokenOrder, query_rank: int, key_rank: int, size: int, num_local: int
) -> list[Piece]:
    """Return the work of rank `query_rank` on the keys of `key_rank`, each holding num_local tokens of a sample.

    Chunks that the causal mask or the window hides are left out, and neighbouring rectangles joined.
    """
    chunk = num_local // chunks_per_rank(order)

    def places(number: int) -> range:
        return range(number * chunk, (number + 1) * chunk)

    if query_rank == key_rank and visibility.causal and not _cuts(visibility, size * num_local):
        return [Piece(range(num_local), range(num_local), "causal")]
    chunk_pieces: list[Piece] = []
    for row, query in enumerate(chunks_of(order, query_rank, size)):
        for column, key in enumerate(chunks_of(order, key_rank, size)):
            kind = _kind(visibility, places(query), places(key))
            if kind is not None:
                chunk_pieces.append(Piece(places(row), places(column), kind))
    return [strip for piece in _joined(chunk_pieces) for strip in _strips(piece)]


def slice_pieces(visibility: Visibility, queries: range, keys: range) -> list[Piece]:
    """Return the work of one slice of a sample on the keys of the same or an earlier slice. queries, keys: positions
    in the sample."""
    kind = _kind(visibility, queries, keys)
    if kind is None:
        return []
    return list(_strips(Piece(range(len(queries)), range(len(keys)), kind)))


def _cuts(visibility: Visibility, length: int) -> bool:
    """Return whether anything but the causal mask hides tokens."""
    return visibility.masked or (visibility.window is not None and visibility.window < length)


def _kind(visibility: Visibility, queries: range, keys: range) -> PieceKind | None:
    """Return how a chunk of queries sees a chunk of keys, which may be the same one; None if it sees no key."""
    window, first, last = visibility.window, *sorted((queries, keys), key=attrgetter("start"))
    if visibility.causal and keys.start > queries.start:
        return None
    if window is not None and last.start - (first.stop - 1) >= window:
        return None
    if visibility.masked or (window is not None and last.stop - 1 - first.start >= window):
        return "masked"
    if not visibility.causal:
        return "full"
    return "causal" if keys == queries else "full"


def _joined(chunk_pieces: Sequence[Piece]) -> list[Piece]:
    """Join adjacent pieces of the same kind; causal ones stay separate."""
    joined: list[Piece] = []
    for piece in chunk_pieces:
        last = joined[-1] if joined else None
        if last is None or last.kind != piece.kind or piece.kind == "causal":
            joined.append(piece)
        elif last.queries == piece.queries and last.keys.stop == piece.keys.start:
            joined[-1] = replace(piece, keys=range(last.keys.start, piece.keys.stop))
        elif last.keys == piece.keys and last.queries.stop == piece.queries.start:
            joined[-1] = replace(piece, queries=range(last.queries.start, piece.queries.stop))
        else:
            joined.append(piece)
    return joined


def _strips(piece: Piece) -> Iterator[Piece]:
    if piece.kind != "masked":
        yield piece
        return
    for start in range(piece.queries.start, piece.queries.stop, STRIP):
        yield Piece(range(start, min(start + STRIP, piece.queries.stop)), piece.keys, "masked")
