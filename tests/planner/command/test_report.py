"""The report's pictures hold what was estimated, and the page works in a browser, light and dark."""

import os
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.load import parse
from megapipe.config.words import bytes_told, duration_told, seconds_told
from megapipe.layout.hardware.reader import load_hardware
from megapipe.planner.cost.estimate import RankMemory
from megapipe.planner.cost.model import predict
from megapipe.planner.report.breakdown import Row, draw_breakdown
from megapipe.planner.report.memory import draw_memory
from megapipe.planner.report.page import MOST_BARS, PageSection, draw_page
from megapipe.planner.report.pareto import draw_pareto
from megapipe.planner.report.svg import ticks
from megapipe.planner.report.table import plain_table
from megapipe.planner.report.words import layout_told
from tests.planner.command.plan import LAYOUT, output

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def prediction():
    flags = [each for each in LAYOUT if "hardware" not in each and "devices" not in each]
    config = parse([*flags, "--training.precision=bf16"])
    return predict(config, load_hardware("a100-80"), world_size=16)


def boxes_of(picture):
    """(width, what it tells) of every box that tells something."""
    return [
        (float(each.get("width")), each.find(f"{SVG}title").text)
        for each in ElementTree.fromstring(picture).iter(f"{SVG}rect")
        if each.find(f"{SVG}title") is not None
    ]


def test_memory_bars_are_in_proportion_to_bytes(prediction):
    answer = prediction.estimate
    boxes = boxes_of(draw_memory(answer))
    for place, memory in enumerate(answer.memory):
        widths = [width for width, told in boxes if told.startswith(f"stage {place}: ")]
        assert sum(widths) == pytest.approx(memory.total / answer.memory_limit * (900 - 84 - 84), abs=0.5)
    assert any(told.endswith(f"weights {bytes_told(answer.memory[0].weights)}") for _, told in boxes)


def test_a_rank_that_is_too_full_reaches_over_the_line_of_its_device(prediction):
    half = prediction.estimate.peak_bytes / 2
    small = replace(prediction.estimate, memory_limits=(half,) * len(prediction.estimate.memory))
    document = ElementTree.fromstring(draw_memory(small))
    limit = next(float(each.get("x1")) for each in document.iter(f"{SVG}line") if each.get("class") == "plan-limit")
    bars = [each for each in document.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    right = max(float(each.get("x")) + float(each.get("width")) for each in bars)
    assert right - 84 == pytest.approx(2 * (limit - 84), abs=0.5)


def test_terms_of_a_step_fill_its_bar(prediction):
    answer = prediction.estimate
    slower = replace(answer, step_seconds=2 * answer.step_seconds)
    boxes = boxes_of(draw_breakdown([Row("best", answer), Row("other <&>", slower)]))
    best = sum(width for width, told in boxes if told.startswith("best: "))
    other = sum(width for width, told in boxes if told.startswith("other <&>: "))
    assert best == pytest.approx(other, abs=1.0)  # the same terms; the other's step is said to be twice as long
    assert {told.split(": ")[1].split()[0] for _, told in boxes} == {term.name for term in answer.terms}
    tight = replace(answer, memory_limits=(1e9,) * len(answer.memory))
    assert "too large by " in draw_breakdown([Row("tight", tight)])
    assert "too large by " not in draw_breakdown([Row("best", answer)])


def test_the_front_has_a_disc_for_each_layout(prediction):
    answer = prediction.estimate
    front = [
        replace(answer, step_seconds=answer.step_seconds * (1 + index / 5), memory=(RankMemory(part, 0, 0, 0, 0, 0),))
        for index, part in enumerate((60_000_000_000, 59_900_000_000, 20_000_000_000))
    ]
    document = ElementTree.fromstring(draw_pareto(front, 80e9))
    assert len(document.findall(f".//{SVG}circle")) == 3
    best = [each for each in document.iter(f"{SVG}circle") if each.get("class") == "plan-best"]
    assert len(best) == 1


def test_long_fronts_are_cut_with_a_word(prediction):
    front = [replace(prediction.estimate, step_seconds=1.0 + index) for index in range(20)]
    assert "and 8 slower ones" in draw_pareto(front, 80e9)


def test_a_long_schedule_is_drawn_for_some_ranks(prediction, monkeypatch):
    monkeypatch.setattr("megapipe.planner.report.page.MOST_BARS", 10)
    page = draw_page("title", [], prediction.simulation, [])
    assert '"label":"stage 0"' in page
    assert '"label":"stage 1"' not in page
    assert MOST_BARS > 10


def test_words_are_escaped(prediction):
    page = draw_page("<b>", [], prediction.simulation, [PageSection("a < b", "<p>body</p>", "c & d")])
    assert "<h3>a &lt; b</h3>" in page
    assert "<p>c &amp; d</p>" in page
    assert "<title>&lt;b&gt;</title>" in page


@given(st.floats(1e-9, 1e12))
def test_ticks_are_round_and_reach_the_end(largest):
    values = ticks(largest)
    assert values[0] == 0
    assert values[-1] <= largest * (1 + 1e-9)
    step = values[1]
    assert largest / step <= 6 + 1e-9
    assert largest - values[-1] < step * (1 + 1e-6)
    assert f"{step:.3e}"[0] in "125"


def test_numbers_are_told_in_their_units():
    assert [bytes_told(value) for value in (512, 2e6, 79.96e9, 1.5e12)] == ["512 B", "2.0 MB", "80.0 GB", "1.5 TB"]
    assert [seconds_told(value) for value in (0, 2e-7, 1.8e-4, 0.0412, 3.0, 240.0, 2e4)] == [
        "0", "0.2 us", "180 us", "41.2 ms", "3.00 s", "240 s", "20,000 s",
    ]  # fmt: skip
    assert [duration_told(value) for value in (86400 * 34, 3600 * 2.5, 930, 40)] == [
        "34.0 days", "2.5 hours", "15.5 minutes", "40.0 s",
    ]  # fmt: skip


def test_plain_tables_align_numbers_to_the_right():
    assert plain_table(["name", "size"], [["a", "5"], ["bcd", "12"]], "title") == (
        "title\nname  size\na        5\nbcd     12"
    )


def test_a_layout_in_a_line(prediction):
    assert layout_told(prediction.estimate.config) == "data 4, pipeline 2, tensor 2, 1f1b, micro-batch 1"
    assert layout_told(parse([])) == "one rank, micro-batch 1"


def browser_path():
    named = os.environ.get("MEGAPIPE_BROWSER")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_the_page_of_a_search_fits_a_narrow_window(capsys, tmp_path):
    """Its tables and pictures scroll by themselves, and the command is there as a whole."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `test`)")
    if browser_path() is None:
        pytest.skip("no Chromium on PATH and MEGAPIPE_BROWSER is not set")
    path = tmp_path / "report.html"
    output(capsys, "search", *LAYOUT, "--tokens=3e9", "--html", str(path))
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 420, "height": 900})
        page.goto(path.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        picture = page.evaluate("document.querySelector('.plan svg').getBoundingClientRect().width")
        command = page.evaluate("(pre => pre.scrollWidth - pre.clientWidth)(document.querySelector('.plan pre'))")
        notes = page.inner_text("section.plan:has(h3:text-is('Notes'))")
        browser.close()
    assert width <= 420
    assert picture >= 600
    assert command <= 0
    assert "3B tokens: " in notes


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_tells_what_is_pointed_at_and_fits_its_window(capsys, tmp_path, scheme):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `test`)")
    if browser_path() is None:
        pytest.skip("no Chromium on PATH and MEGAPIPE_BROWSER is not set")
    path = tmp_path / "report.html"
    output(capsys, "predict", *LAYOUT, "--html", str(path))
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        problems, asked = [], []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        x, y = page.evaluate(
            """() => { const bar = bars.find(bar => bar.rank === 1 && bar.text.startsWith('BACKWARD')),
            box = timeline.getBoundingClientRect();
            return [box.left + (xOf(bar.start) + xOf(bar.end)) / 2, box.top + yOf(bar) + 8]; }"""
        )
        page.mouse.move(x, y)
        told = page.inner_text("#tooltip")
        paper = page.evaluate("getComputedStyle(document.querySelector('.plan-paper')).fill")
        width = page.evaluate("document.documentElement.scrollWidth")
        overlaps = page.evaluate(
            """() => [...document.querySelectorAll('.plan svg')].flatMap(svg => {
            const boxes = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
            return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 3 && b.top < a.bottom - 3)); }).length"""
        )
        browser.close()
    assert problems == []
    assert asked == [path.as_uri()]
    assert "backward" in told
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(23, 28, 36)"}[scheme]
    assert width <= 1280
    assert overlaps == 0
