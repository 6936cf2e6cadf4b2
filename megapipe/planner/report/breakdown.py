"""Where the time of a step goes, for one layout or for several beside each other."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from megapipe.config.words import bytes_told, seconds_told
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.report.svg import CHARACTER, box, cut, document, lane, legend, line, text, ticks

COLOURS: Final = {
    "compute": "#3b7dd8",
    "recompute": "#8fa3bd",
    "bubble": "#b9c0ca",
    "waiting": "#b9c0ca",
    "tensor": "#3f9c6c",
    "context": "#5fb3b3",
    "pipeline": "#e08a1e",
    "data": "#b26bb5",
    "update": "#8657c4",
}
OTHERS: Final = ("#a8894f", "#cdb587", "#c9a3d6", "#e9b872", "#7fa9dc", "#9bd3b5")
TOP, RIGHT, PITCH = 44, 150, 30
WIDEST_NAME = 290


class Row(NamedTuple):
    """A layout and what it is called."""

    name: str
    estimate: Estimate


def draw_breakdown(rows: Sequence[Row], title: str = "Time of a step, by what it goes into", width: int = 900) -> str:
    """One bar a layout, its step in terms; layouts that do not fit say so behind their bar."""
    left = 24 + min(WIDEST_NAME, CHARACTER * max(len(row.name) for row in rows))
    scale = (width - left - RIGHT) / max(row.estimate.step_seconds for row in rows)
    bottom = TOP + PITCH * len(rows)
    names = list(dict.fromkeys(term.name for row in rows for term in row.estimate.terms if term.seconds > 0))
    colours = _colours(names)
    parts = []
    for value in ticks((width - left - RIGHT) / scale):
        x = left + value * scale
        parts.append(line(x, TOP - 4, x, bottom))
        parts.append(text(x, bottom + 14, f"{value:g} s", "soft", "middle"))
    for index, (name, estimate) in enumerate(rows):
        y, x = TOP + index * PITCH, left
        parts.append(text(12, y + 16, cut(name, left - 12), "ink", bold=index == 0))
        parts.append(lane(left, y, width - left - RIGHT, PITCH - 6))
        for term in names:
            seconds = estimate.seconds_of(term)
            if seconds <= 0:
                continue
            told = f"{name}: {term} {seconds_told(seconds)}, {seconds / estimate.step_seconds:.1%} of the step"
            parts.append(box(x, y, seconds * scale, PITCH - 6, colours[term], told))
            x += seconds * scale
        parts += _end(estimate, width - RIGHT + 8, y)
    more, below = legend([(colours[name], name) for name in names], 12, bottom + 28, width - 24)
    return document(width, below + 6, title, parts + more)


def _end(estimate: Estimate, x: float, y: float) -> list[str]:
    told = seconds_told(estimate.step_seconds)
    if estimate.fits:
        return [text(x, y + 16, told)]
    missing = f"too large by {bytes_told(estimate.missing_bytes)}"
    return [text(x, y + 11, told, "soft"), text(x, y + 23, missing, "limit-text", size=10)]


def _colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each term: the known ones their own, others the next that is free."""
    unknown = [name for name in names if name not in COLOURS]
    return {name: COLOURS[name] if name in COLOURS else OTHERS[unknown.index(name) % len(OTHERS)] for name in names}
