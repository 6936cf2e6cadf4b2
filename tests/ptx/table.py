"""The table of docs/ptx.md: `python -m tests.ptx.table` regenerates it."""

import re
from collections.abc import Iterable
from pathlib import Path

import triton

import tests.kernels.conftest as interpreted  # before kernels are imported
from tests.ptx.cases import CASES
from tests.ptx.execution import Compiled, compile_cases, errors, problems, run

assert interpreted

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ptx.md"
HEADER = """\
| kernel | opcodes | error | interpreter | bytes | declared | requested | sectors |
|---|--:|--:|--:|--:|--:|--:|--:|
"""


def rows(names: Iterable[str]) -> list[str]:
    """A line for each case. Raises AssertionError where a check fails."""
    names = list(names)
    compiled = compile_cases(names)
    return [_row(name, compiled[name]) for name in names]


def _row(name: str, compiled: Compiled) -> str:
    case = CASES[name]
    outcome = run(case, compiled)
    assert not problems(case, outcome), problems(case, outcome)
    launch = case.launch()
    launch.run()
    interpreted, _ = errors(case, launch)
    counts = outcome.executed.counts
    moved = counts["read bytes"] + counts["written bytes"]
    sectors = 32 * (counts["read sectors"] + counts["written sectors"]) / moved
    declared = "-" if case.moved.declared is None else f"{outcome.distinct / case.moved.declared:.2f}"
    cells = [name, str(len(outcome.executed.opcodes)), f"{outcome.error:.1e}", f"{interpreted:.1e}"]
    cells += [f"{outcome.distinct:,}", declared, f"{outcome.requested / outcome.distinct:.2f}", f"{sectors:.2f}"]
    return f"| {' | '.join(cells)} |"


def rows_of(page: str) -> list[str]:
    """The lines of the table, which ends the page."""
    return page.partition(HEADER)[2].splitlines()


def main() -> None:
    """Write the table to the page."""
    lines = rows(CASES)
    text = PAGE.read_text().partition(HEADER)[0]
    text = re.sub(r"Triton \d[\d.]*", f"Triton {triton.__version__}", text)
    PAGE.write_text(text + HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
