"""A schedule as a still picture: one row a rank, time to the right, micro-batch numbers in the boxes."""

from html import escape

from megapipe.schedules.drawing.bars import COMPUTE, Bar, bars_of
from megapipe.schedules.drawing.palette import NAMES, fill, ink
from megapipe.schedules.simulation.simulate import Simulation

ROW_HEIGHT, BAR_HEIGHT, LEFT, TOP, LEGEND = 30, 24, 64, 46, 34


def draw_svg(simulation: Simulation, width: int = 1100) -> str:
    """The simulated compute of every rank as an SVG document ``width`` pixels wide."""
    header = simulation.table.header
    bars = [bar for bar in bars_of(simulation) if bar.lane == COMPUTE]
    scale = (width - LEFT - 12) / max(simulation.finish, 1e-12)
    height = TOP + ROW_HEIGHT * header.num_ranks + LEGEND + 8
    title = f"{header.name}: {header.num_ranks} ranks, {header.num_microbatches} micro-batches, {_idle(simulation)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold" fill="#1d2430">{escape(title)}</text>',
    ]
    for rank in range(header.num_ranks):
        y = TOP + rank * ROW_HEIGHT
        parts.append(f'<text x="12" y="{y + 17}" fill="#4a5361">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width - LEFT - 12}" height="{BAR_HEIGHT}" fill="#f1f3f6"/>')
    parts += ['<g font-size="11" text-anchor="middle">', *(_bar(bar, scale) for bar in bars), "</g>"]
    parts += legend(bars, TOP + ROW_HEIGHT * header.num_ranks + 8, LEFT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _idle(simulation: Simulation) -> str:
    """Return the bubble, and the picture's idle time if waits for first forwards make it larger."""
    bubble, idle = f"{simulation.bubble:.1%}", f"{simulation.idle:.1%}"
    if bubble == idle:
        return f"bubble {bubble} of the ideal time"
    return f"bubble {bubble} of the ideal time ({idle} with the wait for the first forward)"


def _bar(bar: Bar, scale: float) -> str:
    x, y, width = LEFT + bar.start * scale, TOP + bar.rank * ROW_HEIGHT, (bar.end - bar.start) * scale
    colour = fill(bar.kind, bar.chunk)
    label = "" if bar.microbatch < 0 or width < 7 * len(str(bar.microbatch)) + 2 else str(bar.microbatch)
    text = f'<text x="{x + width / 2:.2f}" y="{y + 17}" fill="{ink(colour)}">{label}</text>' if label else ""
    if bar.step % 2:
        text += f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="4" fill="#1d2430"/>'
    return (
        f"<g><title>{escape(bar.text)}, {bar.start:g} to {bar.end:g}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{BAR_HEIGHT}" fill="{colour}" '
        f'stroke="#ffffff" stroke-width="0.6"/>{text}</g>'
    )


def legend(bars: list[Bar], y: int, x: int) -> list[str]:
    """The colours of the bars' kinds, from a place to the right."""
    parts = []
    for kind in sorted({bar.kind for bar in bars}):
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{fill(kind, 0)}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 11}" fill="#4a5361">{NAMES[kind]}</text>')
        x += 36 + 7 * len(NAMES[kind])
    if len({bar.chunk for bar in bars}) > 1:
        parts.append(f'<text x="{x}" y="{y + 11}" fill="#4a5361">lighter: later chunks of the rank</text>')
        x += 240
    if any(bar.step % 2 for bar in bars):
        parts.append(f'<text x="{x}" y="{y + 11}" fill="#4a5361">dark edge: every other step</text>')
    return parts
