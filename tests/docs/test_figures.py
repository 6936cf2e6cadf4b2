"""Tables, pictures and printed figures of the documentation are what code makes: `make figures` writes them."""

import re

import pytest

from tests.docs.figures import ROOT, load

FIGURES = load()
MARKS = {"fast": (), "slow": pytest.mark.slow, "exhaustive": pytest.mark.exhaustive}
MEASURED = {"overlay_2bw.svg"}
"""Vector pictures of measured runs, which no code can make again bit for bit."""


@pytest.mark.parametrize("name", [pytest.param(each.name, marks=MARKS[each.tier]) for each in FIGURES.values()])
def test_figure_is_up_to_date(name: str) -> None:
    for path, text in FIGURES[name].make().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: python -m tests.docs.figures {name}"


def test_every_mark_and_picture_belongs_to_a_figure() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    marks = re.findall(r"<!-- figure: (.+) -->", text)
    assert set(marks) <= FIGURES.keys()
    assert len(set(marks)) == len(marks)
    assert text.count("<!-- end of figure -->") == len(marks)
    names = {name for each in FIGURES.values() if each.tier == "fast" for name in each.name.split()}
    pictures = {path.relative_to(ROOT / "docs/pictures").as_posix() for path in ROOT.glob("docs/pictures/**/*.svg")}
    assert {name for name in pictures if not name.startswith("planning/")} - MEASURED <= names
    assert all(f"pictures/{name})" in text for name in pictures)
