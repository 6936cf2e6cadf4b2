"""docs/schedule_table.md: the figures that papers print of every schedule, next to the exact ones."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megapipe.schedules import GENERATORS, Kind, Schedule, build, order, rank_costs, simulate
from tests.docs.figures import head, row, sentence, table

PAGE = "docs/schedule_table.md"
RANKS, MICROBATCHES, CHUNKS, SLICES = 8, 32, 2, 4
EQUAL = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}
IDEAL = 3 * MICROBATCHES
FORWARD = INPUT = WEIGHT = 1 / CHUNKS
PRINTED: dict[str, tuple[str, Callable[[], float] | None, str]] = {
    "gpipe": ("(p-1)/m", lambda: (RANKS - 1) / MICROBATCHES, "1811.06965"),
    "1f1b": ("(p-1)/m", lambda: (RANKS - 1) / MICROBATCHES, "2104.04473"),
    "seq1f1b": ("(p-1)/(s m)", lambda: (RANKS - 1) / (SLICES * MICROBATCHES), "2406.03488"),
    "interleaved_1f1b": ("(p-1)/(v m)", lambda: (RANKS - 1) / (CHUNKS * MICROBATCHES), "2104.04473"),
    "modular": ("(p-1)/(v m)", lambda: (RANKS - 1) / (CHUNKS * MICROBATCHES), "2106.02679"),
    "zb_h1": ("(p-1)v(F + I - W)", lambda: (RANKS - 1) * CHUNKS * (FORWARD + INPUT - WEIGHT) / IDEAL, "2401.10241"),
    "zb_h2": (
        "(p-1)v(F + I - 2W)",
        lambda: (RANKS - 1) * CHUNKS * (FORWARD + INPUT - 2 * WEIGHT) / IDEAL,
        "2401.10241",
    ),
    "zb_v": ("0 if F = I = W", lambda: 0.0, "2401.10241"),
    "zb_auto": ("none: found by search", None, "2401.10241"),
    "gis": ("(p-1)(F + I)", lambda: (RANKS - 1) * (FORWARD + INPUT) / IDEAL, "2503.01328"),
    "gis_h": (
        "(p-1)(F + I) + (v-1)p(F + I - W)/2",
        lambda: ((RANKS - 1) * (FORWARD + INPUT) + (CHUNKS - 1) * RANKS * (FORWARD + INPUT - WEIGHT) / 2) / IDEAL,
        "2503.01328",
    ),
    "v_half": ("about a half of 1F1B's", None, "2405.15362"),
    "v_min": ("about two thirds of 1F1B's", None, "2405.15362"),
    "v_auto": ("none: found by search", None, "2405.15362"),
    "dualpipe_v": (
        "(PP/2 - 1)(F&B + B - 3W), PP = 2p",
        lambda: (RANKS - 1) * ((FORWARD + (INPUT + WEIGHT)) + (INPUT + WEIGHT) - 3 * WEIGHT) / IDEAL,
        "2412.19437",
    ),
    "chimera": ("(p-2)/(2m) if B = F", None, "2107.06925"),
    "bitpipe": ("(p-2)/(4m) if B = F", None, "2410.19367"),
    "2bw": ("none after the warm-up", None, "2006.09503"),
    "pipedream": ("none after the warm-up", None, "1806.03377"),
}
"""The formula of each schedule, its value as a part of the ideal time, and the paper (arXiv)."""


def peak_activations(compute: Schedule) -> float:
    """Return the peak number of micro-batches that any rank holds until their weight halves."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    ranks = range(compute.header.num_ranks)
    rows = ([action.kind for part in ("prologue", "body") for action in compute.actions(part, rank)] for rank in ranks)  # type: ignore[arg-type]
    most = max(int(np.cumsum([change.get(kind, 0) for kind in kinds]).max()) for kinds in rows)
    whole = compute.header.num_ranks * compute.header.model_copies / compute.header.slices
    return most * whole / len(compute.header.stages)


@table(PAGE, "schedules as printed")
def as_printed() -> Iterator[str]:
    """Yield a row for each schedule; a formula that has a value gives the exact one."""
    yield from head("schedule", "bubble", "as printed", "activations", "transfers", "copies", "class", "arXiv")
    for name, (formula, value, paper) in PRINTED.items():
        schedule = build(name, RANKS, MICROBATCHES)
        header = schedule.header
        bubble = simulate(schedule, rank_costs(header, **EQUAL), 1 if schedule.flushes else 4).bubble
        if value is not None:
            assert bubble == pytest.approx(value(), abs=1e-9), name
        kinds = [action.kind for rank in range(RANKS) for action in schedule.actions("body", rank)]
        sends = kinds.count(Kind.SEND_ACTIVATION) + kinds.count(Kind.SEND_GRADIENT)
        activations = peak_activations(order(name, RANKS, MICROBATCHES))
        copies = f"{max(header.weight_versions)} + {header.gradient_buffers * header.model_copies}"
        yield row(
            name,
            f"{bubble:.4f}",
            formula,
            f"{activations:g}",
            f"{sends / MICROBATCHES:g}",
            copies,
            header.numerical_class,
            paper,
        )
    assert set(PRINTED) == set(GENERATORS)


@sentence(PAGE, "bubble of ZB-H1", r"With 8 ranks and 20 micro-batches, it gives ([\d.]+)%; the order has ([\d.]+)%\.")
def bubble_of_zb_h1() -> list[str]:
    """Return the value of Primus' formula, and that of the simulated order."""
    schedule = build("zb_h1", 8, 20)
    exact = simulate(schedule, rank_costs(schedule.header, **EQUAL)).bubble_rate
    return [f"{100 * (8 - 1) / (3 * (20 + 8 - 1)):.1f}", f"{100 * exact:.1f}"]
