"""The guide to planners of papers prints what it shows."""

import contextlib
import io
import re
from pathlib import Path

import megapipe

GUIDE = (Path(megapipe.__file__).parent.parent / "docs" / "planner_papers.md").read_text(encoding="utf-8")


def test_the_guides_example_prints_what_it_shows() -> None:
    (code,), (shown,) = (re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL) for language in ("python", "text"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == shown
