"""Change the product's code in small random ways and report which tier of tests catches each change.

    python benchmarks/mutants.py --packages training checkpoint data conversion --count 16 --jobs 2

The hash of the parent commit seeds the choice, so that nobody picks the mutants by hand. Each mutant is one change in
one file of a copy of the last commit. Only the tests of its package run on it: the fast ones, then the slow ones, then
the exhaustive ones, until one fails. A mutant that no test catches is either equivalent to the original or a gap; one
that only the exhaustive tier catches was lost when tests were moved there.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIERS = {
    "fast": ["-m", "not slow and not exhaustive and not gpu"],
    "slow": ["-m", "slow and not exhaustive and not gpu"],
    "exhaustive": ["-m", "(exhaustive or hypothesis) and not gpu", "--all-examples"],
}
"""The choice of tests of `make test`, `make test-slow` and `make test-exhaustive`."""
NO_TESTS = 5
"""pytest's exit status when no test was chosen."""
_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+"}


@dataclass(frozen=True)
class Mutant:
    """One change: the characters [start, end) of a file replaced."""

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


def mutants_of(root: Path, path: str) -> Iterator[Mutant]:
    """Every change that the operators can make in a file."""
    text = (root / path).read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    encoded = [line.encode() for line in text.splitlines(keepends=True)]

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(encoded[line - 1][:column].decode())

    def change(node: ast.expr | ast.stmt, operator: str, after: str) -> Mutant:
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno or 0, node.end_col_offset or 0)
        return Mutant(path, node.lineno, operator, text[start:end], after, start, end)

    def source(node: ast.expr) -> str:
        return ast.get_source_segment(text, node) or ""

    tree = ast.parse(text)
    annotations = {
        id(inner)
        for node in ast.walk(tree)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield change(
                    node, "comparison", f"(({source(left)}) {_COMPARISONS[type(operator)]} ({source(right)}))"
                )
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
                yield change(node, "arithmetic", f"(({source(left)}) {_ARITHMETIC[type(operator)]} ({source(right)}))")
            case ast.BoolOp(op=operator, values=values):
                word = " or " if isinstance(operator, ast.And) else " and "
                yield change(node, "and or", "(" + word.join(f"({source(value)})" for value in values) + ")")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield change(node, "drop not", f"({source(operand)})")
            case ast.Constant(value=bool() as value):
                yield change(node, "constant", str(not value))
            case ast.Constant(value=int() as value):
                yield change(node, "constant", str(value + 1))
            case ast.Expr(value=ast.Call()) | ast.Raise():
                yield change(node, "drop statement", "pass")
            case ast.If(test=condition):
                yield change(condition, "condition", "False")


def chosen(packages: list[str], count: int, seed: str) -> list[tuple[str, Mutant]]:
    """Return `count` mutants, the same number of each package; files weigh as much as they have changes to offer."""
    generator = random.Random(seed)
    picked = []
    for number, package in enumerate(packages):
        files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "megapipe" / package).rglob("*.py"))
        every = [mutant for path in files for mutant in mutants_of(ROOT, path)]
        share = count // len(packages) + (number < count % len(packages))
        picked += [(package, mutant) for mutant in generator.sample(every, share)]
    return picked


def catching_tier(root: Path, package: str, tiers: list[str], seconds: float) -> str | None:
    """Return the first tier with a failing test of the package; one that exceeds its time fails, as in CI."""
    environment = os.environ | {"PYTHONPATH": str(root)}  # programs that tests start import the changed copy too
    for tier in tiers:
        command = [sys.executable, "-m", "pytest", f"tests/{package}", "-x", "-q", "-n", "0", *TIERS[tier]]
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{tier} (timeout)"
        if done.returncode not in (0, NO_TESTS):
            return tier
    return None


@contextmanager
def copy_of_last_commit() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="megapipe-mutant-", ignore_cleanup_errors=True) as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def fails_unchanged(package: str, tiers: list[str], seconds: float) -> bool:
    """Return whether a package's tests fail on the unchanged copy, so that they would seem to catch every mutant."""
    with copy_of_last_commit() as folder:
        return catching_tier(folder, package, tiers[:1], seconds) is not None


def tested(package: str, mutant: Mutant, tiers: list[str], seconds: float) -> dict[str, object]:
    """Apply a mutant to a copy of the last commit, run its package's tests, and return the mutant's row."""
    with copy_of_last_commit() as folder:
        mutant.apply(folder)
        start = time.monotonic()
        tier = catching_tier(folder, package, tiers, seconds)
    change = f"{mutant.path}:{mutant.line} {mutant.operator}: `{mutant.before[:60]}` -> `{mutant.after[:60]}`"
    print(f"| {package} | {' '.join(change.split())} | {tier or 'no test'} |", flush=True)
    return {"package": package, **asdict(mutant), "tier": tier, "seconds": time.monotonic() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description="Report which tests catch small random changes of the code.")
    parser.add_argument("--packages", nargs="+", default=["training", "checkpoint", "data", "conversion"])
    parser.add_argument("--count", type=int, default=16, help="number of mutants")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at the same time")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit of one tier for one mutant")
    parser.add_argument("--seed", help="seed of the choice; default: the hash of the parent commit")
    parser.add_argument("--output", type=Path, help="JSON file to write the rows to")
    options = parser.parse_args()
    parent = subprocess.run(["git", "rev-parse", "HEAD~1"], cwd=ROOT, capture_output=True, text=True, check=True)
    seed = options.seed or parent.stdout.strip()
    mutants = chosen(options.packages, options.count, seed)
    print(f"seed {seed}\n\n| package | change | caught by |\n|---|---|---|", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        red = list(
            pool.map(lambda package: fails_unchanged(package, options.tiers, options.seconds), options.packages)
        )
        if any(red):
            names = ", ".join(package for package, fails in zip(options.packages, red, strict=True) if fails)
            parser.error(f"the tests of {names} fail on the last commit: make them pass first")
        rows = list(pool.map(lambda row: tested(*row, options.tiers, options.seconds), mutants))
    early = sum(str(row["tier"]).startswith(("fast", "slow")) for row in rows)
    caught = sum(row["tier"] is not None for row in rows)
    print(f"\nof {len(rows)} mutants, the fast and slow tests catch {early}, all tests {caught}")
    if options.output:
        options.output.write_text(json.dumps({"seed": seed, "mutants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
