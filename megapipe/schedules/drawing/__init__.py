"""Pictures of simulated schedules: SVG, interactive HTML, Chrome trace, terminal."""

from megapipe.schedules.drawing.html import draw_html
from megapipe.schedules.drawing.svg import draw_svg
from megapipe.schedules.drawing.terminal import draw_terminal
from megapipe.schedules.drawing.trace import draw_trace, trace_events

__all__ = ["draw_html", "draw_svg", "draw_terminal", "draw_trace", "trace_events"]
