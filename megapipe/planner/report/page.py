"""The report: one HTML file that needs no other, with the timeline of schedules/drawing and the planner's pictures."""

from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

from megapipe.schedules.drawing.bars import activation_curves, bars_of
from megapipe.schedules.drawing.document import Curves, Line, html_page
from megapipe.schedules.simulation.simulate import Simulation

MOST_BARS: Final = 40_000
"""Bars that a page draws smoothly; of longer schedules some ranks are shown."""

SHORT: Final = 20
"""Characters of a cell that no line break cuts, such as `8.11 s`."""

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


class PageSection(NamedTuple):
    """A part of the page below the timeline. body: HTML. note: a sentence under the title."""

    title: str
    body: str
    note: str = ""


def table_html(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain words."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    short = ' class="short"' if len(text) <= SHORT else ""
    return f"<td{short}>{escape(text)}</td>"


def lines_html(lines: Sequence[str]) -> str:
    """Sentences below each other."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def command_html(command: str) -> str:
    """Words to copy into a shell."""
    return f"<pre>{escape(command)}</pre>"


def draw_page(
    title: str, figures: Sequence[tuple[str, str, str]], simulation: Simulation, sections: Sequence[PageSection]
) -> str:
    """An HTML document. figures: (name, value, what it is). simulation: of a step, in seconds."""
    header = simulation.table.header
    bars, ranks = bars_of(simulation), header.num_ranks
    shown = _spread(ranks, max(1, MOST_BARS * ranks // max(1, len(bars))))
    line_of = {rank: index for index, rank in enumerate(shown)}
    curves = [curve if rank in line_of else [] for rank, curve in enumerate(activation_curves(simulation))]
    page = html_page(
        title,
        [list(each) for each in figures],
        [Line(f"stage {rank}") for rank in shown],
        [(line_of[bar.rank], bar, "") for bar in bars if bar.rank in line_of],
        simulation.finish,
        Curves(
            "Activations alive, in micro-batches of a whole rank's layers (the time line above is in seconds)",
            "micro-batches of activations alive",
            curves,
            1.0,
        ),
    )
    return page.replace("</body>", f"{STYLE}\n{''.join(_section(each) for each in sections)}\n</body>")


def _section(section: PageSection) -> str:
    note = f"<p>{escape(section.note)}</p>" if section.note else ""
    body = f'<div class="wide">{section.body}</div>'
    return f'<section class="plan"><h3>{escape(section.title)}</h3>{note}{body}</section>'


def _spread(ranks: int, most: int) -> list[int]:
    """At most so many ranks, evenly apart, the first and the last among them where there may be two."""
    if most >= ranks:
        return list(range(ranks))
    if most == 1:
        return [0]
    return sorted({round(index * (ranks - 1) / (most - 1)) for index in range(most)})
