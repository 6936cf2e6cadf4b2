"""The tutorials' commands run as they are written, in an empty folder, and print what the pages show."""

import re
from pathlib import Path

import pytest

from tests.support.commands import ROOT, blocks, run

PAGES = {path.stem: path for path in sorted((ROOT / "docs/tutorials").glob("*.md"))}
SLOW = ("several_nodes",)
"""The pages that `make test-slow` runs; the others are exhaustive."""
SECONDS = 300
"""Longest time of one block of commands."""


def without_figures(line: str) -> str:
    """Replace numbers with their units, which differ between machines, and spaces."""
    line = re.sub(r"\b(?:[kMGT]?B|[um]?s)\b", "U", re.sub(r"[+-]?\d[\d.,:e+-]*", "#", line))
    return re.sub(r"[\s-]+", " ", line).strip()


def test_tutorials_have_commands_and_name_other_hardware() -> None:
    expected = "first_run own_data own_model own_schedule plan several_gpus several_nodes"
    assert sorted(PAGES) == expected.split()
    for name, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        shell = [block for block in blocks(text) if block.language == "sh"]
        assert sum(not block.needs for block in shell) >= 2, name
        assert "## Next" in text, name
        assert "two CPU cores" in text, name


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in SLOW else pytest.mark.exhaustive) for each in PAGES]
)
def test_commands_run_and_print_what_the_page_shows(name: str, tmp_path: Path) -> None:
    """Numbers may differ; `...` in a page replaces lines, or the rest of a line."""
    printed: list[str] = []
    shown = 0
    for block in blocks(PAGES[name].read_text(encoding="utf-8")):
        if block.language == "sh" and not block.needs:
            output = run(f"exec 2>&1\n{block.text}", SECONDS, tmp_path)
            printed = [without_figures(line) for line in output.splitlines()]
        elif block.language == "text":
            for line in block.text.splitlines():
                wanted = without_figures(line.removesuffix("..."))
                if wanted:
                    assert any(
                        each.startswith(wanted) if line.endswith("...") else each == wanted for each in printed
                    ), f"{name} shows {line!r}, but the commands print:\n" + "\n".join(printed)
                    shown += 1
    assert shown > 3
