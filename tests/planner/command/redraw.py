"""Writes outputs and pictures of docs/planning.md and the README's plan: ``python -m tests.planner.command.redraw``.

Commands run as they stand there, in a folder of their own.
"""

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megapipe.planner.command.main import main
from megapipe.training.plan_commands import run_dry_run
from tests.planner.command.plan import ROOT

GUIDE = ROOT / "docs" / "planning.md"
README = ROOT / "README.md"
PICTURES = ROOT / "docs" / "pictures" / "planning"
BLOCK = re.compile(r"```sh\n(?P<command>python tools/plan\.py [^\n]+)\n```\n\n```text\n(?P<output>.*?)```", re.DOTALL)
README_LINES = 14
TIMELINE = "predict"
"""Command whose timeline is drawn; the other pictures are the search's."""


def answered(text: str, pictures: Path, most_lines: int | None = None) -> str:
    """The text with every command's output behind it. pictures: folder to draw into. most_lines: of each output."""
    with _folder():
        return BLOCK.sub(lambda block: _answer(block, pictures, most_lines), text)


def _answer(block: re.Match[str], pictures: Path, most_lines: int | None) -> str:
    name, *arguments = shlex.split(block["command"])[2:]
    if name in ("search", TIMELINE):
        arguments += ["--pictures", name]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = main([name, *arguments], {"dry-run": run_dry_run})
    assert status == 0, block["command"]
    for each in Path(name).glob("*.svg"):
        if (each.stem == "timeline") == (name == TIMELINE):
            (pictures / each.name).write_text(each.read_text())
    lines = printed.getvalue().splitlines()
    if most_lines is not None and len(lines) > most_lines:
        lines = [*lines[:most_lines], "..."]
    return "\n".join(["```sh", block["command"], "```", "", "```text", *lines, "```"])


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """A working folder that has the examples and nothing else."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("examples").symlink_to(ROOT / "examples")
        try:
            yield
        finally:
            os.chdir(before)


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    GUIDE.write_text(answered(GUIDE.read_text(), PICTURES))
    with tempfile.TemporaryDirectory() as unused:
        README.write_text(answered(README.read_text(), Path(unused), README_LINES))
