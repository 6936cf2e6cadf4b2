"""The table in docs/gpu_without_gpu.md is what runs on the fake device give, and peaks are what is predicted."""

from pathlib import Path

import pytest

from tests.fake_cuda import table

LARGE = 10**9
"""Bytes of a peak from which on 2% is the limit; a smaller one may be off by a megabyte."""


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(table.FAST_ROWS, marks=pytest.mark.slow),
        pytest.param(len(table.ROWS), marks=pytest.mark.exhaustive),
    ],
)
def test_the_guide_has_the_table_of_the_code(tmp_path: Path, rows: int) -> None:
    found = table.all_measured(tmp_path, rows)
    assert table.lines(found) == table.written()[:rows]
    for row in found:
        limit = 0.02 * row.predicted if row.peak >= LARGE else 2**20
        assert abs(row.peak - row.predicted) <= limit
