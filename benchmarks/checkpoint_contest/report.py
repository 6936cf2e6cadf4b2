"""Figures as Markdown tables."""

from collections.abc import Sequence

from .race import Race
from .stall import Stall
from .throttled import Overhead


def table(race: Race) -> str:
    """Return the times; stalls also as multiples of one copy of the state, and other times also as bytes per
    second."""
    lines = [
        "| | stall | stall over one copy | first stall | durable | load | resharded load |",
        "|---|---|---|---|---|---|---|",
        f"| one copy of the state in memory | {race.copy:.3f} s | 1.00 | | | | |",
    ]
    for each in race.figures:
        lines.append(
            f"| {each.name} | {each.stall:.3f} s | {each.stall / race.copy:.2f} | {each.first_stall:.3f} s | "
            f"{_with_rate(race, each.durable)} | {_with_rate(race, each.load)} | {_with_rate(race, each.resharded)} |"
        )
    return "\n".join(lines)


def overhead_table(overheads: Sequence[Overhead]) -> str:
    """Return the training time that `checkpoint.every auto` adds on each disk."""
    lines = ["| disk | saves | steps between the last two | overhead | bound |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.megabytes_a_second:g} MB/s | {each.saves} | {each.interval} | {each.overhead:.2%} | "
        f"{each.bound:.2%} |"
        for each in overheads
    ]
    return "\n".join(lines)


def stall_table(stalls: Sequence[Stall]) -> str:
    """Return the seconds by which a copy delays a step."""
    lines = ["| copy | between steps | in the next step | predicted |", "|---|---|---|---|"]
    lines += [
        f"| {each.copy:.3f} s | {each.between_steps:.3f} s | {each.next_step:.3f} s | {each.predicted:.3f} s |"
        for each in stalls
    ]
    return "\n".join(lines)


def _with_rate(race: Race, seconds: float | None) -> str:
    return "cannot" if seconds is None else f"{seconds:.3f} s, {race.bytes / seconds / 1e9:.2f} GB/s"
