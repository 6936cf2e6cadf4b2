"""The commands of ``megapipe schedule``."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megapipe.config.command_line import ProgressBar, aligned
from megapipe.config.parallel import is_schedule_file
from megapipe.schedules.actions import Kind
from megapipe.schedules.build import is_for_all_sizes
from megapipe.schedules.command.arguments import (
    STAGE_TIMES,
    check_group_time,
    check_order_times,
    costs_of,
    file_of,
    is_short,
    order_of,
    parse,
    schedule_of,
    steps_of,
)
from megapipe.schedules.drawing import draw_html, draw_svg, draw_terminal, draw_trace
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.measured.medians import choose, measured_costs
from megapipe.schedules.measured.overlay import (
    Overlay,
    draw_overlay_html,
    draw_overlay_svg,
    draw_overlay_trace,
    lay_over,
)
from megapipe.schedules.measured.overlay import figures as overlay_figures
from megapipe.schedules.measured.overlay import text as overlay_text
from megapipe.schedules.measured.traces import read_run
from megapipe.schedules.registry import GENERATORS, find_generator
from megapipe.schedules.schedule import Header, Schedule
from megapipe.schedules.simulation import Costs, Link, Simulation, simulate, stage_times
from megapipe.schedules.text import dumps
from megapipe.schedules.validation import STREAMS_PER_PRIORITY, needs_resident_kernels, validate

OVERLAY_DRAWINGS = {".html": draw_overlay_html, ".svg": draw_overlay_svg, ".json": draw_overlay_trace}
DRAWINGS: dict[str, Callable[..., str]] = {
    ".svg": partial(draw_svg, unit=" time units"),
    ".html": draw_html,
    ".json": draw_trace,
}
Draw = TypeVar("Draw", bound=Callable[..., str])
COLUMNS = (
    ("schedule", 16), ("class", 5), ("bubble", 7), ("steps", 5), ("time/step", 9), ("activations", 11), ("weights", 7),
    ("exposed", 8),
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the command line; 0 on success, 2 on an error that the user can fix."""
    flags = parse(arguments)
    try:
        COMMANDS[flags.command](flags)
    except ScheduleError as error:
        print(f"error: {error.shown}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return 0


def _list(flags: argparse.Namespace) -> None:
    rows = [_described(name) for name in GENERATORS]
    if flags.json:
        print(json.dumps(rows, indent=2))
        return
    cells = [list(row.values()) for row in rows]
    print("\n".join(aligned(cells, lambda _: False)))


def _described(name: str) -> dict[str, str]:
    """Return the row of a schedule; if its package cannot be imported, its summary is the error."""
    try:
        generator = GENERATORS[name]
    except ScheduleError as error:
        return {"name": name, "class": "-", "placement": "-", "summary": f"error: {error}"}
    placement = generator.placement.__name__
    summary = "(simulation only) " * (generator.search == "never") + generator.summary
    return {"name": name, "class": generator.numerical_class, "placement": placement, "summary": summary}


def _validate(flags: argparse.Namespace) -> None:
    schedule = file_of(flags, flags.file)
    report = validate(schedule)
    names = ("peak_activations", "pending_weight_halves", "weight_versions")
    numbers = {name: getattr(report, name) for name in names}
    if flags.json:
        facts = {
            "class": schedule.header.numerical_class,
            "canonical_order": report.canonical_order,
            "lazy_links": report.lazy_links,
            "links": report.links,
            "needs_resident_kernels": needs_resident_kernels(schedule),
        }
        print(json.dumps({"valid": True, **facts, **numbers}))
        return
    order = "in micro-batch order" if report.canonical_order else "out of micro-batch order"
    header = schedule.header
    print(f"{header.name} is valid, of class {header.numerical_class}; gradients are added {order}")
    for key, values in numbers.items():
        print(f"  {key.replace('_', ' '):<24} {_listed(values)}")
    if header.model_copies > 1:
        print(
            "  note: training does not accept this schedule, because it does not "
            f"sum the gradients of the {header.model_copies} copies of the model"
        )
    most = max(report.links)
    if most > STREAMS_PER_PRIORITY:
        print(f"  note: training on GPUs refuses this schedule, because rank {report.links.index(most)} has {most}")
        print(f"  links, and NCCL can have {STREAMS_PER_PRIORITY} (docs/nccl.md)")
    if not report.lazy_links:
        print("  note: its links must be connected before step 1, as megapipe does; with links that connect at their")
        print("  first use (NCCL's default) the first step would hang")
    if needs_resident_kernels(schedule):
        print("  note: it relies on communication kernels of several links that run on a GPU at once. They do,")
        print("  as each takes few thread blocks; one after another in launch order they would hang (docs/nccl.md)")


def _listed(values: Iterable[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _run(flags: argparse.Namespace, name: str) -> tuple[Schedule, Simulation]:
    schedule = schedule_of(flags, name)
    validate(schedule)
    return schedule, simulate(schedule, costs_of(flags, schedule.header), steps_of(flags, schedule))


def _run_one(flags: argparse.Namespace) -> tuple[Schedule, Simulation]:
    schedule, simulation = _run(flags, flags.schedule)
    check_group_time(flags, [simulation])
    return schedule, simulation


def _figures(flags: argparse.Namespace, schedule: Schedule, simulation: Simulation) -> dict[str, Any]:
    header = schedule.header
    costs = costs_of(flags, header)
    free = replace(costs.without(Kind.GATHER_WEIGHTS), link=Link(), blocking_sends=False)
    ideal_links = simulate(schedule, free, steps_of(flags, schedule))
    return {
        "schedule": header.name,
        "class": header.numerical_class,
        "ranks": header.num_ranks,
        "microbatches": header.whole_microbatches,
        **({"slices": header.slices} if header.slices > 1 else {}),
        "steps": simulation.table.steps,
        "makespan": simulation.makespan,
        "finish": simulation.finish,
        "bubble": simulation.bubble,
        "bubble_rate": simulation.bubble_rate,
        "peak_activations": list(simulation.peak_activations),
        "pending_weight_halves": list(simulation.pending_weight_halves),
        "weight_versions": list(simulation.weight_versions),
        "gradient_buffers": header.gradient_buffers * header.model_copies,
        "weight_gathers": list(simulation.weight_gathers),
        "exposed_communication": simulation.makespan - ideal_links.makespan,
    }


def _simulate(flags: argparse.Namespace) -> None:
    schedule, simulation = _run_one(flags)
    figures = _figures(flags, schedule, simulation)
    if flags.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        shown = _listed(value) if isinstance(value, list) else value
        print(f"{key.replace('_', ' '):<24} {f'{shown:.6g}' if isinstance(shown, float) else shown}")


def _show(flags: argparse.Namespace) -> None:
    _, simulation = _run_one(flags)
    if flags.json:
        print(draw_trace(simulation), end="")
        return
    print(draw_terminal(simulation, flags.width, colour=sys.stdout.isatty()))
    longest = f"longest rank: bubble {simulation.bubble:.4g}, makespan {simulation.makespan:g}"
    print(f"{longest} from its first forward on; whole run: {simulation.finish:g}")


def _compare(flags: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    simulations: list[Simulation] = []
    names = flags.schedule.split(",")
    for name in names:
        if is_schedule_file(name):
            is_for_all_sizes(Path(name))  # raises for a file that cannot be read
        elif name not in GENERATORS:
            find_generator(name)
    with closing(ProgressBar("comparing", len(names), "schedules")) as progress:
        for number, name in enumerate(names):
            progress.update(number)
            wanted = argparse.Namespace(**vars(flags))
            try:
                if name in GENERATORS and GENERATORS[name].chunks == 1:
                    wanted.chunks = None
                schedule, simulation = _run(wanted, name)
            except ScheduleError as error:
                rows.append({"schedule": name, "error": str(error)})
                continue
            rows.append(_figures(wanted, schedule, simulation))
            simulations.append(simulation)
    if all("error" in row for row in rows):
        raise ScheduleError(rows[0]["error"])
    check_group_time(flags, simulations)
    if flags.json:
        print(json.dumps(rows))
        return
    _print_table(rows)


def _print_table(rows: list[dict[str, Any]]) -> None:
    print("  ".join(f"{title:>{width}}" for title, width in COLUMNS))
    for row in rows:
        if "error" in row:
            print(f"{row['schedule']:>{COLUMNS[0][1]}}  {row['error']}")
            continue
        cells = (
            row["schedule"], row["class"], f"{row['bubble']:.4f}", f"{row['steps']}",
            f"{row['makespan'] / row['steps']:.5g}",
            f"{max(row['peak_activations']):g}", f"{max(row['weight_versions'])} + {row['gradient_buffers']}",
            f"{row['exposed_communication'] / row['steps']:.4g}",
        )  # fmt: skip
        print("  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)))
    print(
        "\nbubble: idle time over ideal time, counted on each rank "
        "from its first forward; over the makespan, it is b / (1 + b)"
    )
    print(
        "steps: simulated; schedules that never flush run several. time/step: longest time of a rank over the steps."
    )
    print("activations: micro-batches on the fullest rank; weights: versions + gradient buffers; exposed: time that")
    print("transfers between ranks and weight gathers add to a step")


def _draw(flags: argparse.Namespace) -> None:
    draw = _chosen(DRAWINGS, flags.output)
    schedule, simulation = _run_one(flags)
    _write_picture(flags.output, draw(simulation))
    if flags.json:
        print(json.dumps({"output": str(flags.output), **_figures(flags, schedule, simulation)}))
    else:
        print(f"wrote {flags.output}")


def _chosen(drawings: dict[str, Draw], output: Path) -> Draw:
    """Return the function that draws a file with this ending."""
    if output.suffix not in drawings:
        raise ScheduleError(f"--output {output} must end in {', '.join(drawings)}")
    return drawings[output.suffix]


def _write_picture(path: Path, picture: str) -> None:
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"cannot write {path}: {error.strerror}; choose another file") from None


def _write(flags: argparse.Namespace) -> None:
    check_order_times(flags, flags.schedule)
    short = is_short(flags)
    text = dumps(schedule_of(flags, flags.schedule) if flags.lowered else order_of(flags, flags.schedule))
    text = (short and find_generator(flags.schedule).text) or text
    print(json.dumps({"text": text}) if flags.json else text, end="\n" if flags.json else "")


def _run_overlay(flags: argparse.Namespace) -> None:
    """Read a trace, compare it with its simulation, and print or draw the result."""
    draw = None if flags.output is None else _chosen(OVERLAY_DRAWINGS, flags.output)
    overlay = _overlay(flags)
    if draw is not None:  # before the output, so that a refused file is the only line
        _write_picture(flags.output, draw(overlay))
    print(json.dumps(overlay_figures(overlay)) if flags.json else overlay_text(overlay))
    if draw is not None and not flags.json:
        print(f"wrote {flags.output}")


def _overlay(flags: argparse.Namespace) -> Overlay:
    run = read_run(flags.directory, flags.pipeline)
    window = choose(run, None if flags.step is None else flags.step - 1)
    measured = measured_costs(run, window)
    costs = _with_given_times(measured.costs, flags, run.schedule.header)
    return lay_over(run, window, replace(measured, costs=costs))


def _with_given_times(costs: Costs, flags: argparse.Namespace, header: Header) -> Costs:
    """Return the costs, with the times that the flags set in place of the measured ones."""
    for name in (*STAGE_TIMES, "latency", "scalars_time"):
        value = getattr(flags, name)
        if value is not None and not 0 <= value < math.inf:
            raise ScheduleError(f"--{name.replace('_', '-')} is {value:g}; it must be at least 0 and finite, in ms")
    if flags.forward == 0:
        raise ScheduleError("--forward is 0; it must be above 0, because bubbles are relative to the time of compute")
    given_times = {
        kind: [getattr(flags, name) / share for share in header.stages_sharing]
        for name, kind in STAGE_TIMES.items()
        if getattr(flags, name) is not None
    }
    costs = costs.with_times(stage_times(header, given_times))
    if flags.latency is not None:
        costs = replace(costs, links={}, link=Link(flags.latency))
    return costs if flags.scalars_time is None else replace(costs, reduce_scalars=flags.scalars_time)


COMMANDS = {
    "list": _list,
    "validate": _validate,
    "simulate": _simulate,
    "show": _show,
    "compare": _compare,
    "draw": _draw,
    "write": _write,
    "overlay": _run_overlay,
}
