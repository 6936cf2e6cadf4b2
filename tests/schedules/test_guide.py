"""What docs/schedules.md says is what the code does."""

import json
import re
from pathlib import Path

import pytest

from megapipe.schedules import GENERATORS, Link, build, loads, lower, rank_costs, simulate, validate
from megapipe.schedules.command.main import main

GUIDE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")


def test_every_schedule_has_its_picture():
    for name in GENERATORS:
        assert f"![{name}](pictures/schedules/{name}.svg)" in GUIDE


def test_the_comparison_is_what_the_simulator_gives():
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d) \+ (\d) \| ([ABC]) \|$", GUIDE, re.M)
    assert {row[0] for row in rows} == set(GENERATORS) - {"zb_auto"}
    for name, bubble, late, activations, versions, buffers, numerical_class in rows:
        schedule = build(name, 8, 32)
        steps = 1 if schedule.flushes else 4
        runs = [simulate(schedule, rank_costs(schedule.header, link=Link(hop)), steps) for hop in (0.0, 0.25)]
        assert [f"{run.bubble:.4f}" for run in runs] == [bubble, late]
        assert f"{max(runs[0].peak_activations):g}" == activations
        assert (schedule.header.num_versions, schedule.header.gradient_buffers) == (int(versions), int(buffers))
        assert schedule.header.numerical_class == numerical_class


def test_the_lazy_and_eager_table():
    rows = re.findall(r"^\| (\d) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE, re.M)
    assert len(rows) == 6
    for wait, microbatches, *expected in rows:
        for figure, name, options in zip(
            expected, ("2bw", "2bw", "1f1b"), ({"update": "lazy"}, {"update": "eager"}, {}), strict=True
        ):
            schedule = build(name, 4, int(microbatches), **options)
            run = simulate(schedule, rank_costs(schedule.header, reduce_scalars=float(wait)), 100)
            assert 1 + run.bubble == pytest.approx(float(figure), abs=6e-4)


def test_the_table_of_gathers(capsys):
    rows = re.findall(r"^\| (\w+) \| `(.+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE, re.M)
    assert len(rows) == 4
    for name, flags, gathers, bubble, exposed in rows:
        shape = f"simulate --schedule {name} --ranks 4 --microbatches 8 {flags}"
        assert main([*shape.split(), "--weight-buffers", "2", "--gather-time", "2", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["weight_gathers"][0] == int(gathers)
        assert f"{found['bubble']:.4f}" == bubble
        assert f"{found['exposed_communication']:.2f}" == exposed


def test_what_running_again_costs(capsys):
    figures = re.search(
        r"of ([\d.]+) instead of (\d) micro-batches, and a step takes ([\d.]+) instead of (\d+),", GUIDE
    )
    kept, instead, longer, finish = figures.groups()
    command = re.search(r"tools/schedule.py (simulate .+ --recompute \d+)\n", GUIDE).group(1)
    for flags, activations, time in ((command, kept, longer), (command.partition(" --recompute")[0], instead, finish)):
        assert main([*flags.split(), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["peak_activations"][0], found["finish"]) == (float(activations), float(time))


def test_eager_2bw_idles_for_all_but_one_backward_a_step():
    """(p-1) B a step, by the closed form that the guide gives."""
    for ranks, microbatches, backward, steps in ((4, 4, 2.0, 20), (3, 5, 1.0, 7), (2, 6, 3.0, 1)):
        schedule = build("2bw", ranks, microbatches, update="eager")
        run = simulate(schedule, rank_costs(schedule.header, backward=backward), steps)
        step = microbatches * (1 + backward) + (ranks - 1) * backward
        assert run.finish == steps * step + (ranks - 1)


def test_the_example_runs():
    text = re.search(r"^megapipe schedule 1\n.*?(?=^```)", GUIDE, re.M | re.S)
    assert text is not None
    assert validate(lower(loads(text.group()))).peak_activations == (2.0, 1.0)
