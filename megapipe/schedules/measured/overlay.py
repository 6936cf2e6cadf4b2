"""Compare a measured run with its simulation: both on the same rows from a common zero, and pictures of both.

The pictures have one time axis: bars, an interactive page, a still picture, a Chrome trace.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from html import escape
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from megapipe.schedules.actions import COMPUTE_STREAM, Action, Floats, Ints, Kind, write_action
from megapipe.schedules.drawing.bars import (
    COMPUTE,
    LANES,
    NAMES,
    RECEIVE,
    Bar,
    axis,
    bar_of,
    chunks_of,
    counted,
    drawn_rows,
    fill,
    ink,
    legend,
    receive_bars,
    svg_head,
    trace_events,
)
from megapipe.schedules.drawing.page import Curves, Line, html_page
from megapipe.schedules.measured.medians import MILLISECOND, MeasuredCosts, Window
from megapipe.schedules.measured.traces import MeasuredRun
from megapipe.schedules.simulation import CostPlace, Simulation, simulate
from megapipe.schedules.table import action_at


class Side(NamedTuple):
    """One rank's time in the window, of one of the two runs, in milliseconds.

    ``span``: from its first compute's start to its last compute's or update's end. ``compute``: forwards and
    backwards. ``wait``: waiting for other ranks. ``between``: neither compute, update nor waiting.
    """

    span: float
    compute: float
    wait: float
    between: float

    @property
    def bubble(self) -> float:
        """The part of the time that the rank's compute does not fill."""
        return self.span / self.compute - 1.0


class Deviation(NamedTuple):
    """The time that an action took beyond its prediction, from the end of the action before it, in milliseconds.

    ``lost`` is the sum of the other three: longer waiting, a slower action, time between the actions. It is below 0
    for an action that was faster than predicted.
    """

    row: int
    lost: float
    wait: float
    work: float
    between: float


@dataclass(frozen=True)
class Overlay:
    """Both runs on the rows of ``window.table``; times in milliseconds from the first compute's start of each.

    ``rows`` are the compute and update rows that both have, by rank, in program order; the arrays have one entry for
    each of these rows. ``measured_start`` is the start of the work, after its wait. ``measured_zero`` and
    ``predicted_zero`` are the zeros in the window's and the simulation's own times.
    """

    run: MeasuredRun
    window: Window
    costs: MeasuredCosts
    simulation: Simulation
    measured_zero: float
    predicted_zero: float
    rows: Ints
    measured_start: Floats
    measured_end: Floats
    predicted_start: Floats
    predicted_end: Floats

    @cached_property
    def ranks(self) -> list[tuple[Side, Side]]:
        """Per rank its measured and its predicted time."""
        return [
            (
                self._side(mine, self.measured_start, self.measured_end, sum(self._waits_until(mine)[1:])),
                self._side(mine, self.predicted_start, self.predicted_end),
            )
            for mine in self._rows_of_ranks
        ]

    @cached_property
    def deviations(self) -> list[Deviation]:
        """The deviation of every row, largest loss first. The losses of a rank add up to its measured span minus its
        predicted span."""
        losses = []
        for mine in self._rows_of_ranks:
            waits = self._waits_until(mine)
            for order, at in enumerate(mine.tolist()):
                work = took = float(self.measured_end[at] - self.measured_start[at])
                predicted_work = predicted = float(self.predicted_end[at] - self.predicted_start[at])
                wait = 0.0
                if order > 0:
                    before, wait = mine[order - 1], waits[order]
                    took = float(self.measured_end[at] - self.measured_end[before])
                    predicted = float(self.predicted_end[at] - self.predicted_end[before])
                predicted_wait = predicted - predicted_work
                between = took - work - wait
                row = int(self.rows[at])
                losses.append(Deviation(row, took - predicted, wait - predicted_wait, work - predicted_work, between))
        return sorted(losses, key=lambda deviation: -deviation.lost)

    @cached_property
    def lag(self) -> list[list[tuple[float, float]]]:
        """The delay of the measured run over the predicted one at the end of each action, per rank."""
        late = self.measured_end - self.predicted_end
        return [
            list(zip(self.measured_end[mine].tolist(), late[mine].tolist(), strict=True))
            for mine in self._rows_of_ranks
        ]

    @property
    def finish(self) -> float:
        """End of the later of the two runs."""
        return float(max(self.measured_end.max(), self.predicted_end.max()))

    @cached_property
    def slowest(self) -> int:
        """The rank with the longest measured time."""
        return int(np.argmax([measured.span for measured, _ in self.ranks]))

    @property
    def excess(self) -> float:
        """Time of the slowest rank beyond its prediction, as a fraction of the prediction."""
        measured, predicted = self.ranks[self.slowest]
        return round(measured.span / predicted.span - 1.0, 6) + 0.0  # turns -0.0 into 0.0

    @cached_property
    def _rows_of_ranks(self) -> list[Ints]:
        """The places in ``rows`` of each rank's actions."""
        table = self.window.table
        return [np.flatnonzero(table.rank[self.rows] == rank) for rank in range(table.header.num_ranks)]

    def _waits_until(self, mine: Ints) -> list[float]:
        """Return the waiting before the end of each action of a rank, since the action before it, including rows in
        between."""
        total = np.append(0.0, np.cumsum(np.nan_to_num(self.window.wait)))
        rows = self.rows[mine]
        before = np.concatenate([rows[:1], rows[:-1]])
        waits: list[float] = (total[rows + 1] - total[before + 1]).tolist()
        return waits

    def _side(self, mine: Ints, start: Floats, end: Floats, wait: float | None = None) -> Side:
        """Return a rank's time. wait: by default, all time without work."""
        span = float(end[mine[-1]] - start[mine[0]])
        work = end[mine] - start[mine]
        compute = float(work[self.window.table.is_kind(*COMPUTE_STREAM)[self.rows[mine]]].sum())
        idle = span - float(work.sum())
        return Side(span, compute, idle if wait is None else wait, 0.0 if wait is None else idle - wait)


def lay_over(run: MeasuredRun, window: Window, costs: MeasuredCosts) -> Overlay:
    """Return the overlay of a window: its rows as measured, and as simulated with ``costs``."""
    table = window.table
    simulation = simulate(run.schedule, costs.costs, table.steps)
    rows = np.flatnonzero(window.seen & table.is_kind(*COMPUTE_STREAM, Kind.UPDATE))
    end = predicted_ends(window, simulation)
    measured_start = (window.start + window.wait)[rows]
    compute = np.isin(table.kind[rows], COMPUTE_STREAM)
    measured_zero = float(measured_start[compute].min())
    predicted_zero = float(simulation.start[rows][compute].min())
    return Overlay(
        run,
        window,
        costs,
        simulation,
        measured_zero,
        predicted_zero,
        rows,
        measured_start - measured_zero,
        window.end[rows] - measured_zero,
        simulation.start[rows] - predicted_zero,
        end[rows] - predicted_zero,
    )


def predicted_ends(window: Window, simulation: Simulation) -> Floats:
    """Return the end of each row; an update whose event covers its neighbours ends where the last of them does."""
    end = simulation.end.copy()
    np.maximum.at(end, window.owner[window.rows], simulation.end[window.rows])
    return end


LISTED_DEVIATIONS: Final = 8
"""Number of actions that the table lists, those with the largest losses."""


def headline(overlay: Overlay) -> str:
    """Return the run, and which steps are shown, counted from 1."""
    header = overlay.window.table.header
    steps = [step + 1 for step in overlay.window.steps]
    shown = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"{header.name}, {header.num_ranks} ranks, {counted(header)}, {shown}: measured over predicted"


def sentence(overlay: Overlay) -> str:
    """Return a sentence with the measured and the predicted time of the slowest rank, and the parts of the
    difference."""
    rank = overlay.slowest
    measured, predicted = overlay.ranks[rank]
    mine = [deviation for deviation in overlay.deviations if overlay.window.table.rank[deviation.row] == rank]
    wait, work, between = (sum(getattr(each, name) for each in mine) for name in ("wait", "work", "between"))
    return (
        f"rank {rank}, the slowest, took {_shown(measured.span)} ms, predicted were "
        f"{_shown(predicted.span)} ms ({overlay.excess:+.1%}): waiting {_lost(wait)} "
        f"ms, actions {_lost(work)} ms, between actions {_lost(between)} ms"
    )


def figures(overlay: Overlay) -> dict[str, Any]:
    """Return all figures, in milliseconds, as JSON data."""
    costs = overlay.costs.costs
    kinds = (*COMPUTE_STREAM, Kind.UPDATE)
    names, columns = [kind.name.lower() for kind in kinds], map(costs.of_stages, kinds)
    return {
        "schedule": overlay.window.table.header.name,
        "layout": dict(overlay.run.layout),
        "about": dict(overlay.run.about),
        "steps": [step + 1 for step in overlay.window.steps],
        "summary": sentence(overlay),
        "ranks": [
            {
                side: {**each._asdict(), "bubble": each.bubble}
                for side, each in zip(("measured", "predicted"), both, strict=True)
            }
            for both in overlay.ranks
        ],
        "partings": [_deviation(overlay, deviation) for deviation in overlay.deviations[:LISTED_DEVIATIONS]],
        "times": {
            "stages": [dict(zip(names, times, strict=True)) for times in zip(*columns, strict=True)],
            "messages": {f"{source}->{target}": link.latency for (source, target), link in costs.links.items()},
            "reduce_scalars": costs.reduce_scalars,
        },
        "between_steps": between_steps(overlay.run),
        "clock_error": overlay.run.clock_error / MILLISECOND,
        "clock_excess": overlay.costs.clock_excess,
    }  # fmt: skip


def between_steps(run: MeasuredRun) -> float | None:
    """Return the median time of a rank from one flushing step's last action to the next one's first: data, metrics,
    saving."""
    if not run.schedule.flushes:
        return None
    gaps = []
    for execution, ranks in run.recorded.items():
        following = run.recorded.get(execution._replace(step=execution.step + 1))
        for mine, after in zip(ranks, following or (), strict=False):
            gaps.append(min(event.start for event in after.values()) - max(event.end for event in mine.values()))
    return median(gaps) / MILLISECOND if gaps else None


def _deviation(overlay: Overlay, deviation: Deviation) -> dict[str, Any]:
    table = overlay.window.table
    action = action_at(table, deviation.row)
    step, microbatch = divmod(action.microbatch, table.header.num_microbatches)
    word = write_action(Action(action.kind, action.stage, microbatch=microbatch), table.header.slices)
    return {
        "rank": int(table.rank[deviation.row]), "action": word,
        "step": overlay.window.first_step + step + 1, "lost": deviation.lost, "wait": deviation.wait,
        "work": deviation.work, "between": deviation.between,
    }  # fmt: skip


def text(overlay: Overlay) -> str:
    """Return the table that the command prints."""
    report = figures(overlay)
    lines = [headline(overlay), "", _row("", "time, ms", "", "bubble", "", "waiting, ms", "", "between")]
    lines.append(_row("rank", *["measured", "predicted"] * 3, "measured"))
    for rank, (measured, predicted) in enumerate(overlay.ranks):
        pairs = ((_shown(side.span), f"{side.bubble:.1%}", _shown(side.wait)) for side in (measured, predicted))
        cells = [cell for pair in zip(*pairs, strict=True) for cell in pair]
        lines.append(_row(str(rank), *cells, _shown(measured.between)))
    lines += ["", f"largest differences, ms lost against the prediction (of {len(overlay.deviations)} actions)"]
    lines.append(_row("rank", "action", "step", "lost", "waiting", "slower", "between"))
    for row in report["partings"]:
        times = (_lost(row[name]) for name in ("lost", "wait", "work", "between"))
        lines.append(_row(str(row["rank"]), row["action"], str(row["step"]), *times))
    lines += ["", "medians used for the prediction, ms", *_times(overlay)]
    if report["between_steps"] is not None:
        lines.append(f"  between two steps, not included above: {_shown(report['between_steps'])}")
    if overlay.run.clock_error:
        lines.append(f"  clocks of the hosts agree to within {overlay.run.clock_error / MILLISECOND:.2g} ms")
    # Ranks of one host share a clock (error 0), so there an early arrival is an artifact of the recorded events.
    if 0 < overlay.run.clock_error / MILLISECOND < overlay.costs.clock_excess:
        lines.append(
            f"  warning: a message seems to arrive {overlay.costs.clock_excess:.2g} "
            "ms before it was sent; the clocks of the hosts differ by that much"
        )
    return "\n".join([*lines, "", sentence(overlay)])


def _row(first: str, *cells: str) -> str:
    return f"{first:>4}" + "".join(f"{cell:>12}" for cell in cells)


def _times(overlay: Overlay) -> list[str]:
    costs, header = overlay.costs.costs, overlay.window.table.header
    lines = []
    for stage in range(len(header.stages)):
        times = ((kind, costs.times[CostPlace(kind, stage)]) for kind in (*COMPUTE_STREAM, Kind.UPDATE))
        shown = ", ".join(f"{kind.name.lower()} {_shown(time)}" for kind, time in times if time > 0)
        lines.append(f"  stage {stage} (rank {header.stages[stage].rank}): {shown}")
    latencies = [link.latency for link in costs.links.values()]
    if latencies:
        lines.append(f"  messages between ranks {_shown(min(latencies))} to {_shown(max(latencies))}")
    lines.append(f"  sum of scalars {_shown(costs.reduce_scalars)}")
    return lines


def _shown(milliseconds: float) -> str:
    """Return a time as text, to the microsecond."""
    return f"{round(milliseconds, 3) + 0.0:.3f}"


def _lost(milliseconds: float) -> str:
    return f"{round(milliseconds, 3) + 0.0:+.3f}"


def measured_bars(overlay: Overlay) -> list[Bar]:
    """Return the measured bars: compute and updates after their waiting, and the rank's own part in communication."""
    window, table = overlay.window, overlay.window.table
    chunk_of = chunks_of(table.header)
    rows = window.rows[(window.seen & table.is_kind(*NAMES))[window.rows]]
    bars = []
    for row in rows.tolist():
        start, wait, end = (float(times[row]) for times in (window.start, window.wait, window.end))
        communicates = Kind(int(table.kind[row])) in LANES
        bar_start = start - overlay.measured_zero + (0.0 if communicates else wait)
        bar = bar_of(table, row, chunk_of, bar_start, end - overlay.measured_zero)
        bars.append(_named(overlay, bar._replace(wait=wait)))
    return bars


def predicted_bars(overlay: Overlay) -> list[Bar]:
    """Return the simulated bars of the same actions; messages from their start to their arrival."""
    simulation, table = overlay.simulation, overlay.window.table
    chunk_of = chunks_of(table.header)
    rows = np.intersect1d(overlay.window.rows, drawn_rows(simulation))
    shown = rows[overlay.window.owner[rows] == rows]
    start, end = simulation.start, predicted_ends(overlay.window, simulation)
    times = ((row, *(float(each[row]) - overlay.predicted_zero for each in (start, end))) for row in shown.tolist())
    return [_named(overlay, bar_of(table, row, chunk_of, *both)) for row, *both in times]


def _named(overlay: Overlay, bar: Bar) -> Bar:
    """Return the bar with the run's own number of its step, from 1 as in the log."""
    step = overlay.window.first_step + bar.step + 1
    place = f"stage {bar.stage}, micro-batch {bar.label}, step {step}" if bar.stage >= 0 else f"step {step}"
    return bar._replace(step=step, text=place)


def draw_overlay_html(overlay: Overlay) -> str:
    """Return the interactive page: a rank's measured bars over its predicted ones, and its delay."""
    measured, predicted = overlay.ranks[overlay.slowest]
    lines = []
    for rank in range(overlay.window.table.header.num_ranks):
        lines += [Line(f"rank {rank}", gap=2), Line("predicted", soft=True, height=14, gap=12)]
    bars = [(2 * bar.rank, bar, f"measured{_waited(bar)}") for bar in measured_bars(overlay) if bar.lane != RECEIVE]
    bars += [(2 * bar.rank + 1, bar, "predicted") for bar in predicted_bars(overlay)]
    figures = [
        ["measured, ms", f"{measured.span:.4g}", f"on rank {overlay.slowest}, the slowest"],
        ["predicted, ms", f"{predicted.span:.4g}", "the same rank, with the median times of its actions"],
        ["difference", f"{overlay.excess:+.1%}", "of the slowest rank's time"],
        ["bubble", f"{measured.bubble:.1%}", "measured: time without compute, over compute"],
        ["predicted bubble", f"{predicted.bubble:.1%}", "the same, predicted"],
    ]
    title = "Delay against the prediction in ms, one curve per rank"
    curves = Curves(title, "ms later than predicted", overlay.lag, 0.001)
    return html_page(headline(overlay), figures, lines, bars, overlay.finish, curves, "ms")


def _waited(bar: Bar) -> str:
    return f", waited {bar.wait:.3g} ms" if bar.wait > 0 else ""


def draw_overlay_trace(overlay: Overlay) -> str:
    """Return all ranks in one Chrome/Perfetto trace: a process for each rank's measured run, and one for the predicted
    run."""
    ranks, run = overlay.window.table.header.num_ranks, overlay.run
    events = trace_events(measured_bars(overlay))
    zero, steps = overlay.predicted_zero, range(len(overlay.window.steps))
    received = [bar for bar in receive_bars(overlay.simulation) if bar.step in steps]
    arriving = [_named(overlay, bar._replace(start=bar.start - zero, end=bar.end - zero)) for bar in received]
    events += trace_events(predicted_bars(overlay) + arriving, "predicted rank", ranks)
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"layout": run.layout, **run.about}}
    return json.dumps(document) + "\n"


LEFT, TOP, MEASURED, PREDICTED, GAP = 84, 66, 24, 13, 12
ROW_HEIGHT: Final = MEASURED + PREDICTED + 1 + GAP


def draw_overlay_svg(overlay: Overlay, width: int = 1100) -> str:
    """Return a still picture: each rank's compute as measured, below it as predicted, with milliseconds above."""
    measured = [bar for bar in measured_bars(overlay) if bar.lane == COMPUTE]
    predicted = [bar for bar in predicted_bars(overlay) if bar.lane == COMPUTE]
    ranks = overlay.window.table.header.num_ranks
    first = min(0.0, *(bar.start - bar.wait for bar in measured))
    scale = (width - LEFT - 12) / (overlay.finish - first)
    bottom = TOP + ranks * ROW_HEIGHT
    elements = svg_head(headline(overlay), sentence(overlay), width, bottom + 30, 20, ' font-size="11"')
    elements += axis(first, overlay.finish, scale, (LEFT, TOP, bottom - GAP), " ms")
    for rank in range(ranks):
        y = TOP + rank * ROW_HEIGHT
        elements.append(f'<text x="12" y="{y + 17}" fill="#1d2430">rank {rank}</text>')
        elements.append(f'<text x="12" y="{y + 36}" font-size="10" fill="#4a5361">predicted</text>')
    elements += [_bar(bar, first, scale, 0, MEASURED) for bar in measured]
    elements += [_bar(bar, first, scale, MEASURED + 1, PREDICTED) for bar in predicted]
    first_step = overlay.window.steps[0] + 1
    numbered = [bar._replace(step=bar.step - first_step) for bar in measured]
    elements += [
        f'<rect x="{LEFT + (bar.start - first) * scale:.2f}" y="{TOP + bar.rank * ROW_HEIGHT}" '
        f'width="{(bar.end - bar.start) * scale:.2f}" height="3" fill="#1d2430"/>'
        for bar in numbered
        if bar.step % 2
    ]
    elements += legend(numbered, bottom + 6, LEFT)
    return "\n".join([*elements, "</svg>"]) + "\n"


def _bar(bar: Bar, first: float, scale: float, offset: int, height: int) -> str:
    x, y = LEFT + (bar.start - first) * scale, TOP + bar.rank * ROW_HEIGHT + offset
    width, colour = (bar.end - bar.start) * scale, fill(bar.kind, bar.shade)
    elements = [f"<title>{escape(f'{NAMES[bar.kind]}, {bar.text}, {bar.start:.4g} to {bar.end:.4g} ms')}</title>"]
    if bar.wait > 0:
        middle, wait_start = y + height / 2, x - bar.wait * scale
        elements.append(f'<path d="M{wait_start:.2f} {middle}H{x:.2f}" stroke="#98a2b3" stroke-width="1.2"/>')
    elements.append(
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.4):.2f}" height="{height}" fill="{colour}" stroke="#ffffff" '
        'stroke-width="0.5"/>'
    )
    label = bar.label
    if bar.kind != Kind.UPDATE and width > 6.5 * len(label) + 2:
        size = 11 if height == MEASURED else 9
        elements.append(
            f'<text x="{x + width / 2:.2f}" y="{y + height / 2 + size * 0.36:.1f}" font-size="{size}" '
            f'text-anchor="middle" fill="{ink(colour)}">{label}</text>'
        )
    return f"<g>{''.join(elements)}</g>"
