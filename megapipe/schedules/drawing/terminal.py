"""A schedule as lines of text, one a rank."""

from typing import Final

import numpy as np

from megapipe.schedules.actions import Kind
from megapipe.schedules.drawing.bars import COMPUTE, Bar, bars_of
from megapipe.schedules.simulation.simulate import Simulation

COLOURS: Final = {
    Kind.FORWARD: 34, Kind.RECOMPUTE: 90, Kind.BACKWARD: 33, Kind.BACKWARD_INPUT: 33, Kind.BACKWARD_WEIGHT: 32,
    Kind.UPDATE: 35,
}  # fmt: skip
LEGEND: Final = (
    "0-9 forward, a-j backward (or its input half), + weight half, r recomputation, U update, digits and "
    "letters by the last digit of the micro-batch; . idle"
)


def draw_terminal(simulation: Simulation, width: int = 120, colour: bool = False) -> str:
    """One line a rank; every character is an equal part of the time, as fine as ``width`` allows."""
    header = simulation.table.header
    bars = [bar for bar in bars_of(simulation) if bar.lane == COMPUTE]
    shortest = min(bar.end - bar.start for bar in bars)
    columns = min(width, round(simulation.finish / shortest * 2))
    middles = (np.arange(columns) + 0.5) * simulation.finish / columns
    lines = []
    for rank in range(header.num_ranks):
        mine = [bar for bar in bars if bar.rank == rank]
        index = np.searchsorted([bar.start for bar in mine], middles, side="right") - 1
        cells = [
            _cell(mine[i], colour) if i >= 0 and middle < mine[i].end else "."
            for i, middle in zip(index.tolist(), middles.tolist(), strict=True)
        ]
        lines.append(f"rank {rank:<3d} " + "".join(cells))
    return "\n".join([*lines, "", LEGEND])


def _cell(bar: Bar, colour: bool) -> str:
    digit = bar.microbatch % 10
    letter = {
        Kind.FORWARD: str(digit),
        Kind.RECOMPUTE: "r",
        Kind.BACKWARD: "abcdefghij"[digit],
        Kind.BACKWARD_INPUT: "abcdefghij"[digit],
        Kind.BACKWARD_WEIGHT: "+",
    }.get(bar.kind, "U")
    return f"\x1b[{COLOURS[bar.kind]}m{letter}\x1b[0m" if colour else letter
