"""Which module of the product imports which, read from the source files: importing them all takes seconds."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from tests.architecture.source import Source

Modules = Mapping[str, Source]

NAMED_IN_TABLES = {
    "megapipe.kernels.ops": tuple(f"megapipe.kernels.{name}_backend" for name in ("apex", "cuda", "triton")),
    "megapipe.planner.command.main": ("megapipe.planner.command",),
}
"""Modules with a table of modules that are imported when they are first wanted, and the packages of these."""

SCANNED = {
    "megapipe.schedules.generators": re.compile(r"megapipe\.schedules\.generators\.(?!_)\w+"),
    "megapipe.spec.families": re.compile(r"megapipe\.spec\.families\.\w+"),
}
"""Packages that are named in a string, because all of their modules are imported."""


def reachable(modules: Modules, starts: Iterable[str], *, at_once: bool = False) -> set[str]:
    """Return the modules that these import, directly or not, themselves included.

    at_once: without what functions import when they are called, and tables name.
    """
    seen: set[str] = set()
    waiting = list(starts)
    while waiting:
        for name in accumulate(waiting.pop().split("."), "{}.{}".format):
            if name in modules and name not in seen:
                seen.add(name)
                waiting += imports_at_once(modules[name]) if at_once else imports(modules, modules[name])
    return seen


def imports(modules: Modules, source: Source) -> Iterator[str]:
    """Yield every name that a file imports anywhere, and the modules that its strings name."""
    for node in ast.walk(source.tree):
        yield from _imported(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value.partition(":")[0]  # of module:function
            yield from (name for name in (word, *_in_tables(source, word)) if name in modules)
            if word in SCANNED:
                yield from filter(SCANNED[word].fullmatch, modules)


def imports_at_once(source: Source) -> Iterator[str]:
    """Yield every name that a file imports when it is imported itself."""
    waiting: list[ast.AST] = [source.tree]
    while waiting:
        node = waiting.pop()
        yield from _imported(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        waiting += ast.iter_child_nodes(node)


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _in_tables(source: Source, name: str) -> Iterator[str]:
    return (f"{package}.{name}" for package in NAMED_IN_TABLES.get(source.module, ()))
