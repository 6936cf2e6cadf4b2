"""A schedule as one self-contained page: zoom, hover, critical path, activation memory. No network, no library."""

import json
from html import escape
from typing import Any

from megapipe.schedules.drawing.bars import Bar, activation_curves, bars_of
from megapipe.schedules.drawing.page import PAGE
from megapipe.schedules.drawing.palette import NAMES, fill, ink
from megapipe.schedules.simulation.simulate import Simulation


def draw_html(simulation: Simulation) -> str:
    """The simulated run as an HTML document."""
    header = simulation.table.header
    title = f"{header.name}, {header.num_ranks} ranks, {header.num_microbatches} micro-batches"
    data = json.dumps(_page_data(simulation), separators=(",", ":")).replace("</", "<\\/")
    return PAGE.replace("@TITLE@", escape(title)).replace("@DATA@", data)


def _page_data(simulation: Simulation) -> dict[str, Any]:
    header = simulation.table.header
    bars = bars_of(simulation)
    kinds = sorted({bar.kind for bar in bars})
    return {
        "ranks": header.num_ranks,
        "finish": simulation.finish,
        "figures": [
            ["bubble", f"{simulation.bubble:.2%}", "idle time over ideal time"],
            ["makespan", f"{simulation.makespan:g}", "longest time on any one rank"],
            ["peak activations", f"{max(simulation.peak_activations):g}", "micro-batches on the fullest rank"],
            ["weight versions", f"{max(simulation.weight_versions)}", "copies of the weights a rank keeps"],
            ["class", header.numerical_class, "A: bit-equal to one process, B: to its own recursion, C: in tolerance"],
        ],
        "kinds": {int(kind): NAMES[kind] for kind in kinds},
        "legend": [[NAMES[kind], fill(kind, 0)] for kind in kinds],
        "bars": [_row(bar) for bar in bars],
        "memory": activation_curves(simulation),
    }  # fmt: skip


def _row(bar: Bar) -> list[Any]:
    """The fields that the page names, in its order."""
    colour = fill(bar.kind, bar.chunk)
    times = round(bar.start, 9), round(bar.end, 9)
    place = bar.rank, bar.lane, int(bar.kind), bar.stage, bar.microbatch, bar.step
    return [*place, *times, int(bar.critical), bar.text, colour, ink(colour)]
