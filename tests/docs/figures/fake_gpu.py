"""The table of docs/gpu_without_gpu.md: what a training step launches, moves and keeps on a fake GPU."""

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.figures import files, head, read, row, table
from tests.fake_cuda.table import ROWS, SPARE, run_row, write_corpus

PAGE, NAME = "docs/gpu_without_gpu.md", "steps on a fake GPU"
LARGE = 10**9
"""Bytes of a peak from which on 2% is the limit; a smaller one may differ by a mebibyte."""


@cache
def line(number: int) -> str:
    """Run a row; fail if its peak is not the predicted one."""
    model, name, changes = ROWS[number]
    with tempfile.TemporaryDirectory() as folder:
        _, reports, all_predicted = run_row(write_corpus(Path(folder)), model, changes, spare=SPARE)
    step, peak, predicted = reports[0].phases["step"], reports[0].peak, all_predicted[0]
    limit = 0.02 * predicted if peak >= LARGE else 2**20
    assert abs(peak - predicted) <= limit, (name, peak, predicted)
    counts = (len(reports), f"{step.launches.total():,}", f"{step.moved.total() / 1e9:.1f}", step.waits)
    return row(model, name, *counts, f"{peak / 1e9:.2f}", f"{predicted / 1e9:.2f}", f"{peak / predicted - 1:+.1%}")


@table(PAGE, NAME, "exhaustive")
def steps() -> Iterator[str]:
    yield from head(
        "model", "run", "ranks", "launches", "GB moved", "host waits", "peak GB", "predicted GB", "difference"
    )
    yield from map(line, range(len(ROWS)))


@files("first step on a fake GPU", "slow")
def first_step() -> dict[str, str]:
    """Compare the first row alone; the whole table takes minutes."""
    before, mark, rest = read(PAGE).partition(f"<!-- figure: {NAME} -->\n")
    lines = rest.split("\n")
    return {PAGE: before + mark + "\n".join([*lines[:2], line(0), *lines[3:]])}
