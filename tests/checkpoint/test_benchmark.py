"""The benchmark of checkpoints runs every contestant at a small size; what they load is checked, no time is judged."""

import json
from pathlib import Path

import pytest

from tests.support.commands import run


@pytest.mark.exhaustive
def test_every_contestant_gives_back_what_it_saved(tmp_path: Path) -> None:
    written = tmp_path / "table.md"
    sizes = "--gigabytes=0.1 --rounds=1 --steps=20 --stalls=1"
    output = run(f"python benchmarks/checkpoint.py {sizes} --folder={tmp_path} --write={written}", 600)
    report = json.loads(output.splitlines()[-1])
    figures = {each["name"]: each for each in report["figures"]}
    assert report["bytes"] == 2 * 3 * 4 * 2048**2
    assert [name for name, each in figures.items() if each["resharded"] is None] == ["torch.save"]
    assert all(0 < each["stall"] <= each["durable"] for each in figures.values())
    assert [each["megabytes_a_second"] for each in report["overheads"]] == [1000.0, 200.0, 40.0]
    assert all(f"| {name} |" in written.read_text() for name in figures)
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"], "nothing is left on the disk"
