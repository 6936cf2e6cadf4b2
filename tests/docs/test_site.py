"""Every link of the documentation leads somewhere, and Sphinx builds the site without a warning."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.commands import ROOT, run

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    ROOT / "examples/recipes/README.md",
    ROOT / "benchmarks/results/cpu.md",
]
BUILT_FROM = ("docs", "megapipe", "kernels", "examples", "benchmarks", *(path.name for path in ROOT.glob("*.md")))


def without_code(text: str) -> str:
    """Return Markdown without code blocks and code spans, whose brackets are not links."""
    return re.sub(r"`[^`\n]+`", "code", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Return the anchors that Git hosts and Sphinx give to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    )
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def problems(page: Path) -> list[str]:
    """Return the links and pictures of a page whose target, or whose heading in it, does not exist."""
    warnings = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        parts = urlsplit(link)
        if parts.scheme:
            good = parts.scheme in ("https", "http") and re.fullmatch(r"[\w.-]+\.\w+", parts.netloc)
        else:
            target = page.parent / unquote(parts.path) if parts.path else page
            good = target.exists() and (not parts.fragment or parts.fragment in anchors(target))
        if not good:
            warnings.append(f"{page.relative_to(ROOT)}: {link}")
    return warnings


def test_every_link_and_picture_of_the_pages_resolves() -> None:
    assert [problem for page in PAGES for problem in problems(page)] == []


def test_files_that_pages_name_exist() -> None:
    """Paths in backticks that start with a folder of the repository, except the library that a compiler writes and the
    schedule and the family that a reader of CONTRIBUTING.md adds."""
    pattern = re.compile(r"`((?:benchmarks|csrc|docs|examples|kernels|megapipe|tests|tools)/[\w./]+)(?<!\.so)`")
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    named = {(page.name, path) for page in pages for path in re.findall(pattern, page.read_text(encoding="utf-8"))}
    for added in ("megapipe/schedules/generators/last_in_first_out.py", "megapipe/spec/families/helium.py"):
        named.remove(("CONTRIBUTING.md", added))
    assert len(named) > 100
    missing = [each for each in named if not (ROOT / each[1]).exists() and not list(ROOT.glob(f"{each[1]}.*"))]
    assert missing == []


class Targets(HTMLParser):
    """The identifiers of an HTML page, and what it links to and shows."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.identifiers: set[str] = set()
        self.links: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.identifiers.add(value)
            elif name in ("href", "src") and value and not urlsplit(value).scheme:
                self.links.add(value)


@pytest.mark.parametrize(
    "reference",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["guides", "with_reference"],
)
def test_the_site_builds_without_warnings_and_its_links_resolve(tmp_path: Path, reference: bool) -> None:
    """From a copy, so that neither a build nor a file that is not part of the repository helps."""
    for name in BUILT_FROM:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tmp_path)
        else:
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    if not reference:
        shutil.rmtree(tmp_path / "docs/reference")
    site = tmp_path / "site"
    run(f"python -m sphinx -W --keep-going -q -b html docs {site}", 400, tmp_path)
    pages = {path.resolve(): Targets(path) for path in site.rglob("*.html")}
    broken = []
    for page, targets in pages.items():
        for link in targets.links:
            parts = urlsplit(link)
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            known = pages[target].identifiers | {""} if target in pages else {parts.fragment}
            if not target.exists() or unquote(parts.fragment) not in known:
                broken.append(f"{page.relative_to(site.resolve())}: {link}")
    assert broken == []
    assert (site / "project/readme.html").exists()
    assert "img" in (site / "schedules.html").read_text(encoding="utf-8")
    if reference:
        assert "megapipe.engine.pipeline.Pipeline" in pages[(site / "reference/engine.html").resolve()].identifiers
