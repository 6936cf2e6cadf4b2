"""The library's example runs as it is documented, and the guide's other code does what the guide says."""

import re
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run

GUIDE = (ROOT / "docs/library.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples/library_pipeline.py"
SHARDED = ROOT / "examples/library_sharded.py"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def printed(program: Path, num_processes: int) -> str:
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node {num_processes}" if num_processes > 1 else ""
    return run(f"python {launcher} {program}", 240)


def test_the_guide_shows_the_example_and_it_is_short() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert BLOCKS[0] == text
    assert len([line for line in text.splitlines() if line.strip()]) < 20


@pytest.mark.slow
def test_the_example_learns_and_prints_what_one_process_prints(tmp_path: Path) -> None:
    alone = tmp_path / "alone.py"
    alone.write_text(EXAMPLE.read_text(encoding="utf-8").replace('"pipeline": 2', '"pipeline": 1'), encoding="utf-8")
    output = printed(EXAMPLE, 2)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\d+\.\d+)$", output, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < 0.01 < losses[0]
    assert printed(alone, 1) == output


@pytest.mark.slow
def test_the_sharded_example_learns_as_one_process_does(tmp_path: Path) -> None:
    text = SHARDED.read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.strip()]) < 20
    changes = [
        ('{"data": 2, "tensor": 2}', '{"data": 1}'),
        ('slice(mesh.coordinate("data"), None, 2)', "slice(None)"),
        ("microbatches=4, zero=3", "microbatches=8"),
    ]
    alone = tmp_path / "alone.py"
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    alone.write_text(text, encoding="utf-8")
    outputs = printed(SHARDED, 4), printed(alone, 1)
    ours, theirs = ([float(loss) for loss in re.findall(r": loss (.*)$", each, re.MULTILINE)] for each in outputs)
    assert ours == pytest.approx(theirs, abs=2e-3)
    assert len(ours) == 3
    assert ours[-1] < ours[0] / 2
