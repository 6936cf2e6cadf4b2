"""Measured over predicted, on one time axis: bars, interactive page, still picture, Chrome trace."""

import json
from html import escape
from typing import Final

import numpy as np

from megapipe.schedules.actions import Kind
from megapipe.schedules.drawing.bars import (
    COMPUTE,
    LANES,
    NAMES,
    RECEIVE,
    Bar,
    axis,
    bar_of,
    chunks_of,
    fill,
    ink,
    legend,
    receive_bars,
    trace_events,
)
from megapipe.schedules.drawing.page import Curves, Line, html_page
from megapipe.schedules.measured.overlay import Overlay, headline, predicted_ends, sentence

MICROSECONDS: Final = 1000.0


def measured_bars(overlay: Overlay) -> list[Bar]:
    """Return the measured bars: compute and updates after their waiting, and the rank's own part in communication."""
    window, table = overlay.window, overlay.window.table
    chunk_of = chunks_of(table.header)
    known = window.rows[window.seen[window.rows] & np.isin(table.kind[window.rows], list(NAMES))]
    bars = []
    for row in known.tolist():
        start, wait, end = (float(times[row]) for times in (window.start, window.wait, window.end))
        communicates = Kind(int(table.kind[row])) in LANES
        begin = start - overlay.measured_zero + (0.0 if communicates else wait)
        bar = bar_of(table, row, chunk_of, begin, end - overlay.measured_zero)
        bars.append(_named(overlay, bar._replace(wait=wait)))
    return bars


def predicted_bars(overlay: Overlay) -> list[Bar]:
    """Return the simulated bars of the same actions; messages from their start to their arrival."""
    simulation, table = overlay.simulation, overlay.window.table
    chunk_of = chunks_of(table.header)
    sends = table.is_kind(Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT) & (simulation.end > simulation.start)
    rows = overlay.window.rows
    shown = rows[(simulation.working | sends)[rows] & (overlay.window.owner[rows] == rows)]
    end = predicted_ends(overlay.window, simulation)
    return [
        _named(
            overlay,
            bar_of(
                table,
                row,
                chunk_of,
                float(simulation.start[row]) - overlay.predicted_zero,
                float(end[row]) - overlay.predicted_zero,
            ),
        )
        for row in shown.tolist()
    ]


def _named(overlay: Overlay, bar: Bar) -> Bar:
    """The bar with the run's own number of its step, from 1 as in the log."""
    step = overlay.window.first_step + bar.step + 1
    place = f"stage {bar.stage}, micro-batch {bar.label}, step {step}" if bar.stage >= 0 else f"step {step}"
    return bar._replace(step=step, text=place)


def draw_overlay_html(overlay: Overlay) -> str:
    """Return the interactive page: a rank's measured bars over its predicted ones, and its delay."""
    measured, predicted = overlay.ranks[overlay.slowest]
    lines, bars = [], []
    for rank in range(overlay.window.table.header.num_ranks):
        lines += [Line(f"rank {rank}", gap=2), Line("predicted", soft=True, height=14, gap=12)]
    bars += [(2 * bar.rank, bar, f"measured{_waited(bar)}") for bar in measured_bars(overlay) if bar.lane != RECEIVE]
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
    return html_page(headline(overlay), figures, lines, bars, overlay.finish, curves)


def _waited(bar: Bar) -> str:
    return f", waited {bar.wait:.3g} ms" if bar.wait > 0 else ""


def draw_overlay_trace(overlay: Overlay) -> str:
    """All ranks in one Chrome/Perfetto trace: a process for what each rank did, and one for what was predicted."""
    ranks, run = overlay.window.table.header.num_ranks, overlay.run
    events = trace_events(measured_bars(overlay), MICROSECONDS)
    zero, steps = overlay.predicted_zero, range(len(overlay.window.steps))
    received = [bar for bar in receive_bars(overlay.simulation) if bar.step in steps]
    arriving = [_named(overlay, bar._replace(start=bar.start - zero, end=bar.end - zero)) for bar in received]
    events += trace_events(predicted_bars(overlay) + arriving, MICROSECONDS, "predicted rank", ranks)
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"layout": run.layout, **run.about}}
    return json.dumps(document) + "\n"


LEFT, TOP, MEASURED, PREDICTED, GAP = 84, 66, 24, 13, 12


def draw_overlay_svg(overlay: Overlay, width: int = 1100) -> str:
    """A still picture: each rank's compute as measured, below it as predicted, with milliseconds above."""
    measured, predicted = (
        [bar for bar in bars if bar.lane == COMPUTE] for bars in (measured_bars(overlay), predicted_bars(overlay))
    )
    ranks = overlay.window.table.header.num_ranks
    first = min(0.0, *(bar.start - bar.wait for bar in measured))
    scale = (width - LEFT - 12) / (overlay.finish - first)
    bottom = TOP + ranks * _row_height()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 30}" width="{width}" '
        f'height="{bottom + 30}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(headline(overlay))}</title>",
        f'<rect width="{width}" height="{bottom + 30}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="15" font-weight="bold" fill="#1d2430">{escape(headline(overlay))}</text>',
        f'<text x="12" y="38" font-size="11" fill="#4a5361">{escape(sentence(overlay))}</text>',
    ]
    parts += axis(first, overlay.finish, scale, (LEFT, TOP, bottom - GAP), " ms")
    for rank in range(ranks):
        y = TOP + rank * _row_height()
        parts.append(f'<text x="12" y="{y + 17}" fill="#1d2430">rank {rank}</text>')
        parts.append(f'<text x="12" y="{y + 36}" font-size="10" fill="#4a5361">predicted</text>')
    parts += [_bar(bar, first, scale, 0, MEASURED) for bar in measured]
    parts += [_bar(bar, first, scale, MEASURED + 1, PREDICTED) for bar in predicted]
    first_step = overlay.window.steps[0] + 1
    counted = [bar._replace(step=bar.step - first_step) for bar in measured]
    parts += [
        f'<rect x="{LEFT + (bar.start - first) * scale:.2f}" y="{TOP + bar.rank * _row_height()}" '
        f'width="{(bar.end - bar.start) * scale:.2f}" height="3" fill="#1d2430"/>'
        for bar in counted
        if bar.step % 2
    ]
    parts += legend(counted, bottom + 6, LEFT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row_height() -> int:
    return MEASURED + PREDICTED + 1 + GAP


def _bar(bar: Bar, first: float, scale: float, offset: int, height: int) -> str:
    x, y = LEFT + (bar.start - first) * scale, TOP + bar.rank * _row_height() + offset
    width, colour = (bar.end - bar.start) * scale, fill(bar.kind, bar.shade)
    parts = [f"<title>{escape(f'{NAMES[bar.kind]}, {bar.text}, {bar.start:.4g} to {bar.end:.4g} ms')}</title>"]
    if bar.wait > 0:
        middle, begin = y + height / 2, x - bar.wait * scale
        parts.append(f'<path d="M{begin:.2f} {middle}H{x:.2f}" stroke="#98a2b3" stroke-width="1.2"/>')
    parts.append(
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.4):.2f}" height="{height}" fill="{colour}" stroke="#ffffff" '
        'stroke-width="0.5"/>'
    )
    label = bar.label
    if bar.kind != Kind.UPDATE and width > 6.5 * len(label) + 2:
        size = 11 if height == MEASURED else 9
        parts.append(
            f'<text x="{x + width / 2:.2f}" y="{y + height / 2 + size * 0.36:.1f}" font-size="{size}" '
            f'text-anchor="middle" fill="{ink(colour)}">{label}</text>'
        )
    return f"<g>{''.join(parts)}</g>"
