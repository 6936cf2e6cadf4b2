"""Draw docs/pictures/packages.svg: the packages, layer by layer, each with its contents.

The layers are those of the import contract in pyproject.toml, the descriptions those of the table in docs/design.md.
`make figures` writes the picture.
"""

import re
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INK, SOFT = "#1d2430", "#4a5361"
FILLS = {False: "#eef3fb", True: "#edf6ee"}
"""Colors of boxes. True: importing the package does not import torch."""
WIDTH, LEFT, TOP, GAP, LINE, LETTER = 960, 12, 62, 10, 15, 5.6


def layers() -> tuple[list[list[str]], set[str]]:
    """Return the packages of each layer, highest layer first, and the packages that do not import torch."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layered,) = [each for each in contracts if each["type"] == "layers"]
    torch_free = [
        each["source_modules"]
        for each in contracts
        if each["type"] == "forbidden" and "torch" in each["forbidden_modules"]
    ]
    rows = [row.split(" | ") for row in layered["layers"] if row != "__main__"]
    return rows, {name.removeprefix("megapipe.") for names in torch_free for name in names}


def descriptions() -> dict[str, str]:
    """Return what the table in docs/design.md says of each package."""
    rows = re.findall(
        r"^\| `([\w/]+)`[^|]* \| ([^|]+) \|$", (ROOT / "docs/design.md").read_text("utf-8"), re.MULTILINE
    )
    return {name.removeprefix("megapipe/"): re.sub(r"`| \(no torch\)", "", text) for name, text in rows}


def draw() -> str:
    """Return the picture as an SVG document."""
    rows, torch_free = layers()
    texts = descriptions()
    parts: list[str] = []
    y = TOP
    for row in rows:
        width = (WIDTH - 2 * LEFT - GAP * (len(row) - 1)) / len(row)
        wrapped = [textwrap.wrap(texts[name], int((width - 20) / LETTER)) for name in row]
        height = 32 + LINE * max(map(len, wrapped))
        for column, (name, lines) in enumerate(zip(row, wrapped, strict=True)):
            parts += _box(LEFT + column * (width + GAP), y, width, height, name, lines, name in torch_free)
        y += height + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
            'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
            "<title>The packages of megapipe, layer by layer</title>",
            f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>',
            _text(LEFT, 24, "The packages of megapipe", INK, 'font-size="15" font-weight="bold"'),
            _text(
                LEFT,
                44,
                "A package imports only packages in rows below its own. Green: imports neither torch nor triton.",
            ),
            *parts,
            "</svg>\n",
        ]
    )


def _box(x: float, y: float, width: float, height: float, name: str, lines: list[str], torch_free: bool) -> list[str]:
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{FILLS[torch_free]}" '
    return [
        box + 'stroke="#b9c2ce"/>',
        _text(x + 10, y + 19, name, INK, 'font-size="13" font-weight="bold"'),
        *(_text(x + 10, y + 36 + LINE * number, line) for number, line in enumerate(lines)),
    ]


def _text(x: float, y: float, text: str, color: str = SOFT, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" {more}>{escape(text)}</text>'.replace(" >", ">")


if __name__ == "__main__":
    print(draw(), end="")
