"""Write the reports of `--html` and `--pictures`: pictures, and an HTML page that needs no other file."""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from megapipe.config.command_line import bytes_text, seconds_text, write_text
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.command.main import Request
from megapipe.planner.command.planning import (
    figures_cells,
    layout_cells,
    layout_text,
    run_line,
    terms_cells,
)
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import Prediction, estimate
from megapipe.planner.search.findings import Findings
from megapipe.schedules.drawing import draw_svg
from megapipe.schedules.drawing.bars import activation_curves, bars_of, drawn_rows
from megapipe.schedules.drawing.page import Curves, Line, html_page
from megapipe.schedules.simulation.simulate import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, PAPER, LANE, LINE = "#1d2430", "#5c6675", "#ffffff", "#f1f3f6", "#dfe3e9"
LIMIT, POINT = "#c8234a", "#3b7dd8"
DARK: Final = {INK: "#e8ebf0", SOFT: "#98a2b3", PAPER: "#171c24", LANE: "#232a35", LINE: "#333b48", LIMIT: "#ff5c7f"}
"""Color on a light page -> color on a dark page."""
MEMORY_COLORS: Final = {
    "weights": "#3b7dd8", "master": "#8657c4", "gradients": "#e08a1e", "moments": "#b26bb5",
    "activations": "#3f9c6c", "buffers": "#8b93a1", "messages": "#2f8f9d", "temporaries": "#c2554f",
}  # fmt: skip
TERM_COLORS: Final = {
    "compute": "#3b7dd8", "recompute": "#8fa3bd", "bubble": "#b9c0ca", "waiting": "#b9c0ca", "tensor": "#3f9c6c",
    "context": "#5fb3b3", "pipeline": "#e08a1e", "data": "#b26bb5", "update": "#8657c4",
}  # fmt: skip
OTHER_COLORS: Final = ("#a8894f", "#cdb587", "#c9a3d6", "#e9b872", "#7fa9dc", "#9bd3b5")
WIDTH: Final = 900
LONGEST_NAME, SHORT = 42, 20
"""Maximum characters of a layout's name in a picture, and of a cell without line breaks, such as `8.11 s`."""
MOST_ROWS: Final = 12
"""Maximum number of layouts that are listed below the picture of speed against memory."""
MOST_BARS: Final = 40_000
"""Maximum number of bars that a page draws smoothly. For larger schedules, it shows some evenly spaced ranks."""
DRAWN_RANKS, DRAWN_MICROBATCHES = 16, 64
"""Largest schedule that is legible in a static picture."""
SVG: Final = "http://www.w3.org/2000/svg"
NOTE: Final = "note: "
"""Prefix of the ids of parts with a tooltip; the rest of the id is the text of the tooltip."""


def memory_figure(estimate: Estimate) -> "Figure":
    """Return a figure with one stacked bar per pipeline coordinate, and the memory of its device as a line."""
    count = len(estimate.memory)
    pitch = 26 if count <= 16 else 14 if count <= 64 else 7
    axes = _chart("Memory of a rank, by pipeline coordinate", pitch * count, 84, 84, 70)
    left = [0.0] * count
    for name, color in MEMORY_COLORS.items():
        sizes = [getattr(memory, name) for memory in estimate.memory]
        if any(sizes):
            notes = [f"stage {at}: {name} {bytes_text(size)}" for at, size in enumerate(sizes)]
            left = _stack(axes, left, [size / 1e9 for size in sizes], name, color, notes)
    _rows(axes, count, max(*estimate.memory_limits, estimate.peak_bytes) / 1e9, "{x:g} GB")
    font_size = 12 if pitch > 7 else 9
    shown = [place for place in range(count) if pitch >= 14 or place % 8 == 0]
    axes.set_yticks(shown, [f"stage {place}" for place in shown], fontsize=font_size)
    for place in shown:
        _after(axes, place, bytes_text(estimate.memory[place].total), INK, font_size)
    limits = estimate.memory_limits
    starts = [at for at, each in enumerate(limits) if at == 0 or each != limits[at - 1]]
    for first, stop in zip(starts, [*starts[1:], count], strict=True):
        limit = limits[first] / 1e9
        axes.plot([limit, limit], [first - 0.5, stop - 0.5], color=LIMIT, linestyle="--", clip_on=False)
        text, align = f"device: {bytes_text(limits[first])}", "bottom" if first == 0 else "top"
        axes.text(limit, first - 0.6, text, color=LIMIT, fontsize=12, ha="right", va=align)
    _legend(axes)
    return axes.figure  # type: ignore[return-value]


def breakdown_figure(layouts: Mapping[str, Estimate], title: str = "Time of a step, by term") -> "Figure":
    """Return a figure with one bar per layout, stacked by term. A mark follows the bars of layouts that do not fit."""
    names = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..." for name in layouts]
    axes = _chart(title, 30 * len(layouts), 24 + 6.8 * max(map(len, names)), 150, 70)
    left = [0.0] * len(layouts)
    terms = list(dict.fromkeys(term.name for each in layouts.values() for term in each.terms if term.seconds > 0))
    others = iter(OTHER_COLORS * len(terms))
    for term in terms:
        seconds = [each.seconds_of(term) for each in layouts.values()]
        notes = [
            f"{name}: {term} {seconds_text(each)}, {each / estimate.step_seconds:.1%} of the step"
            for (name, estimate), each in zip(layouts.items(), seconds, strict=True)
        ]
        left = _stack(axes, left, seconds, term, TERM_COLORS.get(term) or next(others), notes)
    _rows(axes, len(layouts), max(each.step_seconds for each in layouts.values()), "{x:g} s")
    axes.set_yticks(range(len(layouts)), names, color=INK)
    axes.get_yticklabels()[0].set_fontweight("bold")
    for place, prediction in enumerate(layouts.values()):
        step_text = seconds_text(prediction.step_seconds)
        if prediction.fits:
            _after(axes, place, step_text, INK, 12)
        else:
            _after(axes, place - 0.2, step_text, SOFT, 10)
            _after(axes, place + 0.25, f"too large by {bytes_text(prediction.missing_bytes)}", LIMIT, 9)
    _legend(axes)
    return axes.figure  # type: ignore[return-value]


def pareto_figure(front: Sequence[Estimate], limit: float) -> "Figure":
    """Return a figure of the layouts that no other layout beats in both speed and memory.

    They are numbered, starting with the fastest, and listed below the axes. limit: bytes of a device.
    """
    listed = min(len(front), MOST_ROWS + 1)
    axes = _chart("Speed against memory of the fullest rank", 280, 84, 28, 46 + 18 * listed)
    x = [each.peak_bytes / 1e9 for each in front]
    y = [each.tokens_per_second for each in front]
    axes.set_xlim(0, max(limit / 1e9, *x))
    axes.set_ylim(0, 1.08 * max(y))
    axes.grid(color=LINE)
    axes.xaxis.set_major_formatter("{x:g} GB")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.text(-0.09, 1.02, "tokens per second", color=SOFT, fontsize=12, transform=axes.transAxes)
    axes.axvline(limit / 1e9, color=LIMIT, linestyle="--", clip_on=False)
    words, above = f"device: {bytes_text(limit)}", axes.get_xaxis_transform()
    axes.text(limit / 1e9, 1.02, words, color=LIMIT, fontsize=12, ha="right", transform=above)
    axes.plot(x, y, color=POINT)
    for index, covered in enumerate(_covered(axes, list(zip(x, y, strict=True)))):
        disc = axes.scatter(x[index], y[index], 36 if covered else 320, color=POINT if index else LIMIT, clip_on=False)
        disc.set_gid(f"{NOTE}{index + 1}: {layout_text(front[index].config)}")
        disc.set_zorder(2 if covered else 3)
        if not covered:
            number = {"ha": "center", "va": "center", "weight": "bold", "fontsize": 11}
            axes.text(x[index], y[index], str(index + 1), number, color=PAPER, zorder=4)
    for index, layout in enumerate(front[:MOST_ROWS]):
        color = SOFT if index else INK
        _below(axes, 84, index, str(index + 1), "right", color)
        _below(axes, 176, index, f"{layout.tokens_per_second:,.0f}", "right", color)
        _below(axes, 250, index, bytes_text(layout.peak_bytes), "right", color)
        _below(axes, 268, index, layout_text(layout.config), "left", color)
    if len(front) > MOST_ROWS:
        _below(axes, 268, MOST_ROWS, f"and {len(front) - MOST_ROWS} slower ones", "left", SOFT)
    return axes.figure  # type: ignore[return-value]


def _chart(title: str, height: float, left: float, right: float, below: float) -> "Axes":
    """Return axes with a title above them. height, and the margins left, right and below: pixels."""
    from matplotlib.figure import Figure

    above = 54
    whole = above + height + below
    figure = Figure((WIDTH / 72, whole / 72), dpi=72, facecolor=PAPER)
    figure.text(12 / WIDTH, 1 - 24 / whole, title, fontsize=15, weight="bold", color=INK)
    place = (left / WIDTH, below / whole, (WIDTH - left - right) / WIDTH, height / whole)
    axes = figure.add_axes(place, facecolor="none")
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=8, labelsize=12, labelcolor=SOFT)
    axes.locator_params(nbins=6, steps=[1, 2, 5, 10])
    return axes


def _rows(axes: "Axes", count: int, largest: float, unit: str) -> None:
    """Prepare axes for horizontal bars: values from 0 to `largest`, the first bar at the top, a lane for each bar."""
    axes.set_xlim(0, largest)
    axes.set_ylim(count - 0.5, -0.5)
    axes.grid(axis="x", color=LINE)
    axes.xaxis.set_major_formatter(unit)
    axes.barh(range(count), [largest] * count, color=LANE, zorder=0)


def _stack(
    axes: "Axes", left: list[float], widths: list[float], name: str, color: str, notes: list[str]
) -> list[float]:
    """Draw a part of each bar, with a tooltip, from `left` on; return the right ends."""
    bars = axes.barh(range(len(left)), widths, left=left, color=color, label=name, zorder=2, clip_on=False)
    for bar, note in zip(bars, notes, strict=True):
        bar.set_gid(f"{NOTE}{note}")
    return [start + width for start, width in zip(left, widths, strict=True)]


def _after(axes: "Axes", place: float, words: str, color: str, size: float) -> None:
    """Write text after the end of a bar's lane."""
    lane = axes.get_yaxis_transform()
    axes.text(1.01, place, words, color=color, fontsize=size, va="center", transform=lane)


def _below(axes: "Axes", x: float, row: int, words: str, align: str, color: str) -> None:
    """Write a line of the list below the axes. x: pixels from the figure's left edge."""
    words = words if len(words) <= 90 else f"{words[:87]}..."
    y = axes.bbox.y0 - 42 - 18 * row
    axes.figure.text(x / WIDTH, y / axes.figure.bbox.height, words, color=color, ha=align, fontsize=12)


def _legend(axes: "Axes") -> None:
    """Add a legend of the colors below the axes, with seven names per line."""
    look: dict[str, Any] = {"frameon": False, "labelcolor": SOFT, "fontsize": 12}
    spaces: dict[str, Any] = {"borderaxespad": 2.2, "handlelength": 1, "columnspacing": 1.4}
    left = -axes.bbox.x0 / axes.bbox.width  # the left edge of the figure
    axes.legend(loc="upper left", bbox_to_anchor=(left, 0), ncols=7, **look, **spaces)


def _covered(axes: "Axes", points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each point whether its disc would cover the disc of an earlier point that is not covered itself."""
    drawn: list[Any] = []
    covered = []
    for x, y in axes.transData.transform(points):
        covered.append(any(abs(x - left) < 18 and abs(y - top) < 18 for left, top in drawn))
        if not covered[-1]:
            drawn.append((x, y))
    return covered


def as_svg(figure: "Figure") -> str:
    """Return a figure as an SVG document with tooltips; its colors are variables of its own style sheet."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megapipe"}), io.StringIO() as written:
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        root = ElementTree.fromstring(written.getvalue())
    root.set("class", "plan-chart")
    for part in root.iter(f"{{{SVG}}}g"):
        name = part.attrib.pop("id", "")
        if name.startswith(NOTE):
            ElementTree.SubElement(part, f"{{{SVG}}}title").text = name.removeprefix(NOTE)
    for part in root.iter(f"{{{SVG}}}use"):
        part.set("href", part.attrib.pop("{http://www.w3.org/1999/xlink}href"))
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    ElementTree.register_namespace("", SVG)
    text = ElementTree.tostring(root, encoding="unicode")
    names = {color: f"--plan-{index}" for index, color in enumerate(DARK)}
    text = re.sub("|".join(DARK), lambda match: f"var({names[match[0]]})", text)
    light = "".join(f"{name}: {color}; " for color, name in names.items())
    dark = "".join(f"{names[color]}: {shade}; " for color, shade in DARK.items())
    style = f".plan-chart {{ {light}}} @media (prefers-color-scheme: dark) {{ .plan-chart {{ {dark}}} }}"
    head, end, rest = text.partition(">")
    return f"{head}{end}\n<style>{style}</style>{rest}\n"


STYLE: Final = """<style>
.plan { margin: 26px 24px 0; max-width: 1100px; }
.plan h3 { margin: 0 0 8px; font-size: 15px; }
.plan .wide { overflow-x: auto; }
.plan svg { max-width: 100%; min-width: 620px; height: auto; display: block; }
.plan p { margin: 4px 0 10px; color: var(--soft); }
.plan pre { padding: 10px 14px; border-radius: 8px; background: var(--lane); white-space: pre-wrap;
            overflow-wrap: anywhere; }
.plan table { border-collapse: collapse; font-size: 13px; }
.plan th, .plan td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top;
                     border-bottom: 1px solid var(--line); }
.plan td.short { white-space: nowrap; }
.plan th { color: var(--soft); font-weight: 600; }
body { padding-bottom: 40px; }
</style>"""


def section_html(title: str, body: str, note: str = "") -> str:
    """Return a part of the page below the timeline. body: HTML. note: a sentence under the title."""
    words = f"<p>{escape(note)}</p>" if note else ""
    content = f'{words}<div class="wide">{body}</div>'
    return f'<section class="plan"><h3>{escape(title)}</h3>{content}</section>'


def table_html(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows of plain text as an HTML table; the keys of the first row are the columns."""
    head = "".join(f"<th>{escape(column)}</th>" for column in (rows[0] if rows else ()))
    body = "".join("<tr>" + "".join(map(_cell, row.values())) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    short = ' class="short"' if len(text) <= SHORT else ""
    return f"<td{short}>{escape(text)}</td>"


def draw_page(title: str, figures: list[list[str]], simulation: Simulation, sections: list[str]) -> str:
    """Return an HTML document. figures: (name, value, meaning). simulation: a simulated step, in seconds. sections:
    see `section_html`."""
    bars, ranks = len(drawn_rows(simulation)), simulation.table.header.num_ranks
    count = min(ranks, max(1, MOST_BARS * ranks // max(1, bars)))
    shown = [round(index * (ranks - 1) / max(1, count - 1)) for index in range(count)]
    line_of = {rank: index for index, rank in enumerate(shown)}
    curves = Curves(
        "Live activations, in micro-batches of a whole rank's layers",
        "micro-batches of live activations",
        [curve if rank in line_of else [] for rank, curve in enumerate(activation_curves(simulation))],
        1.0,
    )
    lines = [Line(f"stage {rank}") for rank in shown]
    drawn = [(line_of[bar.rank], bar, "") for bar in bars_of(simulation, shown)]
    page = html_page(title, figures, lines, drawn, simulation.finish, curves, "s")
    return page.replace("</body>", f"{STYLE}\n{''.join(sections)}\n</body>")


def write_prediction(request: Request, hardware: Hardware, prediction: Prediction, notes: list[str]) -> None:
    """Write the report of one layout, if a flag requests it. notes: lines that the command also prints."""
    breakdown = as_svg(breakdown_figure({"this layout": prediction.estimate}))
    _write(request, hardware, prediction, {"breakdown": breakdown}, _notes(notes))


def write_search(
    request: Request, hardware: Hardware, prediction: Prediction, findings: Findings, command: str, notes: list[str]
) -> None:
    """Write the report of a search. The pictures compare the estimates of layouts, as the search does.

    prediction: of the best layout. command: command that starts it. notes: see `write_prediction`.
    """
    best = estimate(findings.best.config, hardware, node_order=findings.best.node_order)
    others = {
        each.name: each.estimate
        for each in findings.alternatives
        if each.estimate is not None and layout_text(each.estimate.config) != layout_text(best.config)
    }
    drawn = {
        "breakdown": as_svg(breakdown_figure({"best": best, **others}, "Estimated time of a step, by term")),
        "pareto": as_svg(pareto_figure([each.estimate for each in findings.pareto], best.memory_limit)),
    }
    ranked = [layout_cells(each.config) | figures_cells(each.estimate) for each in findings.ranked]
    losers = [{"layout": each.name, "why": each.reason} for each in findings.alternatives]
    sections = [
        *_notes(notes),
        section_html("The best layouts", table_html(ranked)),
        section_html("Why others are slower", table_html(losers)),
        section_html("Command to run on every node", f"<pre>{escape(command)}</pre>"),
    ]
    _write(request, hardware, prediction, drawn, sections)


def _notes(lines: list[str]) -> list[str]:
    return [section_html("Notes", "".join(f"<p>{escape(line)}</p>" for line in lines))] if lines else []


def _write(
    request: Request, hardware: Hardware, prediction: Prediction, drawn: dict[str, str], extra: list[str]
) -> None:
    html, folder = request.flags["html"], request.flags["pictures"]
    answer = prediction.estimate
    pictures = {"memory": as_svg(memory_figure(answer)), **drawn}
    if folder is not None:
        header = prediction.schedule.header
        if header.num_ranks <= DRAWN_RANKS and header.num_microbatches <= DRAWN_MICROBATCHES:
            pictures["timeline"] = draw_svg(prediction.simulation, unit=" s")
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_text(folder / f"{name}.svg", picture)
    if html is not None:
        run = run_line(answer.config, hardware, answer.world_size)
        sections = [*_sections(run, answer, pictures), *extra]
        title = f"{run}: {layout_text(answer.config)}"
        write_text(html, draw_page(title, _figures(answer), prediction.simulation, sections))


def _figures(answer: Estimate) -> list[list[str]]:
    cells = figures_cells(answer)
    limit = f"of {bytes_text(answer.memory_limit)}; fits: {cells['fits']}"
    return [
        ["a step", cells["step"], "seconds of one optimizer step"],
        ["tokens/s", f"{answer.tokens_per_second:,.0f}", "of all devices together"],
        ["tokens/s/device", cells["tokens/s/device"], "of one device"],
        ["TFLOP/s/device", cells["TFLOP/s/device"], "of the model, without recomputation"],
        ["fullest rank", bytes_text(answer.tightest_bytes), limit],
    ]


def _sections(run: str, answer: Estimate, pictures: dict[str, str]) -> Iterator[str]:
    yield section_html(
        "Memory",
        pictures["memory"],
        "Weights, gradients, optimizer state and message slots exist between steps too; "
        "activations and buffers are the peak of a step. Point at a part to see its size.",
    )
    yield section_html("Time", pictures["breakdown"], run)
    if "pareto" in pictures:
        yield section_html(
            "Speed against memory",
            pictures["pareto"],
            "Layouts that no other layout beats in both speed and memory. Their speeds are estimates, which "
            "the search compares; the figures at the top come from the simulated schedule.",
        )
    yield section_html("Terms of a step", table_html(terms_cells(answer)))
