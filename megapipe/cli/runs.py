"""`megapipe runs`: list, show, compare and plot runs from their folders. Nothing here imports torch."""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from megapipe.cli import run_curves as curves
from megapipe.cli.run_reader import RATE_STEPS, Run, find_runs, is_run, read_run
from megapipe.config import ConfigError
from megapipe.config.command_line import (
    OneLineParser,
    aligned,
    bytes_text,
    check_folders,
    count_text,
    duration_text,
    seconds_text,
    tool_parser,
    with_hyphens,
)
from megapipe.training.observe.metrics import RUNNING, finite
from megapipe.training.observe.records import TIME_PARTS, print_error, print_line

DESCRIPTION = """\
List, show, compare and plot runs from their folders. Runs may still be training; nothing in a
folder is changed.
"""
EXAMPLES = """\
examples:
  megapipe runs list
  megapipe runs show runs/mine
  megapipe runs compare runs/mine runs/other
  megapipe runs plot runs/mine runs/other --over tokens --html losses.html
"""
FOLDERS_HELP = "runs, or folders of runs (default: runs)"
NONE = "-"
"""Table cell for a value that is missing in the folder."""

MAX_EVENTS = 20
"""Maximum number of events that `show` prints; `--json` has all of them."""

SHORT = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_heads",
    "model.vocabulary_size",
    "data.sequence_length",
    "batch.global_size",
    "batch.micro_size",
    "optimizer.name",
    "optimizer.learning_rate",
    "training.steps",
    "training.precision",
    "zero.stage",
    "recompute.method",
)
"""Fields that `show` prints; `--json` has all of them."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status: 0, or 2 if an argument is wrong."""
    options = _parser().parse_args(with_hyphens(arguments))
    try:
        return int(options.run(options))
    except (_WrongInput, ConfigError) as error:
        print_error(f"error: {_printable(str(error))}")
        return 2


class _WrongInput(ValueError):
    """An argument that cannot be used; the message is one line."""


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("megapipe runs", DESCRIPTION, EXAMPLES)
    add = parser.add_subparsers(required=True, metavar="COMMAND").add_parser
    formatted = OneLineParser(add_help=False)
    formatted.add_argument("--json", action="store_true", help="print JSON, for scripts")
    for name, run, count, summary in (
        ("list", _list, "*", "print a table of runs"),
        ("show", _show, 1, "print one run: configuration, starts, step time, events, memory"),
        ("compare", _compare, "+", "print the figures and the configuration differences of runs side by side"),
        ("plot", _plot, "+", "draw the loss curves of several runs in one picture"),
    ):
        command = add(name, help=summary, description=summary, parents=[formatted])
        command.set_defaults(run=run)
        metavar, about = ("RUN", "folder of a run") if count != "*" else ("FOLDER", FOLDERS_HELP)
        command.add_argument("folders", nargs=count, metavar=metavar, help=about)
        if name == "plot":
            command.add_argument("--over", choices=curves.AXES, default="steps", help="x axis (default: steps)")
            for kind in ("html", "svg", "png"):
                command.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write it as {kind.upper()}")
    return parser


def _list(options: argparse.Namespace) -> int:
    runs: list[Run] = []
    for folder in map(Path, options.folders or ["runs"]):
        try:
            paths = list(find_runs(folder))
        except OSError as error:
            raise _WrongInput(f"cannot read {folder}: {error.strerror}; give folders of runs") from None
        if not paths:
            _warn(f"{folder} has no runs: a run's folder has a run.json or a metrics.jsonl")
        runs += map(read_run, paths)
    _report_problems(runs)
    if options.json:
        _print_json([_summary(run) for run in runs])
    elif runs:
        columns = [_cells(run) for run in runs]
        _print_table([list(columns[0]), *(list(each.values()) for each in columns)])
    return 0


def _show(options: argparse.Namespace) -> int:
    (run,) = _read_all(options.folders)
    if options.json:
        _print_json(_details(run))
        return 0
    cells = _cells(run)
    print_line(_printable(f"{cells.pop('run')}: {run.status}"))
    _print_table([["  " + name, value] for name, value in cells.items() if name != "status"])
    short = [f"{name}={run.config[name]}" for name in SHORT if run.config.get(name) is not None]
    if short:
        _print_section("configuration", [", ".join(short[:5]), ", ".join(short[5:])])
    starts = [
        [
            str(each.id),
            _moment(each.started),
            NONE if each.seconds is None else _elapsed(each.seconds),
            f"steps {_number(each.first_step)} to {_number(each.last_step)}",
            each.status,
        ]
        for each in run.starts
    ]
    _print_section("starts (UTC)", aligned(starts, lambda _: False))
    _print_section("time", _time_lines(run))
    _print_section("memory", _memory_lines(run))
    skipped = f"; skipped updates: {run.num_skipped}" if run.num_skipped else ""
    saves = (
        f"{run.num_saves} save{'s' * (run.num_saves > 1)}, the last after step {_number(run.last_save)}"
        if run.num_saves
        else "no saves"
    )
    events = [f"{'' if step is None else f'step {step:,}: '}{text}" for step, text in run.events]
    earlier = len(events) - MAX_EVENTS
    _print_section(
        "events",
        [f"{saves}{skipped}", *([f"({earlier:,} earlier ones)"] if earlier > 0 else []), *events[-MAX_EVENTS:]],
    )
    return 0


def _compare(options: argparse.Namespace) -> int:
    runs = _read_all(options.folders)
    differences = config_differences(runs)
    if options.json:
        _print_json({"runs": [_summary(run) for run in runs], "differences": differences})
        return 0
    _print_table(_figures(runs))
    print_line("")
    if not differences:
        print_line("the configurations are equal")
        return 0
    print_line("configuration differences")
    _print_table([["  " + name, *map(_value, values)] for name, values in differences.items()])
    return 0


def _plot(options: argparse.Namespace) -> int:
    check_folders(options.html, options.svg, options.png)
    runs = _read_all(options.folders)
    lines = [curves.curve_of(run, name, options.over) for run, name in zip(runs, _names(runs), strict=True)]
    if options.json:
        _print_json(
            [
                {
                    "run": str(run.folder),
                    "over": options.over,
                    "training": list(zip(line.x.tolist(), line.loss.tolist(), strict=True)),
                    "validation": list(zip(line.held_out_x.tolist(), line.held_out.tolist(), strict=True)),
                }
                for run, line in zip(runs, lines, strict=True)
            ]
        )
    elif not (options.html or options.svg or options.png):
        for row in curves.text_plot(lines, options.over, shutil.get_terminal_size((100, 24)).columns):
            print_line(_printable(row))
    try:
        if options.html:
            differences = config_differences(runs)
            rows = _figures(runs) + [[name, *map(_value, values)] for name, values in differences.items()]
            notes = [f"{run.folder}: {problem}" for run in runs for problem in run.problems]
            page = curves.html("Losses of " + ", ".join(_names(runs)), lines, options.over, rows, notes)
            _write(options.html, page)
        if options.svg:
            _write(options.svg, curves.svg(lines, options.over, standalone=True) + "\n")
        if options.png:
            curves.write_png(options.png, lines, options.over)
    except OSError as error:
        path = error.filename or "the picture"  # a full disk is reported without a name
        raise _WrongInput(f"cannot write {path}: {error.strerror}; give another file") from None
    if not options.json:
        for path in filter(None, (options.html, options.svg, options.png)):
            print_line(_printable(f"wrote {path}"))
    return 0


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "replace"))


def _read_all(folders: Sequence[str]) -> list[Run]:
    """Read the named runs, and report their problems. Raises _WrongInput if a folder is not a run."""
    for folder in map(Path, folders):
        if not folder.exists():
            raise _WrongInput(f"{folder} does not exist: give the folder of a run (megapipe runs list shows them)")
        if not is_run(folder):
            raise _WrongInput(f"{folder} is not a run: it has neither run.json nor metrics.jsonl")
    runs = [read_run(Path(folder)) for folder in folders]
    _report_problems(runs)
    return runs


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the fields that differ between runs, with the value of each run; None where a run has no such field."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    values = {name: [run.config.get(name) for run in runs] for name in names}
    return {name: each for name, each in values.items() if len(set(map(_value, each))) > 1}


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the folders, or their paths if two names are equal."""
    short = [run.folder.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.folder) for run in runs]


def _figures(runs: Sequence[Run]) -> list[list[str]]:
    columns = [_cells(run) | {"run": name} for run, name in zip(runs, _names(runs), strict=True)]
    return [[name, *(each[name] for each in columns)] for name in columns[0]]


def _cells(run: Run) -> dict[str, str]:
    """Return the cells of a run in a table, by heading."""
    steps = run.config.get("training.steps")
    of = f"/{steps:,}" if type(steps) is int else ""
    return {
        "run": str(run.folder),
        "status": run.status,
        "started": _moment(run.starts[0].started if run.starts else None),
        "duration": _elapsed(run.seconds),
        "parameters": NONE if run.parameters is None else count_text(run.parameters),
        "layout": " x ".join(f"{name} {size}" for name, size in run.layout.items() if size > 1)
        or ("1 rank" if run.layout else NONE),
        "schedule": run.schedule or str(run.config.get("schedule.name", NONE)),
        "steps": f"{_number(run.last_step)}{of}",
        "tokens": count_text(run.tokens),
        "loss": _number(run.loss, ".4f"),
        "held-out": _number(run.held_out_loss, ".4f"),
        "tokens/s": _number(run.tokens_per_second, ",.0f"),
        "MFU": _number(run.mfu, ".1%"),
    }


def _time_lines(run: Run) -> list[str]:
    """Return lines about the parts of a step, and how the rest of the run's time was spent."""
    mean, wait = run.seconds_per_step, run.data_seconds
    rows = []
    if mean is not None:
        rows.append(f"step {seconds_text(mean)} (mean of the last {len(run.recent())}, at most {RATE_STEPS})")
        if wait is not None:
            rows.append(f"wait for samples {seconds_text(wait)}, {wait / mean:.1%} of a step")
    if run.ranks:
        rows.append(
            f"parts of step {_number(run.ranks_step)}: mean, minimum, maximum over {len(run.ranks['forward'])} rank(s)"
        )
        for part in TIME_PARTS:
            values = run.ranks[part]
            rows.append(
                f"  {part:<13} {seconds_text(fmean(values)):>9} "
                f"{seconds_text(min(values)):>9} {seconds_text(max(values)):>9}"
            )
    else:
        rows.append("the parts of a step were not measured (reliability.stragglers_every sets how often)")
    rest = run.seconds - run.step_seconds - run.evaluation_seconds - run.save_seconds
    saves = duration_text(run.save_seconds) if run.save_seconds or not run.num_saves else NONE
    rows.append(
        f"all starts: steps {duration_text(run.step_seconds)}, evaluations {duration_text(run.evaluation_seconds)}, "
        f"saves {saves}, start-up and other {_elapsed(max(0.0, rest))}"
    )
    return rows


def _memory_lines(run: Run) -> list[str]:
    peaks = run.ranks.get("peak_bytes")
    if not peaks:
        return ["memory was not measured (reliability.stragglers_every sets how often)"]
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    return [
        f"peak per rank: {bytes_text(min(peaks))} to {bytes_text(peaks[rank])} "
        f"(rank {rank}), up to step {_number(run.ranks_step)}"
    ]


def _summary(run: Run) -> dict[str, Any]:
    """Return the data of a run that `list --json` and `compare --json` print."""
    return {
        "run": str(run.folder),
        "status": run.status,
        "running_or_killed": run.status == RUNNING,
        "started": run.starts[0].started if run.starts else None,
        "seconds": run.seconds,
        "parameters": run.parameters,
        "layout": run.layout,
        "schedule": run.schedule or run.config.get("schedule.name"),
        "steps": run.last_step,
        "tokens": run.tokens,
        "loss": run.loss,
        "held_out_loss": run.held_out_loss,
        "tokens_per_second": run.tokens_per_second,
        "mfu": run.mfu,
        "problems": run.problems,
    }


def _details(run: Run) -> dict[str, Any]:
    return _summary(run) | {
        "config": run.config,
        "starts": [asdict(each) for each in run.starts],
        "time": {
            "step": run.seconds_per_step,
            "data": run.data_seconds,
            "ranks": run.ranks,
            "ranks_step": run.ranks_step,
            "steps_total": run.step_seconds,
            "evaluations_total": run.evaluation_seconds,
            "saves_total": run.save_seconds,
        },
        "saves": run.num_saves,
        "last_save": run.last_save,
        "skipped_updates": run.num_skipped,
        "events": [{"step": step, "text": text} for step, text in run.events],
    }


def _report_problems(runs: Sequence[Run]) -> None:
    for run in runs:
        for problem in run.problems:
            _warn(problem)


def _warn(line: str) -> None:
    print_error(f"warning: {_printable(line)}")


def _print_json(value: Any) -> None:
    print_line(json.dumps(finite(value), default=str, allow_nan=False, skipkeys=True))


def _print_section(name: str, lines: Sequence[str]) -> None:
    print_line(f"\n{name}")
    for line in filter(None, lines):
        print_line("  " + _printable(line))


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    for line in aligned([list(map(_printable, row)) for row in rows], lambda _: False):
        print_line(line)


def _printable(text: str) -> str:
    """Replace control characters, because a file from others could use them to change what a terminal shows."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _value(value: Any) -> str:
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True)


def _number(value: float | None, form: str = ",") -> str:
    return NONE if value is None else f"{value:{form}}"


def _moment(seconds: float | None) -> str:
    return NONE if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _elapsed(seconds: float) -> str:
    """Return a difference of recorded times, which are whole seconds, as text: `4 s`, or `6.1 minutes`."""
    return duration_text(seconds) if seconds >= 120 else f"{seconds:.0f} s"
