"""The pipeline benchmark runs at tiny sizes and ends in one JSON object; its times are not judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "pipeline_engine.py"
CONTESTANTS = {"torch", "megapipe shared_memory", "bare shared_memory", "megapipe gloo", "bare gloo", "autograd alone"}


def figures(*flags: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "--kilofloats", "1", "--repeats", "1", "--json", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["figures"]
    return rows


@pytest.mark.slow
def test_every_contestant_runs_every_schedule() -> None:
    rows = figures("--ranks", "2", "--milliseconds", "1", "--gpt-ranks", "--no-bubble")
    races: dict[str, dict[str, dict[str, Any]]] = {}
    for figure in rows:
        races.setdefault(figure["schedule"], {})[figure["contestant"]] = figure
    assert set(races) == {"gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zb_v", "dualpipe_v"}
    # What two ranks and four micro-batches allow, in milliseconds, with a stage's forward 1 and backward 2.
    finish = {"gpipe": 15.0, "1f1b": 15.0, "interleaved_1f1b": 27.0, "interleaved_zero_bubble": 25.0, "zb_v": 25.0}
    finish["dualpipe_v"] = 26.0
    for name, contestants in races.items():
        assert set(contestants) == CONTESTANTS
        for contestant, figure in contestants.items():
            assert figure["finish"] * 1e3 == pytest.approx(finish[name]), (name, contestant)
            assert figure["processor"] > 0
            if contestant != "autograd alone":
                assert figure["seconds"] > figure["finish"]


@pytest.mark.exhaustive
def test_full_pipelines_and_real_stages_run() -> None:
    rows = figures("--ranks", "2", "--milliseconds", "1", "--schedules", "1f1b", "zb_v")
    assert [figure["kind"] for figure in rows].count("gpt") == 2
    (bubble,) = (figure for figure in rows if figure["kind"] == "bubble")
    assert bubble["alone"] > 3.0
    assert bubble["pipeline"] > 3.0


@pytest.mark.exhaustive
def test_three_ranks_run_where_only_neighbours_have_links() -> None:
    rows = figures("--ranks", "3", "--milliseconds", "1", "--gpt-ranks", "--no-bubble")
    assert {figure["contestant"] for figure in rows} == CONTESTANTS
