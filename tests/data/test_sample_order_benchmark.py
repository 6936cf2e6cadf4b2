"""The sample-order benchmark runs and ends in one JSON object; its figures are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sample_order.py"


@pytest.mark.slow
def test_last_line_is_one_json_object(tmp_path: Path) -> None:
    sizes = ["--tokens", "100000", "10000000000000", "--corpora", "20", "--blend-samples", "1000"]
    sizes += ["--loader-bytes", "1000000", "--documents", "100000"]
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), *sizes]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    figures = json.loads(result.stdout.splitlines()[-1])
    small, large = figures["orders"]
    assert small["megatron_start_ms"] > 0
    assert large["sample_us"] > 0
    assert "megatron_start_ms" not in large
    assert figures["blend"]["corpora"] == 20
    assert min(figures["loaders"].values()) > 0
    (documents,) = figures["documents"]
    assert documents["index_bytes"] == 34 + 20 * 100_000 + 8
    assert not list(tmp_path.iterdir())
