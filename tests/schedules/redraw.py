"""Draws the pictures of docs/schedules.md: ``python -m tests.schedules.redraw`` writes them all."""

from pathlib import Path

from megapipe.schedules import GENERATORS, build, rank_costs, simulate
from megapipe.schedules.drawing import draw_svg

PICTURES = Path(__file__).parents[2] / "docs" / "pictures" / "schedules"


def picture(name: str) -> str:
    """Four ranks, eight micro-batches (two steps of four where the schedule never flushes), backward twice forward."""
    never_flushes = GENERATORS[name].numerical_class == "B"
    schedule = build(name, 4, 4 if never_flushes else 8)
    return draw_svg(simulate(schedule, rank_costs(schedule.header), 2 if never_flushes else 1))


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in GENERATORS:
        (PICTURES / f"{name}.svg").write_text(picture(name), encoding="utf-8")
