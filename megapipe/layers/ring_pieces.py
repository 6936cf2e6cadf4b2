"""What of a square of queries and keys a rank of a ring computes, as rectangles: no torch, no data, numbers alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megapipe.layout.token_order import TokenOrder, chunks_of, chunks_per_rank

Kind = Literal["full", "causal", "masked"]

STRIP = 1024
"""Most queries of a masked piece, so that its scores never take the square of a long sample."""


@dataclass(frozen=True)
class Piece:
    """Some queries of a rank against some keys of the same or another rank, as ranges of what each holds.

    kind: full, every query sees every key; causal, both are the same tokens and a query sees those up to itself;
    masked, a mask says what is seen.
    """

    queries: range
    keys: range
    kind: Kind

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that are computed; kernels skip what a causal piece hides."""
        rows, columns = len(self.queries), len(self.keys)
        return rows * (rows + 1) // 2 if self.kind == "causal" else rows * columns


@dataclass(frozen=True)
class Visibility:
    """What is known of who sees whom before any sample is.

    causal: no token sees later ones. window: each sees itself and this many minus one before it. masked: the samples
    decide too, by documents or padding.
    """

    causal: bool
    window: int | None = None
    masked: bool = False


def pieces(
    visibility: Visibility, order: TokenOrder, query_rank: int, key_rank: int, size: int, num_local: int
) -> list[Piece]:
    """The work of rank `query_rank` on the keys of `key_rank`, each holding num_local tokens of a sample.

    Chunks that the causal mask or the window hides are left out, and neighbouring rectangles joined.
    """
    chunk = num_local // chunks_per_rank(order)
    if query_rank == key_rank and visibility.causal and not _cuts(visibility, size * num_local):
        return [Piece(range(num_local), range(num_local), "causal")]
    found: list[Piece] = []
    for row, query in enumerate(chunks_of(order, query_rank, size)):
        for column, key in enumerate(chunks_of(order, key_rank, size)):
            kind = _kind(visibility, query * chunk, key * chunk, chunk)
            if kind is not None:
                rows, columns = (range(place * chunk, (place + 1) * chunk) for place in (row, column))
                found.append(Piece(rows, columns, kind))
    return [strip for piece in _joined(found) for strip in _strips(piece)]


def _cuts(visibility: Visibility, length: int) -> bool:
    """Whether anything but the causal mask hides tokens."""
    return visibility.masked or (visibility.window is not None and visibility.window < length)


def _kind(visibility: Visibility, query: int, key: int, chunk: int) -> Kind | None:
    """How the chunk of queries from `query` on sees the keys from `key` on; None: not at all."""
    window = visibility.window
    if visibility.causal and key > query:
        return None
    if visibility.causal and window is not None and query - (key + chunk - 1) >= window:
        return None
    if visibility.masked:
        return "masked"
    if not visibility.causal:
        return "full"
    if window is not None and query + chunk - 1 - key >= window:
        return "masked"
    return "causal" if key == query else "full"


def _joined(found: Sequence[Piece]) -> list[Piece]:
    """The same with pieces of one kind joined that lie side by side; causal ones stand alone."""
    joined: list[Piece] = []
    for piece in found:
        last = joined[-1] if joined else None
        if last is None or last.kind != piece.kind or piece.kind == "causal":
            joined.append(piece)
        elif last.queries == piece.queries and last.keys.stop == piece.keys.start:
            joined[-1] = Piece(piece.queries, range(last.keys.start, piece.keys.stop), piece.kind)
        elif last.keys == piece.keys and last.queries.stop == piece.queries.start:
            joined[-1] = Piece(range(last.queries.start, piece.queries.stop), piece.keys, piece.kind)
        else:
            joined.append(piece)
    return joined


def _strips(piece: Piece) -> Iterator[Piece]:
    if piece.kind != "masked":
        yield piece
        return
    for start in range(piece.queries.start, piece.queries.stop, STRIP):
        yield Piece(range(start, min(start + STRIP, piece.queries.stop)), piece.keys, "masked")
