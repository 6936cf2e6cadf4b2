"""The product's source files: read once from the working tree, or from a git revision."""

import ast
import functools
import gc
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")

ROOT = Path(__file__).parents[2]
PRODUCT = ("megapipe", "kernels")


@dataclass(frozen=True)
class Source:
    """A Python file: its path from the root of the repository, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text)

    @property
    def statements(self) -> Iterator[ast.AST]:
        """All statements of the file, inner ones included, without their expressions."""
        waiting: list[ast.AST] = [self.tree]
        while waiting:
            node = waiting.pop()
            yield node
            for block in BLOCKS:
                waiting += getattr(node, block, ())

    @property
    def module(self) -> str:
        """Its name in an import; the folder `kernels` is the package megapipe.kernels."""
        name = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"megapipe.{name}" if name.split(".")[0] == "kernels" else name

    @property
    def package(self) -> str:
        """`kernels`, or `megapipe/NAME`; `megapipe` for the files that are in no subpackage."""
        parts = self.path.split("/")[:-1]
        return "/".join(parts[: 1 if parts[:1] == ["kernels"] else 2])


@functools.cache
def working_tree(*folders: str) -> tuple[Source, ...]:
    """Return the Python files of these folders and files, without symbolic links."""
    paths: list[Path] = []
    for folder in folders:
        if folder.endswith(".py"):
            paths.append(ROOT / folder)
        for place, _, names in os.walk(ROOT / folder):
            paths += [Path(place) / name for name in names if name.endswith(".py")]
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in sorted(paths))


@functools.cache
def product() -> tuple[Source, ...]:
    """Return the product's Python files in the working tree, parsed."""
    sources = working_tree(*PRODUCT)
    collects = gc.isenabled()
    gc.disable()  # the collector takes two thirds of the time, and trees are not garbage
    try:
        for source in sources:
            _ = source.tree
    finally:
        if collects:
            gc.enable()
    return sources


def revision(name: str) -> tuple[Source, ...]:
    """Return the product's Python files at a git revision."""
    command = ["git", "-C", str(ROOT), "archive", name, *PRODUCT]
    packed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return tuple(sorted(_unpacked(packed), key=lambda source: source.path))


def _unpacked(packed: bytes) -> Iterator[Source]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() and member.name.endswith(".py") else None
            if file is not None:
                yield Source(member.name, file.read().decode("utf-8"))
