"""The guide's example prints what it shows, and its tables are the model's."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import megapipe
from megapipe.planner.fitting.published import TABLES
from tests.planner.fitting.findings import findings_lines
from tests.planner.fitting.guide import prior_lines, rows_lines

GUIDE = (Path(megapipe.__file__).parent.parent / "docs" / "cost_model.md").read_text(encoding="utf-8")


def test_the_guides_example_prints_what_it_shows() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", GUIDE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})
    assert printed.getvalue() == shown


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_the_guide_are_what_the_presets_tell(name: str) -> None:
    assert "\n".join(rows_lines(name)) in GUIDE


def test_published_rates_of_the_guide_are_those_that_shares_start_from() -> None:
    assert "\n".join(prior_lines()) in GUIDE


def test_the_guides_findings_are_the_models() -> None:
    assert "\n".join(findings_lines()) in GUIDE
