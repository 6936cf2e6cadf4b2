"""Memory of every pipeline coordinate as bars beside what a device has."""

from dataclasses import fields
from typing import Final

from megapipe.config.words import bytes_told
from megapipe.planner.cost.estimate import Estimate, RankMemory
from megapipe.planner.report.svg import box, document, lane, legend, line, text, ticks

COLOURS: Final = {
    "weights": "#3b7dd8",
    "master": "#8657c4",
    "gradients": "#e08a1e",
    "moments": "#b26bb5",
    "activations": "#3f9c6c",
    "buffers": "#8b93a1",
    "messages": "#2f8f9d",
    "temporaries": "#c2554f",
}
LEFT, TOP, RIGHT = 84, 44, 84


def draw_memory(estimate: Estimate, width: int = 900) -> str:
    """One bar a pipeline coordinate, in parts, and the line of the device's memory; where devices differ one a bar."""
    pitch = 26 if len(estimate.memory) <= 16 else 14 if len(estimate.memory) <= 64 else 7
    largest = max(*estimate.memory_limits, estimate.peak_bytes)
    scale = (width - LEFT - RIGHT) / largest
    bottom = TOP + pitch * len(estimate.memory)
    parts = []
    for value in ticks(largest / 1e9):
        x = LEFT + value * 1e9 * scale
        parts.append(line(x, TOP - 4, x, bottom))
        parts.append(text(x, bottom + 16, f"{value:g} GB", "soft", "middle"))
    for place, memory in enumerate(estimate.memory):
        y = TOP + place * pitch
        parts.append(lane(LEFT, y, width - LEFT - RIGHT, pitch - 3))
        parts += _bar(memory, place, y, pitch - 3, scale)
        if pitch >= 14 or place % 8 == 0:
            parts.append(text(12, y + pitch / 2 + 3, f"stage {place}", "soft", size=min(12, pitch - 2)))
            total = bytes_told(memory.total)
            parts.append(text(width - RIGHT + 8, y + pitch / 2 + 3, total, "ink", size=min(12, pitch - 2)))
    parts += _limits(estimate, pitch, scale)
    shown = [name for name in COLOURS if any(getattr(memory, name) for memory in estimate.memory)]
    more, below = legend([(COLOURS[name], name) for name in shown], LEFT, bottom + 28, width - LEFT - RIGHT)
    return document(width, below + 6, "Memory of a rank, by pipeline coordinate", parts + more)


def _limits(estimate: Estimate, pitch: int, scale: float) -> list[str]:
    """One line through neighbours whose devices are alike."""
    found, limits = [], estimate.memory_limits
    starts = [place for place, each in enumerate(limits) if place == 0 or each != limits[place - 1]]
    for first, stop in zip(starts, [*starts[1:], len(limits)], strict=True):
        limit = LEFT + limits[first] * scale
        found.append(line(limit, TOP + first * pitch - 4, limit, TOP + stop * pitch, "limit", dashed=True))
        told = f"device: {bytes_told(limits[first])}"
        found.append(text(limit, TOP + first * pitch - (8 if first == 0 else -10), told, "limit-text", "end"))
    return found


def _bar(memory: RankMemory, place: int, y: float, height: float, scale: float) -> list[str]:
    found, x = [], float(LEFT)
    for name in (each.name for each in fields(memory)):
        size = getattr(memory, name)
        if size:
            found.append(box(x, y, size * scale, height, COLOURS[name], f"stage {place}: {name} {bytes_told(size)}"))
        x += size * scale
    return found
