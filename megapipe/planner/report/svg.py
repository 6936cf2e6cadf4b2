"""What the pictures share: colours that follow the reader's light or dark page, text, boxes, legends.

A picture is an SVG document that needs nothing else. Its class names begin with `plan-`, so that several may stand in
one page.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

STYLE: Final = """<style>
.plan-ink { fill: #1d2430; } .plan-soft { fill: #5c6675; } .plan-paper { fill: #ffffff; } .plan-lane { fill: #f1f3f6; }
.plan-line { stroke: #dfe3e9; } .plan-limit { stroke: #c8234a; } .plan-limit-text { fill: #c8234a; }
.plan-front { stroke: #3b7dd8; fill: none; } .plan-point { fill: #3b7dd8; } .plan-best { fill: #c8234a; }
.plan-on-point { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
.plan-ink { fill: #e8ebf0; } .plan-soft { fill: #98a2b3; } .plan-paper { fill: #171c24; } .plan-lane { fill: #232a35; }
.plan-line { stroke: #333b48; } .plan-limit { stroke: #ff5c7f; } .plan-limit-text { fill: #ff5c7f; }
.plan-front { stroke: #6ea3e8; } .plan-point { fill: #6ea3e8; } .plan-best { fill: #ff5c7f; }
.plan-on-point { fill: #10141b; }
}
</style>"""

FONT: Final = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'
CHARACTER: Final = 6.8
"""Pixels that a character of 12 pixels' text takes, on average."""

Entry = tuple[str, str]
"""Colour and name, in a legend."""


def document(width: int, height: float, title: str, parts: Iterable[str]) -> str:
    """An SVG document of a size in pixels; title: at its top, and for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" '
            f'height="{height:g}" role="img" {FONT} font-size="12">',
            f"<title>{escape(title)}</title>",
            STYLE,
            f'<rect width="{width}" height="{height:g}" class="plan-paper"/>',
            text(12, 24, title, size=15, bold=True),
            *parts,
            "</svg>",
            "",
        ]
    )


def text(
    x: float, y: float, words: str, kind: str = "ink", anchor: str = "start", size: int = 12, bold: bool = False
) -> str:
    """A line of text whose baseline is at y. kind: of colour."""
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}"'
    return (
        f'<text {place} class="plan-{kind}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, colour: str, told: str) -> str:
    """A rectangle that tells of itself when pointed at."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(told)}</title></rect>'


def lane(x: float, y: float, width: float, height: float) -> str:
    """The background of a row."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="plan-lane"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "line", dashed: bool = False) -> str:
    """A straight line. kind: of colour."""
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    width = 1.5 if dashed else 1
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="plan-{kind}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def legend(entries: Sequence[Entry], x: float, y: float, width: float) -> tuple[list[str], float]:
    """Colours with their names from (x, y) on, within a width; and the y below them."""
    parts, left = [], x
    for colour, name in entries:
        size = 34 + CHARACTER * len(name)
        if left > x and left + size > x + width:
            left, y = x, y + 20
        parts.append(f'<rect x="{left:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(text(left + 18, y + 10.5, name, "soft"))
        left += size
    return parts, y + 20


def cut(words: str, width: float) -> str:
    """As many words as a width in pixels holds."""
    most = int(width / CHARACTER)
    return words if len(words) <= most else f"{words[: most - 3]}..."


def ticks(largest: float, most: int = 6) -> list[float]:
    """Round values from 0 up to `largest`, which is above 0: steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(largest))
    step = next(power * part for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if largest / (power * part) <= most)
    return [step * index for index in range(int(largest / step * (1 + 1e-9)) + 1)]
