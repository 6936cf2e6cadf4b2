"""The pictures of schedules, and figures of docs/schedules.md and docs/offload.md by the simulator."""

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from megapipe.schedules import GENERATORS, Link, build, rank_costs, simulate
from megapipe.schedules.command.main import main
from megapipe.schedules.drawing import draw_svg
from tests.docs.figures import files, head, printed, read, row, sentence, table

GUIDE = "docs/schedules.md"


def picture(name: str) -> dict[str, str]:
    """Draw four ranks and eight micro-batches (two steps of four if the schedule never flushes)."""
    never_flushes = GENERATORS[name].numerical_class == "B"
    schedule = build(name, 4, 4 if never_flushes else 8)
    run = simulate(schedule, rank_costs(schedule.header), 2 if never_flushes else 1)
    assert f"![{name}](pictures/schedules/{name}.svg)" in read(GUIDE)
    return {f"docs/pictures/schedules/{name}.svg": draw_svg(run)}


for name in GENERATORS:
    files(f"schedules/{name}.svg")(partial(picture, name))


@files("schedules/vocabulary.svg")
def shared_output() -> dict[str, str]:
    """Draw 1F1B whose output layer all ranks share."""
    schedule = build("1f1b", 4, 8, vocabulary=True)
    assert "(pictures/schedules/vocabulary.svg)" in read(GUIDE)
    return {"docs/pictures/schedules/vocabulary.svg": draw_svg(simulate(schedule, rank_costs(schedule.header)))}


@table(GUIDE, "comparison of schedules")
def comparison() -> Iterator[str]:
    yield from head("schedule", "bubble", "with latency 0.25 F per message", "activations", "copies", "class")
    names = [name for name in GENERATORS if name not in ("zb_auto", "v_auto")]
    for name in sorted(names, key=lambda name: GENERATORS[name].numerical_class):
        schedule = build(name, 8, 32)
        steps = 1 if schedule.flushes else 4
        runs = [simulate(schedule, rank_costs(schedule.header, link=Link(hop)), steps) for hop in (0.0, 0.25)]
        bubbles = [f"{run.bubble:.4f}" for run in runs]
        header = schedule.header
        buffers = f"{max(header.weight_versions)} + {header.gradient_buffers * header.model_copies}"
        yield row(name, *bubbles, f"{max(runs[0].peak_activations):g}", buffers, schedule.header.numerical_class)


@table(GUIDE, "lazy and eager updates")
def lazy_and_eager() -> Iterator[str]:
    yield from head("norm takes", "m", "lazy", "eager", "1f1b (flush)")
    for wait, microbatches in ((0, 4), (0, 8), (0, 16), (3, 4), (6, 4), (6, 8)):
        times = []
        for name, options in (("2bw", {"update": "lazy"}), ("2bw", {"update": "eager"}), ("1f1b", {})):
            schedule = build(name, 4, microbatches, **options)
            run = simulate(schedule, rank_costs(schedule.header, reduce_scalars=float(wait)), 100)
            times.append(f"{1 + run.bubble:.3f}")
        yield row(wait, microbatches, *times)


def simulated(flags: str) -> dict[str, Any]:
    """Return what `schedule simulate` prints as JSON."""
    report: dict[str, Any] = json.loads(printed(lambda: main([*flags.split(), "--json"])))
    return report


@table(GUIDE, "gathers of sharded weights")
def gathers() -> Iterator[str]:
    yield from head("schedule", "flags", "gathers on rank 0", "bubble", "exposed gathers in it")
    for name, flags in (
        ("gpipe", "--units 4"),
        ("1f1b", "--units 4"),
        ("interleaved_1f1b", "--chunks 4"),
        ("modular", "--chunks 4"),
    ):
        shape = f"simulate --schedule {name} --ranks 4 --microbatches 8 {flags}"
        report = simulated(f"{shape} --weight-buffers 2 --gather-time 2")
        exposed = f"{report['exposed_communication']:.2f}"
        yield row(name, f"`{flags}`", report["weight_gathers"][0], f"{report['bubble']:.4f}", exposed)


@sentence(
    GUIDE,
    "cost of recomputation",
    r"of ([\d.]+) instead of (\d) micro-batches, and a step takes ([\d.]+) instead of (\d+),",
)
def cost_of_recomputation() -> list[str]:
    (command,) = re.findall(r"tools/schedule.py (simulate .+) --recompute (?:\d+)\n", read(GUIDE))
    runs = [simulated(flags) for flags in (f"{command} --recompute 2", command)]
    return [
        f"{run[key][0] if key == 'peak_activations' else run[key]:g}"
        for key in ("peak_activations", "finish")
        for run in runs
    ]


@sentence("docs/offload.md", "copies of offloaded weights", r"makes (\d+) copies per step of its 4 layers")
def copies_of_offloaded_weights() -> list[str]:
    """Read them from the guide's command; all of them overlap with compute."""
    (command,) = re.findall(
        r"(?m)^python tools/schedule.py (simulate .* --offload-weights 2 .*)$", read("docs/offload.md")
    )
    report = simulated(command)
    assert report["exposed_communication"] == 0
    return [str(report["weight_gathers"][0])]
