"""Draw docs/pictures/context_ring.svg: which rank computes what under ring attention. `make figures` writes it."""

from megapipe.spec.token_order import TokenOrder, Visibility, chunks_of, chunks_per_rank, pieces

RANKS, CHUNKS = 4, 8
FILLS = ("#3b7dd8", "#e08a1e", "#3f9c6c", "#8657c4")
CELL, LEFT, TOP, GAP, ROW = 40, 70, 74, 120, 26
CAUSAL = Visibility(causal=True)


def draw() -> str:
    """Draw a causal sample in eight chunks on four ranks, as one ring with each order of tokens computes it."""
    side = CHUNKS * CELL
    width, height = LEFT + 2 * side + GAP + 20, TOP + side + 44 + RANKS * ROW + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        "<title>Who computes what of a causal sample on four context ranks</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 44, "queries down, keys across, in their order in the sample"),
        _text(LEFT, 60, "a square's number: the hop of the ring at which it is computed"),
        *_panel("head_tail", "head and tail: chunks i and 7 - i on rank i", LEFT),
        *_panel("contiguous", "rank order: late ranks do most", LEFT + side + GAP),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(order: TokenOrder, title: str, left: int) -> list[str]:
    side = CHUNKS * CELL
    parts = [_text(left, 24, title, size=15, weight="bold")]
    parts.append(f'<rect x="{left}" y="{TOP}" width="{side}" height="{side}" fill="#f1f3f6"/>')
    for rank in range(RANKS):
        held = _held(order, rank)
        parts += [_text(left - 8, TOP + each * CELL + 25, f"rank {rank}", anchor="end") for each in held]
        for hop in range(RANKS):
            parts += _computed(order, rank, hop, left)
    lines = range(CHUNKS + 1)
    parts += [_line(left + at * CELL, TOP, left + at * CELL, TOP + side) for at in lines]
    parts += [_line(left, TOP + at * CELL, left + side, TOP + at * CELL) for at in lines]
    return parts + _timeline(order, left, TOP + side + 44)


def _computed(order: TokenOrder, rank: int, hop: int, left: int) -> list[str]:
    """The squares of a hop: whole ones, and triangles where queries and keys are the same tokens."""
    other = (rank - hop) % RANKS
    rows, columns = _held(order, rank), _held(order, other)
    parts = []
    for piece in pieces(CAUSAL, order, rank, other, RANKS, len(rows)):
        for row in piece.queries:
            for column in piece.keys:
                x, y = left + columns[column] * CELL, TOP + rows[row] * CELL
                if piece.kind == "causal" and column > row:
                    continue
                corners = f"{x},{y} {x + CELL},{y + CELL} {x},{y + CELL}"
                if piece.kind != "causal" or column < row:
                    corners = f"{x},{y} {x + CELL},{y} {x + CELL},{y + CELL} {x},{y + CELL}"
                parts.append(f'<polygon points="{corners}" fill="{FILLS[rank]}"/>')
                place = (x + 12, y + 33) if column == row and piece.kind == "causal" else (x + 20, y + 25)
                parts.append(_text(*place, str(hop), colour="#ffffff", anchor="middle"))
    return parts


def _timeline(order: TokenOrder, left: int, top: int) -> list[str]:
    """The work of each hop side by side: a hop is over when its slowest rank is."""
    unit = CHUNKS * CELL / RANKS / 4.0
    parts = [_text(left, top - 14, "time, hop by hop")]
    at = float(left)
    for hop in range(RANKS):
        work = [_work(order, rank, hop) for rank in range(RANKS)]
        for rank, amount in enumerate(work):
            y = top + rank * ROW
            box = f'<rect x="{at:.1f}" y="{y}" width="{amount * unit:.1f}" height="{ROW - 6}" fill="{FILLS[rank]}"/>'
            parts += [box, _text(int(at) + 5, y + 14, str(hop), colour="#ffffff")] if amount else []
        at += max(work) * unit
        parts.append(_line(round(at), top - 4, round(at), top + RANKS * ROW))
    parts += [_text(left - 8, top + rank * ROW + 14, f"rank {rank}", anchor="end") for rank in range(RANKS)]
    return parts


def _work(order: TokenOrder, rank: int, hop: int) -> float:
    """Squares that a rank computes at a hop, the two triangles of a pair of chunks as one."""
    num_local = len(_held(order, rank))
    found = pieces(CAUSAL, order, rank, (rank - hop) % RANKS, RANKS, num_local)
    return sum(num_local**2 / 2 if p.kind == "causal" else p.num_pairs for p in found)


def _held(order: TokenOrder, rank: int) -> list[int]:
    """The eighths of the sample on a rank."""
    finer = CHUNKS // (chunks_per_rank(order) * RANKS)
    return [chunk * finer + part for chunk in chunks_of(order, rank, RANKS) for part in range(finer)]


def _text(
    x: int,
    y: int,
    text: str,
    *,
    size: int = 12,
    weight: str = "normal",
    colour: str = "#4a5361",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def _line(x: int, y: int, to_x: int, to_y: int) -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="#ffffff" stroke-width="1.5"/>'


if __name__ == "__main__":
    print(draw(), end="")
