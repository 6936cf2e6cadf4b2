"""benchmarks/checkpoint_faults.py: its table has a row for every system, and megapipe's rows are without a fault."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import environment

SCRIPT = Path(__file__).parents[2] / "benchmarks/checkpoint_faults.py"


@pytest.mark.exhaustive
def test_two_ranks_side_by_side(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--flips", "4"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.stdout.splitlines() if "|" in line]
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
