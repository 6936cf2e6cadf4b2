"""Speed against memory: layouts that fit, and those that no other one beats in both."""

from collections.abc import Sequence
from html import escape

from megapipe.config.words import bytes_told
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.report.svg import cut, document, line, text, ticks
from megapipe.planner.report.words import layout_told

LEFT, TOP, RIGHT, HEIGHT, ROW = 84, 48, 28, 280, 18
RADIUS = 9
MOST_ROWS = 12


def draw_pareto(front: Sequence[Estimate], limit: float, width: int = 900) -> str:
    """The front, numbered from the fastest on; the numbers' layouts stand below. limit: bytes of a device."""
    largest_x = max(limit, max(each.peak_bytes for each in front)) / 1e9
    largest_y = max(each.tokens_per_second for each in front) * 1.08
    bottom = TOP + HEIGHT

    def x_of(estimate: Estimate) -> float:
        return LEFT + estimate.peak_bytes / 1e9 / largest_x * (width - LEFT - RIGHT)

    def y_of(estimate: Estimate) -> float:
        return bottom - estimate.tokens_per_second / largest_y * HEIGHT

    parts = []
    for value in ticks(largest_x):
        x = LEFT + value / largest_x * (width - LEFT - RIGHT)
        parts.append(line(x, TOP, x, bottom))
        parts.append(text(x, bottom + 16, f"{value:g} GB", "soft", "middle"))
    for value in ticks(largest_y):
        y = bottom - value / largest_y * HEIGHT
        parts.append(line(LEFT, y, width - RIGHT, y))
        parts.append(text(LEFT - 8, y + 4, f"{value:,.0f}", "soft", "end"))
    parts.append(text(12, TOP - 8, "tokens per second", "soft"))
    edge = LEFT + limit / 1e9 / largest_x * (width - LEFT - RIGHT)
    parts.append(line(edge, TOP, edge, bottom, "limit", dashed=True))
    parts.append(text(edge - 6, TOP - 8, f"device: {bytes_told(limit)}", "limit-text", "end"))
    places = [(x_of(each), y_of(each)) for each in front]
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts.append(f'<polyline points="{steps}" class="plan-front" stroke-width="1.5"/>')
    parts += _points(front, places)
    for index, estimate in enumerate(front[:MOST_ROWS]):
        y, kind = bottom + 40 + ROW * index, "ink" if index == 0 else "soft"
        parts.append(text(LEFT, y, str(index + 1), kind, "end"))
        parts.append(text(LEFT + 92, y, f"{estimate.tokens_per_second:,.0f}", kind, "end"))
        parts.append(text(LEFT + 166, y, bytes_told(estimate.peak_bytes), kind, "end"))
        parts.append(text(LEFT + 184, y, cut(layout_told(estimate.config), width - LEFT - 184), kind))
    more = len(front) - MOST_ROWS
    if more > 0:
        parts.append(text(LEFT + 184, bottom + 40 + ROW * MOST_ROWS, f"and {more} slower ones", "soft"))
    rows = min(len(front), MOST_ROWS + 1)
    return document(width, bottom + 46 + ROW * rows, "Speed against memory of the fullest rank", parts)


def _points(front: Sequence[Estimate], places: Sequence[tuple[float, float]]) -> list[str]:
    """Numbered discs; of two that would cover each other the later is a small one under them, without its number."""
    small: list[str] = []
    large: list[str] = []
    drawn: list[tuple[float, float]] = []
    for index, (estimate, (x, y)) in enumerate(zip(front, places, strict=True)):
        told = f"<title>{index + 1}: {escape(layout_told(estimate.config))}</title>"
        kind = "best" if index == 0 else "point"
        covered = any(abs(x - left) < 2 * RADIUS and abs(y - top) < 2 * RADIUS for left, top in drawn)
        radius = 3 if covered else RADIUS
        disc = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="plan-{kind}">{told}</circle>'
        if covered:
            small.append(disc)
        else:
            drawn.append((x, y))
            large += [disc, text(x, y + 4, str(index + 1), "on-point", "middle", size=11, bold=True)]
    return small + large
