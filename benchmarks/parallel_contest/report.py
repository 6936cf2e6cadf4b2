"""Figures as a Markdown table."""

from collections.abc import Sequence

from .race import ALONE, Figure


def table(figures: Sequence[Figure]) -> str:
    """Return the seconds of a step, and each contestant's speed relative to the best contestant.

    Contestants without replicas do not communicate, so only their times are shown.
    """
    best = min(each.seconds for each in figures if not each.name.endswith(ALONE))
    lines = [
        "| | seconds a step | lower quartile | upper quartile | speed over the best | loss |",
        "|---|---|---|---|---|---|",
    ]
    for each in figures:
        ratio, loss = f"{best / each.seconds:.3f}", f"{each.loss:.4f}"
        if each.name.endswith(ALONE):
            ratio = loss = ""
        times = f"{each.seconds:.3f} | {each.lower_quartile:.3f} | {each.upper_quartile:.3f}"
        lines.append(f"| {each.name} | {times} | {ratio} | {loss} |")
    return "\n".join(lines)
