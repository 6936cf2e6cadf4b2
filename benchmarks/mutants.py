"""Change the product's code in small random ways and report which tier of tests notices.

    python benchmarks/mutants.py --packages training checkpoint data conversion --count 16

The hash of the parent commit seeds the choice, so that the mutants are not picked by hand. Each mutant is one change
in one file of a copy of the last commit, and only the tests of its package run on it: the fast ones, then the slow
ones, then the exhaustive ones, up to the first that fails. A mutant that no test notices is either equivalent to the
original or a gap.
"""

import argparse
import ast
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIERS = {
    "fast": "not slow and not exhaustive and not gpu",
    "slow": "slow and not exhaustive and not gpu",
    "exhaustive": "exhaustive and not gpu",
}
NO_TESTS = 5
"""Exit status of pytest if no test was selected."""
_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+"}


@dataclass(frozen=True)
class Mutant:
    """One change: a replacement of the characters [start, end) of a file."""

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
    """Yield every change that the operators can make in a file."""
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
    """Return `count` mutants, the same number for each package; a file's weight is its number of possible changes."""
    generator = random.Random(seed)
    picked = []
    for number, package in enumerate(packages):
        files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "megapipe" / package).rglob("*.py"))
        every = [mutant for path in files for mutant in mutants_of(ROOT, path)]
        share = count // len(packages) + (number < count % len(packages))
        picked += [(package, mutant) for mutant in generator.sample(every, share)]
    return picked


def tier_that_notices(root: Path, package: str, tiers: list[str], seconds: float) -> str | None:
    """Run the package's tests tier by tier; a timeout counts as noticed, because CI would fail too."""
    for tier in tiers:
        command = [sys.executable, "-m", "pytest", f"tests/{package}", "-x", "-q", "-n", "0", "-m", TIERS[tier]]
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"{tier} (timeout)"
        if done.returncode not in (0, NO_TESTS):
            return tier
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Report which tier of tests notices small random changes of the code."
    )
    parser.add_argument("--packages", nargs="+", default=["training", "checkpoint", "data", "conversion"])
    parser.add_argument("--count", type=int, default=16, help="total number of mutants")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit of one tier for one mutant")
    parser.add_argument("--seed", help="seed (default: the hash of the parent commit)")
    parser.add_argument("--output", type=Path, help="JSON file to write the table to")
    options = parser.parse_args()
    parent = subprocess.run(["git", "rev-parse", "HEAD~1"], cwd=ROOT, capture_output=True, text=True, check=True)
    seed = options.seed or parent.stdout.strip()
    rows = []
    print(f"seed {seed}\n\n| package | change | noticed by |\n|---|---|---|", flush=True)
    for package, mutant in chosen(options.packages, options.count, seed):
        with tempfile.TemporaryDirectory(prefix="megapipe-mutant-") as folder:
            copy = Path(folder)
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
            mutant.apply(copy)
            start = time.monotonic()
            noticed = tier_that_notices(copy, package, options.tiers, options.seconds)
        rows.append({"package": package, **asdict(mutant), "noticed": noticed, "seconds": time.monotonic() - start})
        what = f"{mutant.path}:{mutant.line} {mutant.operator}: `{mutant.before[:60]}` -> `{mutant.after[:60]}`"
        print(f"| {package} | {' '.join(what.split())} | {noticed or 'no test'} |", flush=True)
    early = sum((row["noticed"] or "").startswith(("fast", "slow")) for row in rows)
    print(f"\n{early} of {len(rows)} are noticed by the fast and slow tests")
    if options.output:
        options.output.write_text(json.dumps({"seed": seed, "mutants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
