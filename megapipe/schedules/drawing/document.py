"""What fills the interactive page: lines of bars on one time axis, and curves below them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from megapipe.schedules.drawing.bars import Bar
from megapipe.schedules.drawing.page import PAGE
from megapipe.schedules.drawing.palette import NAMES, fill, ink


@dataclass(frozen=True)
class Line:
    """One row of bars: its label, the height of its compute and the gap below it, in pixels."""

    label: str
    soft: bool = False
    height: int = 26
    gap: int = 8


@dataclass(frozen=True)
class Curves:
    """What is drawn below the bars: per rank (time, value) at every change; ``top`` is the least upper end."""

    title: str
    name: str
    values: list[list[tuple[float, float]]]
    top: float


def html_page(
    title: str,
    figures: list[list[str]],
    lines: list[Line],
    bars: Sequence[tuple[int, Bar, str]],
    finish: float,
    curves: Curves,
) -> str:
    """An HTML document. bars: on which line, and a note for who points at it, empty for the curve's value there."""
    rows = [_row(*each) for each in bars]
    kinds = sorted({bar.kind for _, bar, _ in bars})
    data = {
        "lines": [vars(line) for line in lines],
        "finish": finish,
        "figures": figures,
        "kinds": {int(kind): NAMES[kind] for kind in kinds},
        "legend": [[NAMES[kind], fill(kind, 0)] for kind in kinds],
        "bars": rows,
        "curves": curves.values,
        "curves_name": curves.name,
        "curves_top": curves.top,
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return PAGE.replace("@TITLE@", escape(title)).replace("@CURVES@", escape(curves.title)).replace("@DATA@", text)


def _row(line: int, bar: Bar, note: str) -> list[Any]:
    """The fields that the page names, in its order."""
    colour = fill(bar.kind, bar.chunk)
    times = round(bar.start, 9), round(bar.end, 9), round(bar.wait, 9)
    place = line, bar.rank, bar.lane, int(bar.kind), bar.stage, bar.microbatch, bar.step
    return [*place, *times, int(bar.critical), bar.text, note, colour, ink(colour)]
