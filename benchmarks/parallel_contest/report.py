"""Figures as a Markdown table."""

from collections.abc import Sequence

from .race import ALONE, Figure


def table(figures: Sequence[Figure]) -> str:
    """Return the seconds of a step, and each contestant's speed relative to the best contestant.

    Contestants without replicas do not communicate, so only their times are shown.
    """
    best = min(figure.seconds for figure in figures if not figure.name.endswith(ALONE))
    lines = [
        "| | seconds a step | lower quartile | upper quartile | speed over the best | loss |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures:
        ratio, loss = f"{best / figure.seconds:.3f}", f"{figure.loss:.4f}"
        if figure.name.endswith(ALONE):
            ratio = loss = ""
        times = f"{figure.seconds:.3f} | {figure.lower_quartile:.3f} | {figure.upper_quartile:.3f}"
        lines.append(f"| {figure.name} | {times} | {ratio} | {loss} |")
    return "\n".join(lines)
