"""The link benchmark runs and ends in one JSON object; its figures are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "link_speed.py"


@pytest.mark.slow
def test_last_line_is_one_json_object() -> None:
    command = [sys.executable, str(SCRIPT), "--kilobytes", "4", "--messages", "5", "--repeats", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["shared_memory_stream_microseconds"] > 0
    assert figures["gloo_stream_microseconds"] > 0
