"""Measured over predicted: traces whose truth is known, and traces and flags that are wrong."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.schedules import GENERATORS, Kind, Link, Schedule, build, rank_costs
from megapipe.schedules.command.main import main
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.measured.medians import choose, measured_costs
from megapipe.schedules.measured.overlay import Overlay, lay_over
from megapipe.schedules.measured.traces import read_rank, read_run, write_rank
from megapipe.schedules.simulation import CostPlace
from megapipe.schedules.states import StateTable, StateUnit
from tests.schedules.support import TRAINED
from tests.schedules.traces import STEP_APART, pause, write_trace
from tests.support.browser import open_page

ROOT = Path(__file__).parents[2]
TIMES = {"forward": 4.0, "backward_input": 5.0, "backward_weight": 3.0, "update": 1.0, "reduce_scalars": 0.75}


def scheduled(name: str, ranks: int = 4, microbatches: int = 8, **how: object) -> Schedule:
    stages = ranks * GENERATORS[name].chunks
    return build(name, ranks, microbatches, **{"units_per_stage": [2] * stages, "tied_groups": [[0]]} | how)


def overlay_of(directory: Path, step: int | None = None) -> Overlay:
    run = read_run(directory)
    window = choose(run, step)
    return lay_over(run, window, measured_costs(run, window))


@pytest.mark.parametrize("data_parallel", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_a_run_that_goes_as_predicted_parts_nowhere(tmp_path: Path, name: str, data_parallel: bool) -> None:
    schedule = scheduled(name, data_parallel=data_parallel)
    costs = rank_costs(schedule.header, **TIMES, link=Link(latency=0.5))
    write_trace(tmp_path, schedule, costs)
    overlay = overlay_of(tmp_path)
    for measured, predicted in overlay.ranks:
        assert measured == pytest.approx(predicted, abs=1e-4)
    assert max(abs(deviation.lost) for deviation in overlay.deviations) < 1e-4
    found = overlay.costs.costs
    if schedule.header.updates_per_step == 1:
        assert found.reduce_scalars == pytest.approx(costs.reduce_scalars, abs=1e-4)
    assert found.of_stages(Kind.FORWARD) == pytest.approx(costs.of_stages(Kind.FORWARD), abs=1e-4)
    for rank in range(4):  # a rank's updates are one event, of which each unit gets an equal part
        stages = schedule.header.stages_on(rank)
        updates = found.of_stages(Kind.UPDATE)
        assert sum(updates[stage] for stage in stages) == pytest.approx(TIMES["update"], abs=1e-4)
    assert found.links
    for link in found.links.values():
        assert link.latency == pytest.approx(0.5, abs=1e-4)
    assert overlay.costs.clock_excess == 0.0


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3)])
def test_gathers_are_measured_by_state_unit(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """A layer of two units, whose gathers take 10 for each size, then one of a single unit; compute hides nothing."""
    units = (*(StateUnit(0, "sharded", size=size) for size in sizes), StateUnit(1, "sharded", size=2))
    schedule = build(
        "gpipe", 1, 2, units_per_stage=[2], data_parallel=True, states=StateTable((units,), weight_pool=sum(sizes))
    )
    costs = rank_costs(schedule.header, forward=0.1, backward=0.2, gather_weights=10.0 * (sum(sizes) + 2))
    write_trace(tmp_path, schedule, costs)
    overlay = overlay_of(tmp_path)
    for unit, size in enumerate((*sizes, 2)):
        assert overlay.costs.costs.times[CostPlace(Kind.GATHER_WEIGHTS, 0, unit)] == pytest.approx(10.0 * size)
    for measured, predicted in overlay.ranks:
        assert measured == pytest.approx(predicted, abs=1e-3)


def test_layers_are_measured_by_themselves(tmp_path: Path) -> None:
    schedule = scheduled("modular", 2, 3, data_parallel=True)
    costs = rank_costs(schedule.header, **TIMES)
    slow = {CostPlace(kind, 0, 0): 7.0 for kind in (Kind.FORWARD, Kind.BACKWARD)}
    write_trace(tmp_path, schedule, costs.with_times(slow))
    times = overlay_of(tmp_path).costs.costs.times
    for place, time in (costs.times | slow).items():
        if place.kind in (Kind.FORWARD, Kind.BACKWARD) and place.unit >= 0:
            assert times[place] == pytest.approx(time, abs=1e-4)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "2bw"])
def test_common_pauses_count_once_on_every_rank(tmp_path: Path, name: str) -> None:
    schedule = scheduled(name)
    second_step = STEP_APART / 1e6 if schedule.flushes else 0.0
    write_trace(tmp_path, schedule, rank_costs(schedule.header, **TIMES), change=pause(second_step + 60.3, 7.0))
    overlay = overlay_of(tmp_path, 1 if schedule.flushes else None)
    for rank, (measured, predicted) in enumerate(overlay.ranks):
        assert measured.span == pytest.approx(predicted.span + 7.0, abs=1e-3)
        mine = [each for each in overlay.deviations if overlay.window.table.rank[each.row] == rank]
        assert mine[0].lost == pytest.approx(7.0, abs=1e-3)
        assert max(mine[0].wait, mine[0].work) == pytest.approx(7.0, abs=1e-3)
        assert overlay.lag[rank][-1][1] == pytest.approx(7.0, abs=1e-3)
    lost = {round(each.work, 3) for each in overlay.deviations}
    assert lost == {0.0, 7.0}


@pytest.mark.parametrize("name", ["gpipe", "2bw", "pipedream"])
def test_losses_of_actions_add_up_to_their_ranks(tmp_path: Path, name: str) -> None:
    generator = np.random.default_rng(7)
    schedule = scheduled(name)
    late = np.zeros(4, dtype=np.int64)

    def jitter(event, rank):
        longer, gap = (int(value) for value in generator.integers(0, 3_000_000, size=2))
        start = event.start + late[rank] + gap
        late[rank] += gap + longer
        wait = event.wait + longer * bool(event.wait)
        return event._replace(start=int(start), wait=wait, end=int(event.end + late[rank]))

    write_trace(tmp_path, schedule, rank_costs(schedule.header, **TIMES), steps=4, change=jitter)
    overlay = overlay_of(tmp_path)
    for rank, (measured, predicted) in enumerate(overlay.ranks):
        mine = [each for each in overlay.deviations if overlay.window.table.rank[each.row] == rank]
        assert sum(each.lost for each in mine) == pytest.approx(measured.span - predicted.span)
        assert sum(each.between for each in mine) == pytest.approx(measured.between)
        for each in mine:
            assert each.lost == pytest.approx(each.wait + each.work + each.between)
        assert measured.between > 0.0


def test_middle_windows_are_compared_with_a_full_pipeline(tmp_path: Path) -> None:
    schedule = scheduled("2bw")
    write_trace(tmp_path, schedule, rank_costs(schedule.header, **TIMES, link=Link(0.2)), steps=7)
    for path in tmp_path.glob("rank-*.json"):
        trace = read_rank(path)
        write_rank(tmp_path, replace(trace, events=[e for e in trace.events if e.section == "body" and e.step > 2]))
    overlay = overlay_of(tmp_path)
    assert overlay.window.steps == (3, 4, 5)
    for measured, predicted in overlay.ranks:
        assert measured == pytest.approx(predicted, abs=1e-4)
    bodies = [np.sum(overlay.window.table.kind[overlay.rows] == kind) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert bodies == [3 * 8 * 4, 3 * 8 * 4]


def test_the_typical_step_is_shown_by_default(tmp_path: Path) -> None:
    schedule = scheduled("1f1b")
    slow = pause(STEP_APART / 1e6 + 40.3, 9.0)
    write_trace(tmp_path, schedule, rank_costs(schedule.header, **TIMES), steps=5, change=slow)
    assert overlay_of(tmp_path).window.steps != (1,)
    assert overlay_of(tmp_path, 1).window.steps == (1,)


def test_steps_that_a_rank_did_not_finish_are_omitted(tmp_path: Path) -> None:
    schedule = scheduled("1f1b")
    write_trace(tmp_path, schedule, rank_costs(schedule.header), steps=2)
    trace = read_rank(tmp_path / "rank-2.json")
    write_rank(tmp_path, replace(trace, events=trace.events[:-5]))
    assert {each.step for each in read_run(tmp_path).recorded} == {0}
    write_rank(tmp_path, replace(trace, events=trace.events[:5]))
    assert main(["overlay", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coordinates": {"data": 0, "tensor": 0}}, "its coordinates"),
        ({"coordinates": {"data": 0, "pipeline": 4, "tensor": 0}}, "its coordinates"),
        ({"coordinates": {"data": 0, "pipeline": 1, "tensor": 0}}, "have the same coordinates"),
        ({"layout": {"data": 1, "tensor": 1}}, "lacks 'pipeline'"),
        ({"layout": {"data": 10**12, "pipeline": 4, "tensor": 1}}, "different layouts"),
        ({"rank": 1}, "was recorded by rank 1"),
    ],
)
def test_edited_traces_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    schedule = scheduled("1f1b")
    write_trace(tmp_path, schedule, rank_costs(schedule.header))
    file = tmp_path / "rank-2.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ScheduleError, match=message):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["modular", "2bw"])
def test_one_rank_alone_has_an_overlay_too(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = scheduled(name, 1, 3)
    write_trace(tmp_path, schedule, rank_costs(schedule.header, **TIMES))
    assert main(["overlay", str(tmp_path), "-o", str(tmp_path / "overlay.svg")]) == 0
    assert "messages between ranks" not in capsys.readouterr().out


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    schedule = scheduled("1f1b")
    write_trace(tmp_path, schedule, rank_costs(schedule.header, **TIMES, link=Link(0.5)))
    return tmp_path


def test_the_command_prints_where_they_part(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlay", str(traced)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1f1b, 4 ranks, 8 micro-batches, step 2: measured over predicted"
    assert len([line for line in lines if line.split()[:1] in (["0"], ["1"], ["2"], ["3"])]) >= 4
    assert "  stage 2 (rank 2): forward 4.000, backward 8.000, update 1.000" in lines
    assert "  messages between ranks 0.500 to 0.500" in lines
    assert lines[-1].startswith("rank 0, the slowest, took")
    assert "(+0.0%)" in lines[-1]


def test_given_times_replace_the_measured_ones(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--forward 2 --backward 3 --update-time 0.5 --latency 0 --scalars-time 0 --json"
    assert main(["overlay", str(traced), *flags.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"][0]["predicted"]["span"] == pytest.approx((8 + 3) * 5 + 0.5)
    assert report["times"]["stages"][1] == {
        "forward": 2.0, "backward": 3.0, "recompute": 0.0, "backward_input": 0.0, "backward_weight": 0.0, "update": 0.5
    }  # fmt: skip
    assert report["ranks"][0]["measured"]["span"] > 90
    assert report["about"]["model"] == {"num_layers": 4}


@pytest.mark.parametrize(("clock_error", "warns"), [(1_000, True), (4_000_000, False), (0, False)])
def test_only_clocks_of_different_hosts_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock_error: int, warns: bool
) -> None:
    schedule = scheduled("1f1b")

    def early(event, rank):
        return event._replace(start=event.start - 3_000_000 * rank, end=event.end - 3_000_000 * rank)

    write_trace(tmp_path, schedule, rank_costs(schedule.header, **TIMES), change=early, clock_error=clock_error)
    assert main(["overlay", str(tmp_path)]) == 0
    assert ("a message seems to arrive 3 ms before it was sent" in capsys.readouterr().out) is warns


def drawn(directory: Path, suffix: str) -> str:
    path = directory / f"overlay{suffix}"
    assert main(["overlay", str(directory), "-o", str(path)]) == 0
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "2bw"])
def test_the_still_picture_has_both_boxes_of_every_action(tmp_path: Path, name: str) -> None:
    schedule = scheduled(name, 2, 4)
    write_trace(tmp_path, schedule, rank_costs(schedule.header, **TIMES))
    document = ElementTree.fromstring(drawn(tmp_path, ".svg"))
    boxes = document.findall("{http://www.w3.org/2000/svg}g")
    assert len(boxes) == 2 * len(overlay_of(tmp_path).rows)


def test_merged_traces_have_measured_and_predicted_processes_per_rank(traced: Path) -> None:
    document = json.loads(drawn(traced, ".json"))
    names = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"}
    assert names == {f"{what} {rank}" for what in ("rank", "predicted rank") for rank in range(4)}
    forwards = [event for event in document["traceEvents"] if event["name"] == "forward"]
    assert len(forwards) == 2 * 4 * 8
    assert {round(event["dur"]) for event in forwards} == {4000}
    tracks = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event["ph"] == "X"}
    lanes = [event for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert sorted((event["pid"], event["tid"]) for event in lanes) == sorted(tracks)
    for kind in ("send activation", "receive activation", "send gradient", "receive gradient"):
        ranks = [event["pid"] for event in document["traceEvents"] if event["name"] == kind]
        assert len(ranks) == 2 * 3 * 8, "three links, measured and predicted"
    assert document["otherData"]["layout"] == {"data": 1, "pipeline": 4, "tensor": 1}


def test_the_page_describes_an_action_on_both_lines(traced: Path) -> None:
    assert "http" not in drawn(traced, ".html")
    with open_page(traced / "overlay.html", 1280, 720) as page:
        tooltips = []
        for line in (4, 5):
            wanted = f"bars.find(bar => bar.line === {line} && bar.lane === 'compute' && bar.label === '3')"
            x, y = page.evaluate(
                f"""() => {{ const bar = {wanted}, box = timeline.getBoundingClientRect();
                return [box.left + (xOf(bar.start) + xOf(bar.end)) / 2, box.top + yOf(bar) + 6]; }}"""
            )
            page.mouse.move(x, y)
            tooltips.append(page.inner_text("#tooltip"))
        levels = page.evaluate("[levelsOf(-6, 264), levelsOf(-200, 264), levelsOf(-264, 6), levelsOf(0, 4)]")
    assert levels == [[0, 264], [0, -200, 264], [0, -264], [0, 2, 4]]
    for text, side in zip(tooltips, ("measured", "predicted"), strict=True):
        assert "forward" in text
        assert "stage 2, micro-batch 3, step 2" in text
        assert side in text


def test_neither_an_overlay_nor_a_list_needs_torch(tmp_path: Path) -> None:
    schedule = build("interleaved_1f1b", 2, 4)
    write_trace(tmp_path, schedule, rank_costs(schedule.header, **TIMES))
    program = (
        "import runpy, sys\n"
        "for words in (['list'], ['overlay', sys.argv[1]]):\n"
        "    sys.argv = ['schedule.py', *words]\n"
        "    try: runpy.run_path('tools/schedule.py', run_name='__main__')\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=environment, check=True, capture_output=True
    )


RANK, TEXT = "rank-1.json", "schedule.txt"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (RANK, None, "", "lacks rank-1.json: the run had 4 ranks"),
        (RANK, r".{50}$", "", "rank-1.json is not readable JSON"),
        (RANK, r".*", '{"format": "megapipe trace 9"}', "has format 'megapipe trace 9', but this version reads"),
        (RANK, r".*", "[]", "has format None"),
        (RANK, r'"events":', '"others":', "rank-1.json lacks 'events'"),
        (RANK, r'"body"', '"head"', "rank-1.json contains an invalid event"),
        (RANK, r'(\["body",0,3,"[^"]*"),[^]]*', r"\1", "rank-1.json contains an invalid event"),
        (RANK, r'"a run"', '"another run"', "rank-1.json and rank-0.json were recorded in different runs"),
        (
            RANK,
            r'"fingerprint":"[^"]*"',
            '"fingerprint":"0123"',
            "rank-0.json were recorded in different schedules",
        ),
        (RANK, r'\["body",0,0,', '["body",0,999,', "as action 999 of its body, which the schedule 1f1b in the same f"),
        (TEXT, r"F0\.3", "F0.4", "schedule.txt is not the schedule of"),
        (TEXT, None, "", "cannot read"),
        ("*", None, "", "has no rank-N.json; pass the folder of --profile.trace"),
    ],
)
def test_wrong_files_are_refused(
    traced: Path, file: str, old: str | None, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in traced.glob(file):
        if old is None:
            path.unlink()
            continue
        text, count = re.subn(old, new, path.read_text().rstrip(), count=1, flags=re.DOTALL)
        assert count == 1
        path.write_text(text)
    assert main(["overlay", str(traced)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--step 9", "step 9 was not recorded; choose one of 1, 2, 3"),
        ("--pipeline 1", "pipeline 1 does not exist: the run had 1, numbered from 0"),
        ("--output overlay.png", "must end in .html, .svg, .json"),
        ("--output /nowhere/overlay.svg", "cannot write"),
        ("--latency -1", "--latency is -1; it must be at least 0"),
        ("--latency nan", "--latency is nan; it must be at least 0 and finite"),
        ("--forward inf --json", "--forward is inf; it must be at least 0 and finite"),
        ("--forward 0 --backward 0", "--forward is 0; it must be above 0"),
    ],
)
def test_wrong_flags_are_refused(traced: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlay", str(traced), *flags.split()]) == 2
    shown, error = capsys.readouterr()
    assert message in error
    assert not shown


def test_a_missing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlay", str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err
