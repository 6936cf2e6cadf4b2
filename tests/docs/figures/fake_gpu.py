"""The table of docs/gpu_without_gpu.md: what a training step launches, moves and keeps on a fake GPU."""

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.figures import files, head, read, row, table
from tests.fake_cuda.table import ROWS, measured, write_corpus

PAGE, NAME = "docs/gpu_without_gpu.md", "steps on a fake GPU"
LARGE = 10**9
"""Bytes of a peak from which on 2% is the limit; a smaller one may differ by a mebibyte."""


@cache
def line(number: int) -> str:
    """Run a row; fail if its peak is not the predicted one."""
    model, name, changes = ROWS[number]
    with tempfile.TemporaryDirectory() as folder:
        report = measured(write_corpus(Path(folder)), model, changes)
    limit = 0.02 * report.predicted if report.peak >= LARGE else 2**20
    assert abs(report.peak - report.predicted) <= limit, (name, report)
    difference = f"{report.peak / report.predicted - 1:+.1%}"
    sizes = (f"{report.peak / 1e9:.2f}", f"{report.predicted / 1e9:.2f}", difference)
    return row(model, name, report.ranks, f"{report.launches:,}", f"{report.moved / 1e9:.1f}", report.waits, *sizes)


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
