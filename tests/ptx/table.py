"""The table of docs/ptx.md: `python -m tests.ptx.table --write` regenerates it, without `--write` it is printed."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from tests.ptx.cases import CASES
from tests.ptx.checks import errors, problems, run
from tests.ptx.execution import Compiled, compile_cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ptx.md"
HEADER = """\
| kernel | opcodes | error | interpreter | bytes | declared | requested | sectors |
|---|--:|--:|--:|--:|--:|--:|--:|
"""


def rows(names: Iterable[str]) -> list[str]:
    """A line for each case. Kernels of this process must be interpreted. Raises AssertionError where a check fails."""
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
    all_bytes = counts.read_bytes + counts.written_bytes
    sectors = 32 * (counts.read_sectors + counts.written_sectors) / all_bytes
    declared = "" if case.moved.declared is None else f"{outcome.distinct / case.moved.declared:.2f}"
    cells = [name, str(len(outcome.executed.opcodes)), f"{outcome.error:.1e}", f"{interpreted:.1e}"]
    cells += [f"{outcome.distinct:,}", declared, f"{outcome.requested / outcome.distinct:.2f}", f"{sectors:.2f}"]
    return f"| {' | '.join(cells)} |"


def written(page: str, lines: Iterable[str]) -> str:
    """The page with the table replaced by these lines."""
    before, _, rest = page.partition(HEADER)
    return before + HEADER + "\n".join(lines) + "\n" + rest.partition("\n\n")[2].join(["\n", ""])


def main() -> None:
    """Print the table, or write it to the page."""
    from tests.kernels.interpreter import interpret

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    interpret()
    lines = rows(CASES)
    if chosen.write:
        PAGE.write_text(written(PAGE.read_text(), lines))
    else:
        print(HEADER + "\n".join(lines))


if __name__ == "__main__":
    main()
