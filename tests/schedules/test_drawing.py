"""The drawings hold what was simulated, and the page shows it in a browser."""

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from megapipe.schedules import GENERATORS, Kind, Link, Offload, build, rank_costs, simulate
from megapipe.schedules.actions import COMPUTE_KINDS
from megapipe.schedules.drawing import draw_html, draw_svg, draw_terminal, draw_trace
from megapipe.schedules.drawing.bars import FILLS, NAMES, activation_curves, bars_of
from tests.support.browser import open_page


def run_of(name, ranks=4, microbatches=8, **costs):
    schedule = build(name, ranks, microbatches)
    return simulate(schedule, rank_costs(schedule.header, **costs))


def test_trace_has_an_event_for_every_bar():
    run = run_of("1f1b", link=Link(latency=0.25), reduce_scalars=0.5)
    events = json.loads(draw_trace(run))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    sends = [event for event in complete if event["cat"] == "send"]
    assert len(complete) == len(bars_of(run)) + len(sends)
    assert {event["cat"] for event in complete} == {"compute", "send", "receive", "collectives"}
    last = max(event["ts"] + event["dur"] for event in complete)
    assert last == pytest.approx(run.finish * 1000)
    received = [event for event in complete if event["cat"] == "receive"]
    for sent, arrived in zip(*(sorted(each, key=message_of) for each in (sends, received)), strict=True):
        assert (sent["ts"], sent["dur"]) == (arrived["ts"], arrived["dur"])
        assert abs(sent["pid"] - arrived["pid"]) == 1


def message_of(event):
    kind = event["name"].split()[1]
    stage = event["args"]["stage"] - (kind == "activation" and event["cat"] == "receive")
    return kind, stage + (kind == "gradient" and event["cat"] == "receive"), event["args"]["microbatch"]


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_track_of_a_trace_is_named(name):
    """Processes are ranks and threads are lanes, each named once, and no two bars of a stream overlap."""
    stages = 2 * GENERATORS[name].chunks
    offload = Offload(((0,),) * stages, 1, GENERATORS[name].chunks == 1 and build(name, 2, 4).flushes)
    schedule = build(name, 2, 4, data_parallel=True, offload=offload)
    times = {"reduce_gradients": 0.5, "reduce_scalars": 0.25, "update": 0.5, "offload": 0.3, "offload_state": 0.1}
    run = simulate(schedule, rank_costs(schedule.header, link=Link(latency=0.25), **times), 2)
    events = json.loads(draw_trace(run))["traceEvents"]
    named = [(event["name"], event["pid"], event["tid"], event["args"]) for event in events if event["ph"] == "M"]
    ranks = {pid: args["name"] for kind, pid, _, args in named if kind == "process_name"}
    lanes = {(pid, tid): args["name"] for kind, pid, tid, args in named if kind == "thread_name"}
    assert ranks == {0: "rank 0", 1: "rank 1"}
    assert len(named) == 2 * len(ranks) + 2 * len(lanes)
    complete = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in complete} == set(lanes)
    assert all(event["cat"] == lanes[event["pid"], event["tid"]] and event["dur"] >= 0 for event in complete)
    assert {"compute", "send", "receive", "collectives", "copy out", "copy in"} == set(lanes.values())
    for track in lanes:
        mine = sorted((each["ts"], each["dur"]) for each in complete if (each["pid"], each["tid"]) == track)
        if lanes[track] in ("compute", "copy out", "copy in"):
            assert all(start + span <= after + 1e-6 for (start, span), (after, _) in pairwise(mine))


def test_terminal_lines_show_the_idle_time():
    run = run_of("gpipe", 2, 2)
    lines = draw_terminal(run).splitlines()
    assert lines[0].split()[2] == "0011......aaaabbbb"
    assert lines[1].split()[2] == "..0011aaaabbbb...."


def shown_data(page):
    return json.loads(page.partition('<script id="data" type="application/json">')[2].partition("</script>")[0])


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_memory_picture_and_page_show_the_simulation(name):
    """Memory peaks as reported and ends at zero; the picture has a box for each action; the page's figures name the
    whole axis, and count all idle time that is visible on the busiest rank."""
    run = run_of(name, backward_input=1.0, backward_weight=1.0)
    bars = [bar for bar in bars_of(run) if bar.lane == "compute"]
    work = run.table.rows_with(*COMPUTE_KINDS)
    assert len(bars) == len(work)
    assert sum(bar.end - bar.start for bar in bars) == pytest.approx(run.durations[work].sum())
    assert {bar.chunk for bar in bars} == set(range(GENERATORS[name].chunks))
    assert any(bar.critical for bar in bars)
    for curve, peak in zip(activation_curves(run), run.peak_activations, strict=True):
        assert max(count for _, count in curve) == pytest.approx(peak)
        assert curve[-1][1] == pytest.approx(0.0, abs=1e-9)
    group = "{http://www.w3.org/2000/svg}g"
    boxes = ElementTree.fromstring(draw_svg(run)).findall(f".//{group}/{group}")
    assert len(boxes) == len(bars)
    page = draw_html(run)
    assert "@DATA@" not in page
    assert "@TITLE@" not in page
    assert "http" not in page
    data = shown_data(page)
    figures = {title: value for title, value, _ in data["figures"]}
    busy = [0.0] * len(data["lines"])
    for _, rank, lane, _, _, _, _, start, end, *_ in data["bars"]:
        busy[rank] += end - start if lane == "compute" else 0.0
    assert float(figures["first to last action"]) == pytest.approx(data["finish"], rel=1e-5)
    assert float(figures["longest rank"]) <= data["finish"] + 1e-6
    share = {title: float(value.rstrip("%")) / 100 for title, value in figures.items() if value.endswith("%")}
    assert share["idle / ideal time"] == pytest.approx(data["finish"] / max(busy) - 1, abs=1e-4)
    assert share["idle / makespan"] == pytest.approx(1 - max(busy) / data["finish"], abs=1e-4)


def test_pairs_share_a_box_and_chunks_have_a_legend():
    run = run_of("dualpipe_v", 4, 10, backward_input=1.0, backward_weight=1.0)
    pairs = [bar for bar in bars_of(run) if bar.part[1] > 1]
    assert len(pairs) == 2 * len({(bar.rank, bar.drawn) for bar in pairs}) > 0
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        assert first.drawn == second.drawn == (first.start, second.end)
        assert (first.part, second.part) == ((0, 2), (1, 2))
        assert {first.kind, second.kind} == {Kind.FORWARD, Kind.BACKWARD}
    boxes = {(bar.rank, *bar.drawn) for bar in bars_of(run) if bar.lane == "compute"}
    for rank in range(4):
        mine = sorted(box for box in boxes if box[0] == rank)
        assert all(before[2] <= after[1] + 1e-9 for before, after in pairwise(mine)), "boxes of a rank do not overlap"
    picture = draw_svg(run)
    assert "dark to light: chunks 0, 1 of a rank" in picture
    assert "one above the other: overlapped" in picture
    assert "idle 10.0% of the ideal time, 9.1% of the makespan" in picture
    assert "chunks" not in draw_svg(run_of("1f1b"))
    assert set(FILLS) == set(NAMES) >= {Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE}


def test_hovering_an_action_describes_it(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(draw_html(run_of("zb_h1", link=Link(latency=0.1))), encoding="utf-8")
    with open_page(path, 1280, 720) as page:
        page.evaluate(
            """() => { window.drawn = []; const write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
              window.drawn.push(text); write.call(this, text, ...place); }; }"""
        )
        wanted = "bars.find(bar => bar.rank === 2 && bar.text.startsWith('BACKWARD_WEIGHT') && bar.label === '3')"
        x, y = page.evaluate(
            f"""() => {{ const bar = {wanted}, box = timeline.getBoundingClientRect();
            return [box.left + (xOf(bar.start) + xOf(bar.end)) / 2, box.top + yOf(bar) + 8]; }}"""
        )
        page.mouse.move(x, y)
        text, drawn = page.inner_text("#tooltip"), page.evaluate("window.drawn")
        names = page.inner_text("#ranks").split("rank ")[1:]
        page.mouse.wheel(0, -600)
        page.wait_for_function("view.to - view.from < data.finish * 0.9")
        page.click("#critical")
        page.click("text=whole run")
        assert page.evaluate("view.to - view.from") == page.evaluate("data.finish")
    assert [int(each) for each in names] == [0, 1, 2, 3], "every activation curve is named"
    assert "backward, weight half" in text
    assert "BACKWARD_WEIGHT stage 2, micro-batch 3" in text
    assert "rank 2" in text
    assert re.search(r"[\d.]+ to [\d.]+ time units", text)
    assert "time units" in drawn, "the axis has a unit"
    assert "activations alive" in text
