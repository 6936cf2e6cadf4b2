"""Draw the loss curves of several runs over each other: as text, SVG picture, PNG picture or HTML page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

import numpy as np

from megapipe.cli.run_reader import Run
from megapipe.training.observe.metrics import smoothed

Axis = Literal["steps", "tokens", "time"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "time")
_AXIS_LABELS = {"steps": "step", "tokens": "tokens", "time": "hours of training"}

COLOURS = ("#1f6fb4", "#d9541e", "#3a8f3a", "#8a4fb0", "#b8860b", "#c2407e")
"""Colours that are legible on white and on dark grey. The seventh run has the first colour again, dashed."""

MAX_POINTS = 1500
"""Approximate maximum number of points of a curve in a picture."""

_WIDTH, _HEIGHT = 860, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 20, 16, 46


@dataclass(frozen=True)
class Curve:
    """Losses of one run. x, loss: smoothed training, float64 [n]. held_out_x, held_out: validation, float64 [k]."""

    name: str
    x: np.ndarray
    loss: np.ndarray
    held_out_x: np.ndarray
    held_out: np.ndarray


def curve_of(run: Run, name: str, axis: Axis) -> Curve:
    """Return a run's loss over steps, tokens or hours of training, for the steps that led to its newest weights."""
    steps = np.array(sorted(run.steps), dtype=np.float64)
    if axis == "steps":
        places = steps
    elif axis == "tokens":
        places = np.cumsum([run.steps[int(step)].tokens or 0.0 for step in steps])
    else:
        places = np.cumsum([run.steps[int(step)].seconds or 0.0 for step in steps]) / 3600
    training = sorted(run.history.training)
    held_out = sorted(run.history.evaluation)
    losses = smoothed(np.array([run.history.training[step] for step in training], dtype=np.float64))
    x = np.interp(training, steps, places) if len(steps) else np.zeros(0)
    stride = max(1, math.ceil(len(x) / MAX_POINTS))
    chosen = np.unique(np.append(np.arange(0, len(x), stride), len(x) - 1)) if len(x) else np.zeros(0, dtype=int)
    return Curve(
        name,
        x[chosen],
        losses[chosen],
        np.interp(held_out, steps, places, left=0.0) if len(steps) else np.array(held_out, dtype=np.float64),
        np.array([run.history.evaluation[step] for step in held_out], dtype=np.float64),
    )


@dataclass(frozen=True)
class AxisRanges:
    """Ranges of both axes."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, curves: Sequence[Curve]) -> "AxisRanges | None":
        """Return the box around all points, or None if there are no points."""
        x = np.concatenate([each for curve in curves for each in (curve.x, curve.held_out_x)])
        y = np.concatenate([each for curve in curves for each in (curve.loss, curve.held_out)])
        if not len(y):
            return None
        left, right = _apart(float(x.min()), float(x.max()), 0.0)
        return cls(left, right, *_apart(float(y.min()), float(y.max()), 0.04))


def _apart(low: float, high: float, margin: float) -> tuple[float, float]:
    """Return a range with a margin relative to its size, or a wider range if the numbers are almost equal."""
    size = max(abs(low), abs(high))
    if high - low > 1e-6 * size and size > 1e-100:
        return low - margin * (high - low), high + margin * (high - low)
    pad = 0.05 * max(size, 1.0)
    return low - pad, high + pad


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """Return a short form of a number for an axis: 0.25, 1,500, 20k, 3M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.6g}{unit}"
    return f"{value:,.6g}"


def text_plot(curves: Sequence[Curve], axis: Axis, width: int, height: int = 18) -> list[str]:
    """Draw curves with one letter per run; `*` marks several runs. width: width of the lines, in characters."""
    box = AxisRanges.around(curves)
    if box is None:
        return ["no losses yet"]
    columns = max(20, width - 10)
    cells = [[" "] * columns for _ in range(height)]
    for number, curve in enumerate(curves):
        letter = chr(ord("a") + number % 26)
        if len(curve.x):
            places = np.linspace(curve.x[0], curve.x[-1], 4 * columns)
            points = zip(places, np.interp(places, curve.x, curve.loss), strict=True)
        else:
            points = zip(curve.held_out_x, curve.held_out, strict=True)
        for x, y in points:
            column = round((x - box.left) / (box.right - box.left) * (columns - 1))
            row = round((box.high - y) / (box.high - box.low) * (height - 1))
            cells[row][column] = letter if cells[row][column] in (" ", letter) else "*"
    marks = {
        round((box.high - value) / (box.high - box.low) * (height - 1)): label(value)
        for value in ticks(box.low, box.high, 5)
    }
    lines = [f"{marks.get(row, ''):>8} |{''.join(cells[row]).rstrip()}" for row in range(height)]
    left, right = label(box.left), label(box.right)
    words = f"{_AXIS_LABELS[axis]} (vertical: training loss, nats per token)"
    lines.append(f"{'':>8} +{'-' * columns}")
    lines.append(f"{'':>10}{left}{right.rjust(columns - len(left))}")
    lines.append(f"{'':>10}{words}")
    return lines + [f"{'':>10}{chr(ord('a') + number % 26)}  {curve.name}" for number, curve in enumerate(curves)]


def svg(curves: Sequence[Curve], axis: Axis, *, standalone: bool) -> str:
    """Return the picture. standalone: include the style sheet; otherwise the page that contains the picture has it."""
    box = AxisRanges.around(curves) or AxisRanges(0, 1, 0, 1)
    across, down = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    height = _HEIGHT + 20 * len(curves)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - box.left) / (box.right - box.left) * across,
            _TOP + (box.high - y) / (box.high - box.low) * down,
        )

    elements = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">']
    if standalone:
        elements.append(f"<style>{_STYLE}</style>")
        elements.append(f'<rect class="paper" width="{_WIDTH}" height="{height}"/>')
    for value in ticks(box.low, box.high, 6):
        y = place(box.left, value)[1]
        elements.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        elements.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label(value)}</text>')
    for value in ticks(box.left, box.right, 7):
        if axis == "steps" and value % 1:
            continue  # there are no fractions of a step
        x = place(value, box.low)[0]
        elements.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        elements.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 17}" text-anchor="middle">{label(value)}</text>')
    elements.append(
        f'<text x="{_LEFT + across / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{_AXIS_LABELS[axis]}</text>'
        f'<text transform="translate(14 {_TOP + down / 2}) rotate(-90)" text-anchor="middle">loss (nats per token)'
        "</text>"
    )
    for number, curve in enumerate(curves):
        colour, dashes = COLOURS[number % len(COLOURS)], _dashes(number)
        if len(curve.x):
            points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(curve.x, curve.loss, strict=True))
            elements.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes} '
                'stroke-linejoin="round"/>'
            )
        for x, y in zip(curve.held_out_x, curve.held_out, strict=True):
            across_x, down_y = place(x, y)
            elements.append(f'<circle cx="{across_x:.1f}" cy="{down_y:.1f}" r="3.2" fill="{colour}"/>')
        y = _HEIGHT + 20 * number + 8
        elements.append(f'<path d="M{_LEFT} {y}h26" stroke="{colour}" stroke-width="2.4"{dashes}/>')
        elements.append(f'<text x="{_LEFT + 34}" y="{y + 4}">{_escaped(legend(curve))}</text>')
    return "\n".join([*elements, "</svg>"])


def legend(curve: Curve) -> str:
    """Return a curve's name with its last losses."""
    training = f", training {curve.loss[-1]:.3f}" if len(curve.loss) else ""
    held_out = f", validation {curve.held_out[-1]:.3f}" if len(curve.held_out) else ""
    return f"{curve.name}{training or ', no training loss'}{held_out}"


def html(title: str, curves: Sequence[Curve], axis: Axis, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return a page without references to other files. rows: a table with a heading. notes: lines below it."""
    heading, *body = [[_escaped(cell) for cell in row] for row in rows]
    table = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in body)
    head = "".join(f"<th>{cell}</th>" for cell in heading)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_escaped(title)}</title>
<style>{_STYLE}{_PAGE_STYLE}</style>
<h1>{_escaped(title)}</h1>
{svg(curves, axis, standalone=False)}
<p>Lines are training losses, averaged over a fiftieth of the run; points are validation losses.</p>
<div><table><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table></div>
{"".join(f"<p>{_escaped(note)}</p>" for note in notes)}
</html>
"""


def write_png(path: Path, curves: Sequence[Curve], axis: Axis) -> None:
    """Draw the picture to a PNG file. Raises OSError."""
    from matplotlib.figure import Figure  # the import takes half a second
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        colour, style = COLOURS[number % len(COLOURS)], "--" if _dashes(number) else "-"
        name = legend(curve).replace("$", r"\$")
        axes.plot(curve.x, curve.loss, color=colour, linestyle=style, linewidth=1.8, label=name)
        axes.plot(curve.held_out_x, curve.held_out, "o", color=colour, markersize=4)
    axes.set(xlabel=_AXIS_LABELS[axis], ylabel="loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=axis == "steps"))
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, format="png")


def _dashes(number: int) -> str:
    return ' stroke-dasharray="6 4"' if number >= len(COLOURS) else ""


def _escaped(text: str) -> str:
    """Return text for HTML and SVG. Characters that XML does not allow are replaced."""
    return escape("".join(each if each.isprintable() else "�" for each in text))


_STYLE = """
svg{font:13px system-ui,sans-serif}
text{fill:#333}.grid{stroke:#e3e3e3;fill:none}.paper{fill:#fff}
@media (prefers-color-scheme:dark){text{fill:#ccc}.grid{stroke:#3a3a3a}.paper{fill:#1b1b1b}}
"""
_PAGE_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.3em}div{overflow-x:auto}table{border-collapse:collapse}
th,td{padding:.25em .9em .25em 0;text-align:left;border-bottom:1px solid #ddd;white-space:nowrap}
@media (prefers-color-scheme:dark){body{color:#ddd;background:#1b1b1b}th,td{border-color:#444}}
"""
