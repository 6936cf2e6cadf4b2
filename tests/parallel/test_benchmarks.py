"""Benchmarks of data parallelism and of links run at a tiny size, to equal losses; no time is judged."""

import json
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run


@pytest.mark.exhaustive
def test_every_contestant_trains_alike(tmp_path: Path) -> None:
    written = tmp_path / "table.md"
    command = f"python benchmarks/parallel.py --size toy --repeats 2 --write {written}"
    figures = {each["name"]: each for each in json.loads(run(command, 400).splitlines()[-1])["figures"]}
    replicas = {name: each["loss"] for name, each in figures.items() if "no replicas" not in name}
    assert {"megapipe", "DDP", "FSDP2", "FSDP2, weights kept"} <= replicas.keys()
    assert list(replicas.values()) == pytest.approx([replicas["megapipe"]] * len(replicas), rel=1e-4)
    assert all(each["seconds"] > 0 for each in figures.values())
    assert all(f"| {name} |" in written.read_text() for name in figures)


def test_contestants_with_different_losses_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from benchmarks.parallel_contest.race import check_losses

    alike = {"megapipe": [(1.0, 6.0), (1.0, 5.9)], "DDP": [(1.0, 6.0), (1.0, 5.9001)]}
    check_losses(alike)
    with pytest.raises(RuntimeError, match=r"DDP is at loss 5\.910000 in step 1, and megapipe at 5\.900000"):
        check_losses({**alike, "DDP": [(1.0, 6.0), (1.0, 5.91)]})


@pytest.mark.slow
def test_the_link_benchmark_ends_in_one_json_object() -> None:
    output = run("python benchmarks/link_speed.py --kilobytes 4 --messages 5 --repeats 1", 120)
    figures = json.loads(output.splitlines()[-1])
    assert figures["shared_memory_stream_microseconds"] > 0
    assert figures["gloo_stream_microseconds"] > 0
