"""docs/reliability.md and reliability_storage.md: every test that they name is there, every status is listed."""

import re
from pathlib import Path

import pytest

from megapipe.training.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
ROOMS = "checkpoint|data|distributed|faults|parallel|training"


@pytest.mark.parametrize("page", ["reliability.md", "reliability_storage.md"])
def test_named_tests_are_there(page: str) -> None:
    named = set(re.findall(rf"\b((?:{ROOMS})/test_\w+)", (ROOT / "docs" / page).read_text()))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / "tests" / f"{name}.py").is_file()]


def test_every_kind_of_fault_has_a_test_and_every_file_of_tests_is_named() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", text[text.index("## All of them") :], re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 27))
    assert all("/test_" in tests for _, tests in rows)
    shown = text + (ROOT / "docs/reliability_storage.md").read_text()
    files = {path.stem for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).stem}
    assert not [name for name in files if f"faults/{name}" not in shown]


def test_every_exit_status_is_explained() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    told = {int(number): name for number, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", text, re.MULTILINE)}
    assert told == {int(code): code.name for code in ExitCode}
