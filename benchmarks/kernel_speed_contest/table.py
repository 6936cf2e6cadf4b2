"""Figures as Markdown tables, their comparison with the aims, and the file of results."""

import datetime
import importlib.util
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .case import Case
from .clock import Ceiling
from .race import BACKENDS, BOTH, COMPILED, CONTESTANTS, FORWARD, Figure

MEANINGLESS = "Taken on a processor at tiny sizes, to try the script: the figures mean nothing."
EXPLANATION = (
    "A cell holds GB/s (TFLOP/s where products are the work) and the share of the ceiling: the time that the op's "
    "predicted bytes take at the device's measured copy speed, or its FLOPs at the speed of a matrix product, over "
    "the time taken. Predicted bytes are what the op reads and writes by its definition, whatever a contestant moves. "
    "Medians; contestants take turns; caches are cold; the host's time does not count."
)


@dataclass(frozen=True)
class Findings:
    """All results of a run. absent: contestant -> why it did not run. left_out: races that did not run, and why."""

    figures: Sequence[Figure]
    absent: dict[str, str]
    left_out: Sequence[str]
    ceiling: Ceiling
    device: torch.device


def document(findings: Findings, cases: Sequence[Case]) -> str:
    """Return all results in Markdown."""
    parts = [
        f"# Kernel speed on {device_name(findings.device)}",
        f"{datetime.date.today()}, {versions()}. `{command()}`",
        f"Ceiling, measured: {findings.ceiling}.",
        *([MEANINGLESS] if findings.device.type != "cuda" else []),
        EXPLANATION,
    ]
    for direction in (FORWARD, BOTH):
        chosen = [figure for figure in findings.figures if figure.direction == direction]
        if chosen:
            parts += [f"## {direction.replace('+', ' and ').capitalize()}", table(chosen)]
    parts.append("## Against the aims\n\n" + "\n".join(f"- {line}" for line in verdicts(findings, cases)))
    failures = [figure for figure in findings.figures if figure.failure is not None]
    notes = [f"- {name} did not run: {why}" for name, why in sorted(findings.absent.items())]
    notes += [f"- {figure.contestant} failed at {_place(figure)}: {figure.failure}" for figure in failures]
    notes += [f"- {race}" for race in findings.left_out]
    return "\n\n".join([*parts, *(["## Not measured\n\n" + "\n".join(notes)] if notes else [])]) + "\n"


def table(figures: Sequence[Figure]) -> str:
    """Return a table with a row for each case and size, and a column for each contestant."""
    present = {figure.contestant for figure in figures}
    names = [name for name in CONTESTANTS if name in present]
    races: dict[tuple[str, int, int], dict[str, Figure]] = {}
    for figure in figures:
        races.setdefault((figure.case, figure.rows, figure.width), {})[figure.contestant] = figure
    lines = ["| op | rows x width | predicted MB | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for (case, rows, width), cells in races.items():
        size = next(iter(cells.values())).bytes / 1e6
        row = [case, f"{rows} x {width}", f"{size:,.4g}", *(_cell(cells.get(name)) for name in names)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def verdicts(findings: Findings, cases: Sequence[Case]) -> list[str]:
    """Return a line for each case that misses its aim or is slower than torch.compile; if there is none, one line that
    says so."""
    aims = {case.name: case.aim for case in cases if case.aim is not None}
    missed, judged = [], 0
    for figure, compiled in _best_of_ours(findings.figures):
        assert figure.share is not None
        assert figure.seconds is not None
        judged += 1
        aim = aims.get(figure.case)
        least = 0.0 if aim is None else aim.forward if figure.direction == FORWARD else aim.both
        if figure.share < least:
            missed.append(f"{_place(figure)}: {figure.share:.0%} of the ceiling, the aim is {least:.0%}")
        if compiled is not None and compiled < figure.seconds:
            missed.append(f"{_place(figure)}: torch.compile takes {compiled / figure.seconds:.0%} of our time")
    return missed or [f"all {judged} measurements meet them" if judged else "no kernel of ours was measured"]


def summary(findings: Findings, cases: Sequence[Case]) -> str:
    """Return one line for a table of many benchmarks."""
    shares = [figure.share for figure, _ in _best_of_ours(findings.figures) if figure.share is not None]
    if not shares:
        return "no kernel of ours was measured"
    middle = sorted(shares)[len(shares) // 2]
    lines = verdicts(findings, cases)
    count = 0 if lines[0].startswith("all ") else len(lines)
    late = f", {len(findings.left_out)} left out" if findings.left_out else ""
    return f"{len(shares)} measurements, median {middle:.0%} of the ceiling, {count} misses{late}"


def write(text: str, folder: Path, device: torch.device) -> Path:
    """Write kernels_<device>.md in the folder, and return its path."""
    name = re.sub(r"[^a-z0-9]+", "_", device_name(device).lower()).strip("_")
    path = folder / f"kernels_{name}.md"
    path.write_text(text, encoding="utf-8")
    return path


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def versions() -> str:
    """Return the versions of Python, torch, CUDA and the contestants' libraries."""
    names = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if torch.version.cuda:
        names.append(f"CUDA {torch.version.cuda}")
    for name in ("triton", "liger_kernel"):
        if importlib.util.find_spec(name) is not None:
            try:
                names.append(f"{name} {version(name)}")
            except PackageNotFoundError:  # builds of Triton for torch have another name
                names.append(name)
    return ", ".join(names)


def command() -> str:
    """Return the command line of this program, as a user types it in the root of the repository."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def _best_of_ours(figures: Sequence[Figure]) -> list[tuple[Figure, float | None]]:
    """Return our fastest backend in each race, and the seconds of torch.compile. Our backends are Triton and CUDA."""
    races: dict[tuple[str, int, int, str], dict[str, Figure]] = {}
    for figure in figures:
        if figure.seconds is not None:
            key = (figure.case, figure.rows, figure.width, figure.direction)
            races.setdefault(key, {})[figure.contestant] = figure
    pairs = []
    for race in races.values():
        our_figures = [race[name] for name in BACKENDS[:2] if name in race]
        if our_figures:
            compiled = race.get(COMPILED)
            fastest = min(our_figures, key=lambda figure: figure.seconds or 0.0)
            pairs.append((fastest, None if compiled is None else compiled.seconds))
    return pairs


def _place(figure: Figure) -> str:
    return f"{figure.case}, {figure.rows} x {figure.width}, {figure.direction}"


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.seconds is None or figure.share is None:
        return "failed"
    rate = f"{figure.flops / figure.seconds / 1e12:,.3g} T" if figure.flops else _gigabytes(figure)
    return f"{rate} ({figure.share:.0%})"


def _gigabytes(figure: Figure) -> str:
    assert figure.seconds is not None
    return f"{figure.bytes / figure.seconds / 1e9:,.4g}"
