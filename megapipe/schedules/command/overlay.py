"""``megapipe schedule overlay``: a measured trace over its prediction."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from megapipe.schedules.actions import Kind
from megapipe.schedules.drawing.overlay import draw_overlay_html, draw_overlay_svg, draw_overlay_trace
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.measured.medians import choose, measured_costs
from megapipe.schedules.measured.overlay import Overlay, figures, lay_over, text
from megapipe.schedules.measured.traces import read_run
from megapipe.schedules.schedule import Header
from megapipe.schedules.simulation import Costs, Link, stage_times

DRAWINGS: Final = {".html": draw_overlay_html, ".svg": draw_overlay_svg, ".json": draw_overlay_trace}
STAGE_TIMES: Final = {
    kind.name.lower(): kind
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.UPDATE)
}


def add_overlay(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    command.add_argument("directory", type=Path, help="folder of the recording, set by --profile.trace")
    command.add_argument("-o", "--output", type=Path, help="picture: .html, .svg or .json (Chrome/Perfetto trace)")
    command.add_argument("--step", type=int, help="step to show, numbered as in the log (default: a typical one)")
    command.add_argument("--pipeline", type=int, default=0, help="replica of the pipeline to show (default 0)")
    times = command.add_argument_group(
        "times in milliseconds, for a rank's share of the model, that replace measured medians"
    )
    for name in STAGE_TIMES:
        times.add_argument(f"--{name.replace('_', '-')}" + "-time" * (name == "update"), dest=name, type=float)
    times.add_argument("--latency", type=float, help="of a message between ranks")
    times.add_argument("--scalars-time", type=float, help="global norm and finite flag over all ranks")


def run_overlay(flags: argparse.Namespace) -> None:
    """Read a trace, compare it with its simulation, and print or draw the result."""
    draw = DRAWINGS.get(flags.output.suffix) if flags.output is not None else None
    if flags.output is not None and draw is None:
        raise ScheduleError(f"--output {flags.output} must end in {', '.join(DRAWINGS)}")
    overlay = _overlay(flags)
    print(json.dumps(figures(overlay)) if flags.json else text(overlay))
    if draw is None:
        return
    try:
        flags.output.write_text(draw(overlay), encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"cannot write {flags.output}: {error.strerror}; choose another file") from None
    if not flags.json:
        print(f"wrote {flags.output}")


def _overlay(flags: argparse.Namespace) -> Overlay:
    run = read_run(flags.directory, flags.pipeline)
    window = choose(run, None if flags.step is None else flags.step - 1)
    measured = measured_costs(run, window)
    costs = _with_given_times(measured.costs, flags, run.schedule.header)
    return lay_over(run, window, replace(measured, costs=costs))


def _with_given_times(costs: Costs, flags: argparse.Namespace, header: Header) -> Costs:
    """The costs, with those that the flags give in the place of the measured ones."""
    for name in (*STAGE_TIMES, "latency", "scalars_time"):
        given = getattr(flags, name)
        if given is not None and given < 0:
            raise ScheduleError(f"--{name.replace('_', '-')} is {given:g}; it must be at least 0, in milliseconds")
    given_times = {
        kind: [getattr(flags, name) / share for share in header.stages_sharing]
        for name, kind in STAGE_TIMES.items()
        if getattr(flags, name) is not None
    }
    costs = costs.with_times(stage_times(header, given_times))
    if flags.latency is not None:
        costs = replace(costs, links={}, link=Link(flags.latency))
    return costs if flags.scalars_time is None else replace(costs, reduce_scalars=flags.scalars_time)
