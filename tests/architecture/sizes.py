"""Print how large the product is: `python -m tests.architecture.sizes [REVISION]`.

For each package: files, code lines (without docstrings, imports, blank lines and comments), all lines. Then figures
that show whether code was only squeezed: 90th percentiles of the lines of a function and of the length of a code line,
and docstring lines per public function.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from tests.architecture.source import Source, product, revision

Function = ast.FunctionDef | ast.AsyncFunctionDef

LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: Source) -> set[int]:
    """Return the numbers of the lines that hold code: no docstring, import, blank line or comment alone."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in source.statements:
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def functions(source: Source) -> list[Function]:
    """Return all functions and methods of a file, inner ones included."""
    return [node for node in source.statements if isinstance(node, Function)]


def public_functions(source: Source) -> list[Function]:
    """Return the functions of a file and the methods of its classes whose names start with no underscore.

    Functions within functions are not public, and neither are methods of private classes.
    """
    functions: list[Function] = []
    waiting: list[ast.stmt] = list(source.tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                waiting += node.body
            else:
                functions.append(node)
    return functions


def function_lines(function: Function) -> int:
    """Return the lines of a function from `def` to its end, docstring included, decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def docstring_lines(function: Function) -> int:
    """Return the lines of a function's docstring; 0 without one."""
    first = function.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(function) is not None else 0


def percentile(values: Sequence[int]) -> int:
    """Return the smallest value that at least nine in ten values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * 9 // 10) - 1)]


def table(sources: Sequence[Source]) -> str:
    """Return the table of packages and the figures below it."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    lengths: list[int] = []
    for source in sources:
        code, lines = code_lines(source), source.text.splitlines()
        lengths += [len(lines[number - 1]) for number in code]
        for row in (rows[source.package], rows["megapipe + kernels"]):
            row[0] += 1
            row[1] += len(code)
            row[2] += len(lines)
    total = rows.pop("megapipe + kernels")
    every = [function for source in sources for function in functions(source)]
    documented = [docstring_lines(function) for source in sources for function in public_functions(source)]
    return "\n".join(
        [
            "| package | files | code lines | all lines |",
            "|---|---:|---:|---:|",
            *(f"| {name} | {files:,} | {code:,} | {all_:,} |" for name, (files, code, all_) in sorted(rows.items())),
            "| **megapipe + kernels** | {:,} | {:,} | {:,} |".format(*total),
            "",
            f"90th percentile of a function's lines: {percentile([function_lines(each) for each in every])}",
            f"90th percentile of a code line's length: {percentile(lengths)}",
            f"docstring lines per public function: {fmean(documented):.3f} ({len(documented):,} functions)",
            f"longest file: {max(len(source.text.splitlines()) for source in sources)} lines",
        ]
    )


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main(arguments: Sequence[str]) -> int:
    """Print the table of the working tree or of a git revision; 2 for an unknown revision."""
    try:
        sources = revision(arguments[0]) if arguments else product()
    except subprocess.CalledProcessError:
        return 2  # git has printed the reason
    print(table(sources))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
