"""Settings of the documentation site, which `make docs` builds offline, and the three things that Sphinx lacks for it.

The pages are also read on plain Git hosts, so they link to each other and to files of the repository by relative path.
"""

import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import megapipe  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "megapipe"
version = release = megapipe.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md"]  # index.md shows it
default_role = "code"
smartquotes = False  # they turn the two hyphens of options into a dash
add_module_names = False
toc_object_entries = False  # thousands of lines in the side bar of every page
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_use_ivar = True
myst_heading_anchors = 4
suppress_warnings = ["ref.python"]  # strings in Literal types are looked up as names
html_theme = "furo"
html_title = f"megapipe {release}"
html_copy_source = False
linkcheck_anchors = False  # many sites make their anchors in the browser

CHAPTERS = {
    "Tutorials": "tutorials/*.md",
    "Guides": None,
    "Migration": "migrate/*.md",
    "Questions": "faq*.md",
    "Project": "project/*.md",
    "Reference": "reference/*.md",
}
"""Pages by chapter of the side bar. The guides have the sections of README.md, which has to list them all."""
SHOWN = re.compile(r"```\{shows\} (\S+)\n```\n")
"""A page that shows a Markdown file from elsewhere, such as the repository's README."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


class Contents(SphinxDirective):
    """The side bar: one table of contents per chapter, and per section of README.md."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(self.lines()))

    def lines(self) -> Iterator[str]:
        listed: dict[str, list[str]] = {}
        for section in re.split(r"^## ", (DOCS / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            pages = re.findall(r"^- \[[^\]]*\]\(([^)#]+\.md)\)", section, re.MULTILINE)
            listed[section.partition("\n")[0]] = list(dict.fromkeys(pages))
        known = {page for pages in listed.values() for page in pages}
        for chapter, pattern in CHAPTERS.items():
            if pattern is None:
                sections = listed
            else:
                found = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob(pattern))
                sections = {chapter: [page for page in found if page not in known]}
            for title, pages in sections.items():
                if pages:
                    yield from ("```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", "")


class Package(SphinxDirective):
    """`.. package:: megapipe.spec` documents every module of a package from its docstrings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(self.lines(self.arguments[0])), allow_section_headings=True)

    def lines(self, name: str) -> Iterator[str]:
        package = import_module(name)
        options = ("   :members:", "   :ignore-module-all:", "")  # what a package only exports is documented once
        yield from (f".. automodule:: {name}", *options)
        exported = getattr(package, "__all__", ())
        if exported:
            yield from (f"`from {name} import` gives " + ", ".join(f"`{each}`" for each in exported) + ".", "")
        for module in sorted(each.name for each in pkgutil.walk_packages(package.__path__, f"{name}.")):
            yield from (module, "-" * len(module), "", f".. automodule:: {module}", *options)


def pages_by_file() -> dict[Path, Path]:
    """Return the page of the site that shows each Markdown file of the repository, if one does."""
    found = {path.resolve(): path for path in DOCS.rglob("*.md")}
    for path in DOCS.rglob("*.md"):
        shown = SHOWN.search(path.read_text(encoding="utf-8"))
        if shown:
            found[(path.parent / shown[1]).resolve()] = path
    return found


PAGE_OF = pages_by_file()


def show(app: "Sphinx", name: str, source: list[str]) -> None:
    """Replace a `{shows}` block by the file, and point links and pictures in it to where they are from this page."""
    page = Path(app.env.doc2path(name))
    shown = SHOWN.search(source[0])
    origin = (page.parent / shown[1]).resolve() if shown else page

    def relink(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        path = (origin.parent / target).resolve()
        if re.match(r"[a-z]+:", target) or not path.exists():
            return link[0]
        if path.is_dir() and (path / "README.md").exists():
            path /= "README.md"
        relative = os.path.relpath(PAGE_OF.get(path, path), page.parent)
        return f"{before}{relative}{anchor or ''}{after}"

    if shown:
        source[0] = source[0].replace(shown[0], origin.read_text(encoding="utf-8"))
    source[0] = LINK.sub(relink, source[0])


def setup(app: "Sphinx") -> None:
    """Register the directives and the rewriting of links."""
    app.add_directive("contents-of-the-site", Contents)
    app.add_directive("package", Package)
    app.connect("source-read", show)
