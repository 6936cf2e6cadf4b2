"""The bars of a simulated schedule, and pictures of them: SVG, Chrome trace, terminal."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import numpy as np

from megapipe.schedules.actions import RECEIVES, SENDS, SUMS_OF_RANKS, Ints, Kind, describe
from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.memory import activations_gone, activations_made, rank_shares
from megapipe.schedules.schedule import Header
from megapipe.schedules.simulation.simulate import Simulation
from megapipe.schedules.table import Table, action_at

COMPUTE, SEND, RECEIVE, COLLECTIVES = "compute", "send", "receive", "collectives"
COPY_OUT, COPY_IN = "copy out", "copy in"
LANES: Final = {
    **dict.fromkeys(SENDS, SEND),
    **dict.fromkeys(RECEIVES, RECEIVE),
    **dict.fromkeys((Kind.GATHER_WEIGHTS, Kind.REDUCE_GRADIENTS, *SUMS_OF_RANKS), COLLECTIVES),
    **dict.fromkeys((Kind.OFFLOAD, Kind.SNAPSHOT), COPY_OUT),
    Kind.RELOAD: COPY_IN,
}


class Bar(NamedTuple):
    """One action on one lane of a rank.

    ``critical``: whether the end of the run depends on it. A measured action waited for other ranks for ``wait``
    before ``start``. ``drawn``: where its box starts and ends; the actions of a group share a box. ``part``: place of
    this action in its group, counted from 0, and the size of the group.
    """

    rank: int
    lane: str
    kind: Kind
    stage: int
    chunk: int
    microbatch: int
    step: int
    start: float
    end: float
    critical: bool
    text: str
    wait: float = 0.0
    drawn: tuple[float, float] = (0.0, 0.0)
    part: tuple[int, int] = (0, 1)
    slice: int = -1

    @property
    def shade(self) -> int:
        """Chunk, or slice if there are several: later ones are lighter."""
        return max(self.chunk, self.slice)

    @property
    def label(self) -> str:
        """Micro-batch, and slice if there are several; "" for actions without a micro-batch."""
        place = "" if self.slice < 0 else f":{self.slice}"
        return f"{self.microbatch}{place}" if self.microbatch >= 0 else ""


def bars_of(simulation: Simulation, ranks: Sequence[int] | None = None) -> list[Bar]:
    """Return every action that takes time, by rank, then in program order; waiting has no bar. ranks: all if None."""
    table, rows = simulation.table, drawn_rows(simulation)
    critical, chunk_of = set(simulation.critical_path()), chunks_of(table.header)
    bars = []
    for row in (rows if ranks is None else rows[np.isin(table.rank[rows], ranks)]).tolist():
        bar = bar_of(table, row, chunk_of, float(simulation.start[row]), float(simulation.end[row]), row in critical)
        first, last = int(table.action_first[row]), int(table.action_last[row])
        box = float(simulation.start[first]), float(simulation.end[last])
        bars.append(bar._replace(drawn=box, part=(row - first, last - first + 1)) if last > first else bar)
    return bars


def drawn_rows(simulation: Simulation) -> Ints:
    """Return the rows that have a bar, in order."""
    travelling = simulation.table.is_kind(*SENDS) & (simulation.end > simulation.start)
    return np.flatnonzero(simulation.working | travelling)


def chunks_of(header: Header) -> dict[int, int]:
    """Return for each stage the number of its chunk on its rank."""
    return {stage: index for rank in range(header.num_ranks) for index, stage in enumerate(header.stages_on(rank))}


def bar_of(table: Table, row: int, chunk_of: dict[int, int], start: float, end: float, critical: bool = False) -> Bar:
    """Return the bar of a row. chunk_of: as `chunks_of` returns it. critical: as in `Bar`."""
    action = action_at(table, row)
    step, microbatch = divmod(action.microbatch, table.header.num_microbatches)
    microbatch, part = divmod(microbatch, table.header.slices)
    part = part if table.header.slices > 1 else -1
    lane, text = LANES.get(action.kind, COMPUTE), describe(action._replace(slot=-1), table.header.slices)
    if action.kind == Kind.GATHER_WEIGHTS and table.header.host_weights[action.stage, action.unit]:
        lane = COPY_IN
    chunk = chunk_of.get(action.stage, 0)
    return Bar(
        int(table.rank[row]), lane, action.kind, action.stage, chunk, microbatch, step, start, end, critical, text,
        drawn=(start, end), slice=part,
    )  # fmt: skip


def activation_curves(simulation: Simulation) -> list[list[tuple[float, float]]]:
    """Return for each rank the (time, micro-batches of activations alive) at every change, counted as in
    ``peak_activations``."""
    table = simulation.table
    share = rank_shares(table)
    opening, closing = np.flatnonzero(activations_made(table)), np.flatnonzero(activations_gone(table))
    curves = []
    for rank in range(table.header.num_ranks):
        made_rows, gone_rows = opening[table.rank[opening] == rank], closing[table.rank[closing] == rank]
        times = np.concatenate([simulation.end[gone_rows], simulation.start[made_rows]])
        order = np.argsort(times, kind="stable")
        alive = np.cumsum(np.concatenate([-share[gone_rows], share[made_rows]])[order])
        curves.append([(float(time), round(float(count), 6)) for time, count in zip(times[order], alive, strict=True)])
    return curves


ORANGE: Final = ("#e08a1e", "#eeab57", "#f5c98d", "#fae3c0")
FILLS: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.FORWARD: ("#3b7dd8", "#6ea3e8", "#9cc3f2", "#c5dcf8"),
    Kind.BACKWARD: ORANGE,
    Kind.BACKWARD_INPUT: ORANGE,
    Kind.BACKWARD_WEIGHT: ("#3f9c6c", "#6fba92", "#9bd3b5", "#c6e7d5"),
    Kind.RECOMPUTE: ("#8b93a1",),
    Kind.UPDATE: ("#8657c4",),
    **dict.fromkeys((Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION), ("#7fa9dc",)),
    **dict.fromkeys((Kind.SEND_GRADIENT, Kind.RECV_GRADIENT), ("#e9b872",)),
    Kind.GATHER_WEIGHTS: ("#5fb3b3",),
    **dict.fromkeys((Kind.REDUCE_GRADIENTS, Kind.REDUCE_TIED), ("#b26bb5",)),
    **dict.fromkeys((Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS), ("#c9a3d6",)),
    Kind.OFFLOAD: ("#a8894f",),
    Kind.RELOAD: ("#cdb587",),
    Kind.SNAPSHOT: ("#7d8f3c",),
}
NAMES: Final = {kind: kind.name.lower().replace("_", " ").replace("recv", "receive") for kind in FILLS} | {
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
    Kind.REDUCE_TIED: "reduce tied weight",
}


def fill(kind: Kind, chunk: int) -> str:
    """Return the colour of an action."""
    shades = FILLS[kind]
    return shades[min(chunk, len(shades) - 1)]


def ink(colour: str) -> str:
    """Return black or white, whichever reads better on a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "#1d2430"


ROW_HEIGHT, BAR_HEIGHT, LEFT, TOP, LEGEND = 30, 24, 64, 78, 34


def draw_svg(simulation: Simulation, width: int = 1100, unit: str = "") -> str:
    """Return the simulated compute of every rank as an SVG document ``width`` pixels wide. unit: printed after times,
    such as " s"."""
    header = simulation.table.header
    bars = [bar for bar in bars_of(simulation) if bar.lane == COMPUTE]
    scale = (width - LEFT - 12) / max(simulation.finish, 1e-12)
    bottom = TOP + ROW_HEIGHT * header.num_ranks
    height = bottom + LEGEND + 8
    title = f"{header.name}: {header.num_ranks} ranks, {counted(header)}"
    title += f", {simulation.table.steps} steps" * (simulation.table.steps > 1)
    elements = svg_head(title, _figures(simulation, unit), width, height, 24)
    for rank in range(header.num_ranks):
        y = TOP + rank * ROW_HEIGHT
        elements.append(f'<text x="12" y="{y + 17}" fill="#4a5361">rank {rank}</text>')
        elements.append(f'<rect x="{LEFT}" y="{y}" width="{width - LEFT - 12}" height="{BAR_HEIGHT}" fill="#f1f3f6"/>')
    elements += axis(0.0, simulation.finish, scale, (LEFT, TOP, bottom), unit)
    elements += ['<g font-size="11" text-anchor="middle">', *(_bar(bar, scale) for bar in bars), "</g>"]
    elements += legend(bars, bottom + 8, LEFT)
    return "\n".join([*elements, "</svg>"]) + "\n"


def svg_head(title: str, note: str, width: int, height: int, y: int, attributes: str = "") -> list[str]:
    """Return the start of an SVG document on white, with a title at a height and a note below it, which may have
    attributes."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="{y}" font-size="15" font-weight="bold" fill="#1d2430">{escape(title)}</text>',
        f'<text x="12" y="{y + 18}"{attributes} fill="#4a5361">{escape(note)}</text>',
    ]


def counted(header: Header) -> str:
    """Return the number of micro-batches, and of slices of each, in words."""
    slices = f" of {header.slices} slices" if header.slices > 1 else ""
    return f"{header.whole_microbatches} micro-batches{slices}"


def axis(first: float, last: float, scale: float, place: tuple[int, int, int], unit: str = "") -> list[str]:
    """Draw times above the rows, with a fine line down at each. place: left, top and bottom of the rows."""
    left, top, bottom = place
    rough = (last - first) / 10
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(float(factor * power) for factor in (1, 2, 5, 10) if factor * power >= rough)
    elements = []
    for index in range(int(np.ceil(first / step)), int(last / step) + 1):
        x = left + (index * step - first) * scale
        elements.append(f'<path d="M{x:.1f} {top - 6}V{bottom}" stroke="#dfe3e9"/>')
        label = f"{index * step:g}" + unit * (index == 0)
        elements.append(
            f'<text x="{x:.1f}" y="{top - 10}" font-size="10" text-anchor="middle" fill="#4a5361">{label}</text>'
        )
    return elements


def _figures(simulation: Simulation, unit: str) -> str:
    """Return the length of the axis, and the idle time by both definitions of a bubble."""
    finish, makespan, ideal = simulation.finish, simulation.makespan, simulation.ideal
    whole = f"{finish:g}{unit} from first to last action, {ideal:g}{unit} of it work on the busiest rank"
    shown = f"idle {simulation.idle:.1%} of the ideal time, {1 - ideal / finish:.1%} of the makespan"
    if f"{makespan:g}" == f"{finish:g}":
        return f"{whole}; {shown}"
    later = f"{simulation.bubble:.1%} and {simulation.bubble_rate:.1%}"
    return f"{whole}; {shown} (counted on each rank from its first forward: {makespan:g}{unit}, {later})"


def _bar(bar: Bar, scale: float) -> str:
    (start, end), (place, count) = bar.drawn, bar.part
    top, height = TOP + bar.rank * ROW_HEIGHT, BAR_HEIGHT / count
    x, y, width = LEFT + start * scale, top + place * height, (end - start) * scale
    colour, size = fill(bar.kind, bar.shade), "" if count == 1 else ' font-size="9"'
    labels = bar.label, bar.label.partition(":")[0]  # without the slice if it does not fit
    label = next((each for each in labels if width >= 7 * len(each) + 2), "")
    below = y + height / 2 + (5 if count == 1 else 3.5)
    text = f'<text x="{x + width / 2:.2f}" y="{below:g}"{size} fill="{ink(colour)}">{label}</text>' if label else ""
    if bar.step % 2 and not place:
        text += f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="4" fill="#1d2430"/>'
    overlapped = f", overlapped from {start:g} to {end:g}" if count > 1 else ""
    edge = ' stroke="#ffffff" stroke-width="0.6"' if width >= 2 else ""  # it covers a thin bar
    return (
        f"<g><title>{escape(bar.text)}, {bar.start:g} to {bar.end:g}{overlapped}</title>"
        f'<rect x="{x:.2f}" y="{y:g}" width="{max(width, 0.5):.2f}" height="{height:g}" '
        f'fill="{colour}"{edge}/>{text}</g>'
    )


def shades(bars: Iterable[Bar]) -> dict[Kind, list[str]]:
    """Return the colours of each kind: one for each chunk of a rank, or for each slice; equal colours appear once."""
    chunks: dict[Kind, set[int]] = {}
    for bar in bars:
        chunks.setdefault(bar.kind, set()).add(bar.shade)
    return {kind: list(dict.fromkeys(fill(kind, chunk) for chunk in sorted(chunks[kind]))) for kind in sorted(chunks)}


def notes(bars: Sequence[Bar]) -> list[str]:
    """Return notes for a picture: the meaning of its shades, if there are several chunks or slices, and of bars that
    are drawn one above the other."""
    most, slices = max((bar.shade for bar in bars), default=0), any(bar.slice > 0 for bar in bars)
    names = [str(chunk) for chunk in range(min(most, 3) + 1)]
    if most > 3:
        names[-1] += " and later"
    what = ("slices", "a sequence") if slices else ("chunks", "a rank")
    shades = [f"dark to light: {what[0]} {', '.join(names)} of {what[1]}"] if most else []
    return shades + ["one above the other: overlapped"] * any(bar.part[1] > 1 for bar in bars)


def legend(bars: list[Bar], y: int, x: int) -> list[str]:
    """Draw the names and colours of the bars' kinds, from the point (x, y) to the right."""
    elements = []
    for kind, colours in shades(bars).items():
        for colour in colours:
            elements.append(f'<rect x="{x}" y="{y}" width="12" height="14" fill="{colour}"/>')
            x += 12
        elements.append(f'<text x="{x + 6}" y="{y + 11}" fill="#4a5361">{NAMES[kind]}</text>')
        x += 22 + round(6.4 * len(NAMES[kind]))
    steps = ["dark edge: every other step"] * any(bar.step % 2 for bar in bars)
    for note in notes(bars) + steps:
        elements.append(f'<text x="{x}" y="{y + 11}" fill="#4a5361">{note}</text>')
        x += 16 + round(6.2 * len(note))
    return elements


CELLS: Final = {
    Kind.FORWARD: (34, "0123456789"),
    Kind.RECOMPUTE: (90, "r"),
    Kind.BACKWARD: (33, "abcdefghij"),
    Kind.BACKWARD_INPUT: (33, "abcdefghij"),
    Kind.BACKWARD_WEIGHT: (32, "+"),
    Kind.UPDATE: (35, "U"),
}
"""Colour of a kind in a terminal, and its letters by the last digit of the micro-batch."""
LEGEND_LINE: Final = (
    "0-9 forward, a-j backward (or its input half), + weight half, r recomputation, "
    "U update, digits and letters by the last digit of the micro-batch; . idle"
)


def draw_terminal(simulation: Simulation, width: int = 120, colour: bool = False) -> str:
    """Return one line per rank, in which each character is an equal part of the time. width: maximum number of these
    characters."""
    header = simulation.table.header
    bars = [bar for bar in bars_of(simulation) if bar.lane == COMPUTE]
    shortest = min(bar.end - bar.start for bar in bars)
    columns = min(width, round(simulation.finish / shortest * 2))
    middles = (np.arange(columns) + 0.5) * simulation.finish / columns
    lines = []
    for rank in range(header.num_ranks):
        mine = [bar for bar in bars if bar.rank == rank]
        index = np.searchsorted([bar.start for bar in mine], middles, side="right") - 1
        cells = [
            _cell(mine[i], colour) if i >= 0 and middle < mine[i].end else "."
            for i, middle in zip(index.tolist(), middles.tolist(), strict=True)
        ]
        lines.append(f"rank {rank:<3d} " + "".join(cells))
    return "\n".join([*lines, "", LEGEND_LINE])


def _cell(bar: Bar, colour: bool) -> str:
    number, letters = CELLS[bar.kind]
    letter = letters[bar.microbatch % len(letters)]
    return f"\x1b[{number}m{letter}\x1b[0m" if colour else letter


THREADS: Final = {lane: place for place, lane in enumerate((COMPUTE, SEND, RECEIVE, COLLECTIVES, COPY_OUT, COPY_IN))}


MICROSECONDS: Final = 1000.0
"""Length of a time unit in traces: measured times and simulated ones count as milliseconds."""


def trace_events(bars: Sequence[Bar], process: str = "rank", first_process: int = 0) -> list[dict[str, Any]]:
    """Return one complete event per bar, with a process per rank and a thread per lane.

    ``process`` is the name of a process, before its rank's number; ids of processes count up from ``first_process``.
    Every process and thread has a name, and its place in the order of all.
    """
    tracks = sorted({(bar.rank, bar.lane) for bar in bars}, key=lambda track: (track[0], THREADS[track[1]]))
    events: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in tracks}):
        place = {"ph": "M", "pid": first_process + rank, "tid": 0}
        events.append({**place, "name": "process_name", "args": {"name": f"{process} {rank}"}})
        events.append({**place, "name": "process_sort_index", "args": {"sort_index": first_process + rank}})
    for rank, lane in tracks:
        place = {"ph": "M", "pid": first_process + rank, "tid": THREADS[lane]}
        events.append({**place, "name": "thread_name", "args": {"name": lane}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": THREADS[lane]}})
    for bar in bars:
        events.append(
            {
                "ph": "X",
                "name": NAMES[bar.kind],
                "cat": bar.lane,
                "pid": first_process + bar.rank,
                "tid": THREADS[bar.lane],
                "ts": bar.start * MICROSECONDS,
                "dur": (bar.end - bar.start) * MICROSECONDS,
                "args": {
                    "stage": bar.stage, "microbatch": bar.microbatch, "step": bar.step,
                    **({"slice": bar.slice} if bar.slice >= 0 else {}),
                    "critical": bar.critical, "action": bar.text, "wait": bar.wait * MICROSECONDS,
                },
            }
        )  # fmt: skip
    return events


def receive_bars(simulation: Simulation) -> list[Bar]:
    """Return a bar on the receiving rank for each message that takes time, from its start to its arrival."""
    table = simulation.table
    messages, chunk_of = Dependencies(table).messages, chunks_of(table.header)
    return [
        bar_of(table, receive, chunk_of, float(simulation.start[send]), float(simulation.end[send]))
        for send, receive in zip(messages.send.tolist(), messages.receive.tolist(), strict=True)
        if simulation.end[send] > simulation.start[send]
    ]


def draw_trace(simulation: Simulation) -> str:
    """Return the simulated run as a trace file."""
    events = trace_events([*bars_of(simulation), *receive_bars(simulation)])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
