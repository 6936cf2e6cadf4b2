"""Change the product's code in small random ways and report which tier of tests catches each change.

    python benchmarks/mutants.py --packages training checkpoint data conversion --count 16 --jobs 2
    python benchmarks/mutants.py --packages spec layout planner schedules/simulation --count 40 --jobs 2
    python benchmarks/mutants.py --gpu --count 40 --seconds 90 --page docs/gpu_mutants.md

The hash of the parent commit seeds the choice, so that mutants are not picked by hand. Each mutant is one change in
one file of a copy of the last commit. Only the tests of its package run on it: the fast ones, then the slow ones, then
the exhaustive ones, until one fails. A mutant that no test catches is either equivalent to the original or a gap; one
that only the exhaustive tier catches was lost when tests were moved there.

With --gpu the changes are the mistakes that are easy to make on a GPU and hard to see: a barrier, mask, wait or
record_stream that is missing, a load past the end, two streams or two messages in the wrong order. The packages are
then the areas of `GPU_AREAS`.
"""

import argparse
import ast
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIERS = {
    "fast": ["-m", "not slow and not exhaustive and not gpu"],
    "slow": ["-m", "slow and not exhaustive and not gpu"],
    "exhaustive": ["-m", "(exhaustive or hypothesis) and not gpu", "--all-examples"],
    "any": ["-m", "not gpu"],
}
"""The selection of tests in `make test`, `make test-slow` and `make test-exhaustive`, and all of them together."""
PACKAGES = ("training", "checkpoint", "data", "conversion")
SHARE_UNCHANGED = 0.75
"""Largest fraction of the time limit that tests may take on the unchanged copy, so that a timeout means a hang."""
TIMEOUT = "timeout"
NO_TESTS = 5
"""Exit status of pytest if no test was selected."""
BEGIN, END = "<!-- table: benchmarks/mutants.py -->", "<!-- end of table -->"
HEADER = ("| package | line | change | from and to | caught by | seconds |", "|---|---|---|---|---|---|")
_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+"}


@dataclass(frozen=True)
class Mutant:
    """One change: the characters [start, end) of a file are replaced by `after`."""

    path: str
    line: int
    operator: str
    before: str
    after: str
    start: int
    end: int

    def apply(self, root: Path) -> None:
        file = root / self.path
        text = file.read_text()
        file.write_text(text[: self.start] + self.after + text[self.end :])


class Source:
    """A Python file of the repository, and changes of its syntax nodes."""

    def __init__(self, root: Path, path: str) -> None:
        self.path, self.text = path, (root / path).read_text()
        self.tree = ast.parse(self.text)
        lines = self.text.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._encoded = [line.encode() for line in lines]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the position of the first character of a node, and the position after its last character."""
        ends = ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        start, end = (self._starts[line - 1] + len(self._encoded[line - 1][:column].decode()) for line, column in ends)
        return start, end

    def of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def change(self, node: ast.expr | ast.stmt, operator: str, after: str) -> Mutant:
        start, end = self.span(node)
        return Mutant(self.path, node.lineno, operator, self.text[start:end], after, start, end)


def mutants_of(root: Path, path: str) -> Iterator[Mutant]:
    """Yield every change that the general operators can make in a Python file."""
    source = Source(root, path)
    annotations = {
        id(inner)
        for node in ast.walk(source.tree)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
        for inner in ast.walk(part)
    }
    for node in ast.walk(source.tree):
        if id(node) in annotations:
            continue
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                after = f"(({source.of(left)}) {_COMPARISONS[type(operator)]} ({source.of(right)}))"
                yield source.change(node, "comparison", after)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
                after = f"(({source.of(left)}) {_ARITHMETIC[type(operator)]} ({source.of(right)}))"
                yield source.change(node, "arithmetic", after)
            case ast.BoolOp(op=operator, values=values):
                word = " or " if isinstance(operator, ast.And) else " and "
                yield source.change(node, "and or", "(" + word.join(f"({source.of(each)})" for each in values) + ")")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield source.change(node, "drop not", f"({source.of(operand)})")
            case ast.Constant(value=bool() as value):
                yield source.change(node, "constant", str(not value))
            case ast.Constant(value=int() as value):
                yield source.change(node, "constant", str(value + 1))
            case ast.Expr(value=ast.Call()) | ast.Raise():
                yield source.change(node, "drop statement", "pass")
            case ast.If(test=condition):
                yield source.change(condition, "condition", "False")


_WAITS = {"wait", "wait_event", "wait_stream", "synchronize"}
_ORDERED = {"send", "receive", "isend", "irecv", "record_event", "reduce_into_part", "gather_into", *_WAITS}


def gpu_mutants_of(root: Path, path: str) -> Iterator[Mutant]:
    """Yield every change that the operators of --gpu can make in a Python, Triton or CUDA file."""
    if not path.endswith(".py"):
        yield from _cuda_mutants_of(root, path)
        return
    source = Source(root, path)
    for node in ast.walk(source.tree):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in _WAITS:
                yield source.change(node, "remove a wait", "pass")
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="record_stream"))):
                yield source.change(node, "drop a record_stream", "pass")
            case ast.Call(func=ast.Attribute(value=waiting, attr="wait_stream"), args=[awaited]):
                after = f"{source.of(awaited)}.wait_stream({source.of(waiting)})"
                yield source.change(node, "swap two streams", after)
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr="stream")) as call)]):
                after = "torch.cuda.stream(torch.cuda.current_stream())"
                yield source.change(call, "swap two streams", after)
            case ast.FunctionDef(decorator_list=decorators) if any("jit" in source.of(each) for each in decorators):
                yield from _triton_mutants_of(source, node)
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list):
                yield from _reordered(source, body)


def _triton_mutants_of(source: Source, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(kernel):
        match node:
            case ast.Call(func=ast.Attribute(attr="load" | "store"), keywords=keywords) if keywords:
                kept = [source.of(each) for each in node.args]
                kept += [
                    f"{each.arg}={source.of(each.value)}" for each in keywords if each.arg not in ("mask", "other")
                ]
                if any(each.arg == "mask" for each in keywords):
                    yield source.change(node, "drop a mask", f"{source.of(node.func)}({', '.join(kept)})")
            case ast.Compare(left=left, ops=[ast.Lt()], comparators=[right]):
                yield source.change(node, "widen past the end", f"({source.of(left)} <= {source.of(right)})")


def _cuda_mutants_of(root: Path, path: str) -> Iterator[Mutant]:
    text = (root / path).read_text()
    for operator, pattern, after in (
        ("delete a barrier", r"(__syncthreads|cluster\.sync|__syncwarp)\([^;]*\);", ";"),
        ("widen past the end", r"(?<=\w) < (?=\w[^;{]*[;)])", " <= "),
    ):
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            if "//" not in text[text.rfind("\n", 0, match.start()) + 1 : match.start()]:
                yield Mutant(path, line, operator, match.group(), after, match.start(), match.end())


def _reordered(source: Source, body: list[ast.stmt]) -> Iterator[Mutant]:
    """Yield swaps of neighbouring statements that start or await work on another stream."""

    def is_ordered(statement: ast.stmt) -> bool:
        calls = (each for each in ast.walk(statement) if isinstance(each, ast.Call))
        names = {each.func.attr for each in calls if isinstance(each.func, ast.Attribute)}
        return isinstance(statement, ast.Expr | ast.Assign) and not names.isdisjoint(_ORDERED)

    for first, second in itertools.pairwise(body):
        if is_ordered(first) and is_ordered(second):
            start, middle, end = source.span(first)[0], source.span(second)[0], source.span(second)[1]
            before = source.text[start:end]
            between = source.text[source.span(first)[1] : middle]
            after = f"{source.of(second)}{between}{source.of(first)}"
            yield Mutant(source.path, first.lineno, "reorder", before, after, start, end)


@dataclass(frozen=True)
class Area:
    """An area to change.

    sources: patterns of its files. tests: tests that must notice the changes. mutants_of: yields the changes of a
    file.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    mutants_of: Callable[[Path, str], Iterator[Mutant]]

    @classmethod
    def of_package(cls, package: str) -> "Area":
        """Return the area of a package, such as `schedules/simulation`, with the tests in its folder of tests, or in
        the folder of the nearest package around it."""
        folders = (ROOT / "tests" / package, *(ROOT / "tests" / package).parents)
        tests = next(each for each in folders if each.is_dir()).relative_to(ROOT)
        return cls((f"megapipe/{package}/**/*.py",), (str(tests),), mutants_of)


GPU_AREAS = {
    "kernels": Area(("kernels/triton_backend/*.py",), ("tests/ptx",), gpu_mutants_of),
    "csrc": Area(
        ("csrc/*.cu*",),
        (
            *("tests/kernels/test_cuda_wrappers.py", "tests/kernels/test_backends.py", "-k", "cuda or sanitizers"),
            "tests/kernels/test_emulated_sanitizers.py::test_sanitizers_find_nothing[layout or adamw]",
        ),
        gpu_mutants_of,
    ),
    "engine": Area(
        ("megapipe/engine/*.py",),
        ("tests/fake_cuda/test_waits.py", "tests/engine/test_trace.py", "tests/engine/test_background.py"),
        gpu_mutants_of,
    ),
    "parallel": Area(
        ("megapipe/parallel/**/*.py",),
        ("tests/fake_cuda/test_waits.py", "tests/parallel/test_links.py", "tests/parallel/test_groups.py"),
        gpu_mutants_of,
    ),
}


def choose_mutants(areas: dict[str, Area], count: int, seed: str) -> list[tuple[str, Mutant]]:
    """Return `count` mutants: the same number for each area and, if possible, for each operator in an area."""
    generator = random.Random(seed)
    picked = []
    for number, (name, area) in enumerate(areas.items()):
        files = sorted({str(path.relative_to(ROOT)) for pattern in area.sources for path in ROOT.glob(pattern)})
        by_operator: dict[str, list[Mutant]] = {}
        for mutant in (mutant for path in files for mutant in area.mutants_of(ROOT, path)):
            by_operator.setdefault(mutant.operator, []).append(mutant)
        piles = [generator.sample(pile, len(pile)) for pile in by_operator.values()]
        turns = [mutant for turn in itertools.zip_longest(*piles) for mutant in turn if mutant is not None]
        picked += [(name, mutant) for mutant in turns[: count // len(areas) + (number < count % len(areas))]]
    return picked


@dataclass(frozen=True)
class Catch:
    """The test that noticed a mutant. test: the first one that failed, or "timeout" if the tests did not end."""

    tier: str
    test: str


def catching(root: Path, tests: Sequence[str], tiers: list[str], seconds: float) -> Catch | None:
    """Run the tiers in order until a test fails, and return that tier and test. A tier that exceeds its time fails."""
    environment = os.environ | {"PYTHONPATH": str(root)}  # programs that tests start import the changed copy too
    for tier in tiers:
        command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-n", "0", *TIERS[tier]]
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return Catch(tier, TIMEOUT)
        if done.returncode not in (0, NO_TESTS):
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
            return Catch(tier, failed.group(1) if failed else f"pytest's status {done.returncode}")
    return None


@contextmanager
def copy_of_last_commit() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="megapipe-mutant-", ignore_cleanup_errors=True) as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def fails_unchanged(area: Area, tiers: list[str], seconds: float) -> bool:
    """Return whether an area's tests fail on the unchanged copy, so that they would seem to catch every mutant."""
    with copy_of_last_commit() as folder:
        return catching(folder, area.tests, tiers[:1], seconds) is not None


def tested(name: str, area: Area, mutant: Mutant, tiers: list[str], seconds: float) -> dict[str, object]:
    """Apply a mutant to a copy of the last commit, run its area's tests, and return the mutant's row."""
    with copy_of_last_commit() as folder:
        mutant.apply(folder)
        start = time.monotonic()
        catch = catching(folder, area.tests, tiers, seconds)
    duration = time.monotonic() - start
    change = f"{_code(mutant.before)} -> {_code(mutant.after)}"
    by = "**no test**" if catch is None else f"{catch.test} ({catch.tier})"
    line = f"| {name} | {mutant.path}:{mutant.line} | {mutant.operator} | {change} | {by} | {duration:.0f} |"
    print(line, flush=True)
    return {"package": name, **asdict(mutant), **asdict(catch or Catch("", "")), "seconds": duration, "row": line}


def _code(text: str) -> str:
    """Return the beginning of a piece of code for the cell of a table."""
    return f"`{' '.join(text.split())[:60]}`".replace("|", "\\|")


def summary(rows: Sequence[dict[str, object]], tiers: Sequence[str]) -> str:
    caught = ", ".join(f"{tier} {sum(row['tier'] == tier for row in rows)}" for tier in tiers)
    late = sum(row["test"] == TIMEOUT for row in rows)
    return f"Of {len(rows)} mutants, tests catch: {caught}; {late} of them because the tests did not end."


def write_page(page: Path, lines: Sequence[str]) -> None:
    """Replace the table of a page, which is between the marks BEGIN and END."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END + rest.split(END)[1]]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Report which tests catch small random changes of the code.")
    parser.add_argument(
        "--packages",
        nargs="+",
        help="packages of megapipe (a/b: one inside another), or areas of --gpu; default: four or all",
    )
    parser.add_argument("--gpu", action="store_true", help="mistakes with barriers, masks, streams and messages")
    parser.add_argument("--count", type=int, default=16, help="number of mutants")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at the same time")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, help="default: fast slow exhaustive, of --gpu any")
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit of one tier for one mutant")
    parser.add_argument("--seed", help="seed of the choice; default: the hash of the parent commit")
    parser.add_argument("--output", type=Path, help="JSON file to write the rows to")
    parser.add_argument("--page", type=Path, help="page whose table to replace")
    options = parser.parse_args()
    parent = subprocess.run(["git", "rev-parse", "HEAD~1"], cwd=ROOT, capture_output=True, text=True, check=True)
    seed = options.seed or parent.stdout.strip()
    all_areas = GPU_AREAS if options.gpu else {name: Area.of_package(name) for name in options.packages or PACKAGES}
    areas = {name: area for name, area in all_areas.items() if name in (options.packages or all_areas)}
    for name, area in areas.items():
        if not any(path for pattern in area.sources for path in ROOT.glob(pattern)):
            parser.error(f"--packages {name}: megapipe has no such package")
    tiers = options.tiers or (["any"] if options.gpu else ["fast", "slow", "exhaustive"])
    mutants = choose_mutants(areas, options.count, seed)
    print(f"seed {seed}\n", *HEADER, sep="\n", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        failing = list(
            pool.map(lambda area: fails_unchanged(area, tiers, SHARE_UNCHANGED * options.seconds), areas.values())
        )
        if any(failing):
            names = ", ".join(name for name, fails in zip(areas, failing, strict=True) if fails)
            parser.error(
                f"the tests of {names} fail on the last commit, or take more than {SHARE_UNCHANGED:.0%} of --seconds: "
                "make them pass, or give them more time"
            )
        rows = list(
            pool.map(
                lambda row: tested(row[0], areas[row[0]], row[1], tiers, options.seconds),
                mutants,
            )
        )
    result = summary(rows, tiers)
    print(f"\n{result}")
    if options.output:
        options.output.write_text(json.dumps({"seed": seed, "mutants": rows}, indent=1) + "\n")
    if options.page:
        write_page(options.page, [f"Seed {seed}. {result}", "", *HEADER, *(str(row["row"]) for row in rows)])


if __name__ == "__main__":
    main()
