"""Speed against memory: layouts that fit, and those that no other one beats in both."""

from collections.abc import Sequence

from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.report.svg import CHARACTER, document, line, text, ticks
from megapipe.planner.report.words import bytes_told, layout_told

LEFT, TOP, RIGHT, HEIGHT, ROW = 84, 48, 28, 280, 18
RADIUS = 9


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
    for index, estimate in enumerate(front):
        told = f"{index + 1}  {estimate.tokens_per_second:,.0f} tokens/s, {bytes_told(estimate.peak_bytes)}: "
        told += layout_told(estimate.config)
        most = int((width - LEFT - RIGHT) / CHARACTER)
        shown = told if len(told) <= most else f"{told[: most - 3]}..."
        parts.append(text(LEFT, bottom + 40 + ROW * index, shown, "ink" if index == 0 else "soft"))
    return document(width, bottom + 46 + ROW * len(front), "Speed against memory of the fullest rank", parts)


def _points(front: Sequence[Estimate], places: Sequence[tuple[float, float]]) -> list[str]:
    """Numbered discs; where two would cover each other, the later is a small one without its number."""
    parts: list[str] = []
    drawn: list[tuple[float, float]] = []
    for index, (estimate, (x, y)) in enumerate(zip(front, places, strict=True)):
        told = f"{index + 1}: {layout_told(estimate.config)}"
        kind = "best" if index == 0 else "point"
        covered = any(abs(x - left) < 2 * RADIUS and abs(y - top) < 2 * RADIUS for left, top in drawn)
        radius = 3 if covered else RADIUS
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="plan-{kind}"><title>{told}</title></circle>'
        )
        if not covered:
            drawn.append((x, y))
            parts.append(text(x, y + 4, str(index + 1), "on-point", "middle", size=11, bold=True))
    return parts
