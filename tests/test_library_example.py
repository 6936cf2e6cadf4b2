"""The library's example runs as it is documented, and the guide's other code does what the guide says."""

import io
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.support.launch import environment

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs/library.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples/library_pipeline.py"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def run(program: Path, num_processes: int) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    finished = subprocess.run(
        [sys.executable, *(launcher if num_processes > 1 else []), str(program)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def test_the_guide_shows_the_example_and_it_is_short() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert BLOCKS[0] == text
    assert len([line for line in text.splitlines() if line.strip()]) < 20


def test_the_example_learns_and_prints_what_one_process_prints(tmp_path: Path) -> None:
    alone = tmp_path / "alone.py"
    alone.write_text(EXAMPLE.read_text(encoding="utf-8").replace('"pipeline": 2', '"pipeline": 1'), encoding="utf-8")
    output = run(EXAMPLE, 2)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\d+\.\d+)$", output, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < 0.01 < losses[0]
    assert run(alone, 1) == output


def test_other_code_of_the_guide_runs_and_prints_what_it_says() -> None:
    outputs = []
    for code in BLOCKS[1:]:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, {})
        outputs.append(printed.getvalue())
        stated = re.match(r"```\n\n```\n(.*?)```", GUIDE.split(code, 1)[1], re.DOTALL)
        assert outputs[-1] == (stated[1] if stated else "")
    assert any(outputs)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", GUIDE))))
def test_links_lead_to_files(target: str) -> None:
    assert (ROOT / "docs" / target).exists()
