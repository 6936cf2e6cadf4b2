"""Draws docs/pictures/mesh.svg: which rank stands where, on which node, and who talks to whom. Needs no torch.

python docs/draw_mesh.py > docs/pictures/mesh.svg
"""

from collections.abc import Iterator
from html import escape

SIZES = {"data": 2, "pipeline": 2, "context": 2, "tensor": 2}
"""Slowest first: neighbours in tensor have neighbouring ranks."""
COLOURS = {"data": "#b26bb5", "pipeline": "#3b7dd8", "context": "#3f9c6c", "tensor": "#e08a1e"}
WHAT = {
    "tensor": "tensor: halves of every matrix; sums of activations, several times a layer",
    "context": "context: halves of every sample; keys and values, in every attention",
    "pipeline": "pipeline: successive layers; activations of each micro-batch, once a boundary and direction",
    "data": "data: shares of every batch; sums of gradients, once a step",
}
INK, SOFT = "#1d2430", "#4a5361"
WIDTH, NODE_WIDTH, NODE_HEIGHT, GAP_X, GAP_Y, LEFT, TOP = 860, 300, 190, 90, 60, 120, 76
CELL_WIDTH, CELL_HEIGHT = 104, 54


def rank_of(data: int, pipeline: int, context: int, tensor: int) -> int:
    """Number of the rank at these coordinates."""
    rank = 0
    for size, place in zip(SIZES.values(), (data, pipeline, context, tensor), strict=True):
        rank = rank * size + place
    return rank


def draw() -> str:
    """The picture as an SVG document."""
    height = TOP + 2 * NODE_HEIGHT + GAP_Y + 44 + 22 * len(WHAT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        "<title>16 ranks: data 2 x pipeline 2 x context 2 x tensor 2 on four nodes</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(
            12, 26, "16 ranks: data 2 x pipeline 2 x context 2 x tensor 2", INK, 'font-size="15" font-weight="bold"'
        ),
        _text(12, 46, "four nodes of four GPUs: what talks most stays within a node", SOFT),
    ]
    for data in range(SIZES["data"]):
        y = TOP + data * (NODE_HEIGHT + GAP_Y)
        parts.append(_text(12, y + NODE_HEIGHT // 2 + 4, f"replica {data}", SOFT))
        for pipeline in range(SIZES["pipeline"]):
            parts += _node(data, pipeline)
    parts += _between_nodes()
    y = TOP + 2 * NODE_HEIGHT + GAP_Y + 34
    for name, text in WHAT.items():
        parts.append(_line(LEFT - 40, y - 4, LEFT - 8, y - 4, name))
        parts.append(_text(LEFT, y, text, INK))
        y += 22
    return "\n".join([*parts, "</svg>"]) + "\n"


def _corner(data: int, pipeline: int) -> tuple[int, int]:
    """Of a node."""
    return LEFT + pipeline * (NODE_WIDTH + GAP_X), TOP + data * (NODE_HEIGHT + GAP_Y)


def _node(data: int, pipeline: int) -> Iterator[str]:
    x, y = _corner(data, pipeline)
    node = data * SIZES["pipeline"] + pipeline
    yield (
        f'<rect x="{x}" y="{y}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="8" fill="#f1f3f6" stroke="#c3cad4"/>'
    )
    yield _text(x + 12, y + 20, f"node {node}: stage {pipeline}", SOFT)
    step_x, step_y = NODE_WIDTH - CELL_WIDTH - 40, NODE_HEIGHT - CELL_HEIGHT - 46
    left, top = x + 20, y + 32
    for place in range(2):
        row, column = top + place * step_y + CELL_HEIGHT / 2, left + place * step_x + CELL_WIDTH / 2
        yield _line(left + CELL_WIDTH, row, left + step_x, row, "tensor")
        yield _line(column, top + CELL_HEIGHT, column, top + step_y, "context")
    for context in range(SIZES["context"]):
        for tensor in range(SIZES["tensor"]):
            yield from _cell(left + tensor * step_x, top + context * step_y, data, pipeline, context, tensor)


def _cell(x: float, y: float, data: int, pipeline: int, context: int, tensor: int) -> Iterator[str]:
    yield f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="4" fill="#ffffff" stroke="#8b93a1"/>'
    middle = f'text-anchor="middle" data-rank="{data} {pipeline} {context} {tensor}"'
    yield _text(x + CELL_WIDTH / 2, y + 22, f"rank {rank_of(data, pipeline, context, tensor)}", INK, middle)
    place = f"context {context}, tensor {tensor}"
    yield _text(x + CELL_WIDTH / 2, y + 40, place, SOFT, 'text-anchor="middle" font-size="10"')


def _between_nodes() -> Iterator[str]:
    for place in range(2):
        x, y = _corner(place, 0)
        middle = y + NODE_HEIGHT / 2
        yield _line(x + NODE_WIDTH, middle, x + NODE_WIDTH + GAP_X, middle, "pipeline")
        x, y = _corner(0, place)
        middle = x + NODE_WIDTH / 2
        yield _line(middle, y + NODE_HEIGHT, middle, y + NODE_HEIGHT + GAP_Y, "data")


def _line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{COLOURS[name]}" '
        'stroke-width="4" stroke-linecap="round"/>'
    )


def _text(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" {more}>{escape(text)}</text>'.replace(" >", ">")


if __name__ == "__main__":
    print(draw(), end="")
