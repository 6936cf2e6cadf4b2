"""benchmarks/checkpoint_faults.py: its table has a row for every system, and megapipe's rows are without a fault."""

from pathlib import Path

import pytest

from tests.support.commands import ROOT, run


@pytest.mark.exhaustive
def test_two_ranks_side_by_side(tmp_path: Path) -> None:
    shown = run(f"python {ROOT}/benchmarks/checkpoint_faults.py --ranks 2 --flips 4", 300, tmp_path)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines() if "|" in line]
    rows = [[name, *map(int, cells)] for name, *cells in rows if cells[0].isdigit()]
    assert len(rows) == 6, "three systems in each of two tables"
    for _, ranks, total, *cells in rows:
        assert ranks == 2
        assert sum(cells) == total > 10
    (_, _, _, old, new, mixed, nothing), (_, _, flips, fallen_back, noticed, without_effect, other) = (
        row for row in rows if row[0] == "megapipe"
    )
    assert old > new > 0
    assert (mixed, nothing) == (0, 0)
    assert flips == 12, "three files"
    assert other == 0, "a flipped bit gave other values"
    assert noticed == 0, "an older step is there to go on from"
    assert fallen_back > without_effect
