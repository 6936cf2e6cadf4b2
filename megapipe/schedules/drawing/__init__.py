"""Pictures of simulated schedules: SVG, interactive HTML, Chrome trace, terminal."""

from megapipe.schedules.drawing.bars import draw_svg, draw_terminal, draw_trace, trace_events
from megapipe.schedules.drawing.page import draw_html

__all__ = ["draw_html", "draw_svg", "draw_terminal", "draw_trace", "trace_events"]
