"""The report's pictures hold what was estimated, and the page works in a browser, light and dark."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

from megapipe.config.command_line import bytes_text, duration_text, seconds_text
from megapipe.config.load import parse
from megapipe.layout.hardware.description import load_hardware
from megapipe.planner.command.planning import layout_text, plain_table
from megapipe.planner.command.reports import (
    DARK,
    LIMIT,
    MOST_BARS,
    as_svg,
    breakdown_figure,
    draw_page,
    memory_figure,
    pareto_figure,
    section_html,
)
from megapipe.planner.cost.estimate import RankMemory
from megapipe.planner.cost.model import predict
from tests.planner.command.plan import LAYOUT, output
from tests.support.browser import open_page

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def prediction():
    flags = [each for each in LAYOUT if "hardware" not in each and "devices" not in each]
    config = parse([*flags, "--training.precision=bf16"])
    return predict(config, load_hardware("a100-80"), world_size=16)


def bars_of(figure):
    """Return (left, width, note) of every bar that has a note."""
    return [
        (bar.get_x(), bar.get_width(), bar.get_gid().removeprefix("note: "))
        for bar in figure.axes[0].patches
        if bar.get_gid() is not None
    ]


def notes_of(picture):
    return [each.text for each in ElementTree.fromstring(picture).iter(f"{SVG}title")]


def test_memory_bars_are_in_proportion_to_bytes(prediction):
    answer = prediction.estimate
    bars = bars_of(memory_figure(answer))
    for place, memory in enumerate(answer.memory):
        parts = [(left, width) for left, width, note in bars if note.startswith(f"stage {place}: ")]
        assert sum(width for _, width in parts) == pytest.approx(memory.total / 1e9)
        assert parts == [
            (pytest.approx(sum(width for _, width in parts[:i])), each[1]) for i, each in enumerate(parts)
        ]
    assert any(note.endswith(f"weights {bytes_text(answer.memory[0].weights)}") for *_, note in bars)
    assert set(notes_of(as_svg(memory_figure(answer)))) == {note for _, width, note in bars if width}


def test_overfull_ranks_exceed_the_line_of_their_device(prediction):
    half = prediction.estimate.peak_bytes / 2
    figure = memory_figure(replace(prediction.estimate, memory_limits=(half,) * len(prediction.estimate.memory)))
    (line,) = [each for each in figure.axes[0].lines if each.get_color() == LIMIT]
    right = max(left + width for left, width, _ in bars_of(figure))
    assert right == pytest.approx(2 * line.get_xdata()[0])
    assert figure.axes[0].get_xlim() == (0, pytest.approx(right))


def test_terms_of_a_step_fill_its_bar(prediction):
    answer = prediction.estimate
    slower = replace(answer, step_seconds=2 * answer.step_seconds)
    layouts = {"best": answer, "other <&>": slower}
    bars = bars_of(breakdown_figure(layouts, "title"))
    best = sum(width for _, width, note in bars if note.startswith("best: "))
    other = sum(width for _, width, note in bars if note.startswith("other <&>: "))
    assert best == pytest.approx(other)  # the same terms; the other's step is said to be twice as long
    assert best == pytest.approx(sum(term.seconds for term in answer.terms))
    assert {note.split(": ")[1].split()[0] for *_, note in bars} == {
        term.name for term in answer.terms if term.seconds
    }
    assert any(note.startswith("other <&>: ") for note in notes_of(as_svg(breakdown_figure(layouts))))
    tight = replace(answer, memory_limits=(1e9,) * len(answer.memory))
    assert "too large by " in as_svg(breakdown_figure({"tight": tight}))
    assert "too large by " not in as_svg(breakdown_figure({"best": answer}))


def test_the_front_has_a_disc_for_each_layout(prediction):
    answer = prediction.estimate
    front = [
        replace(answer, step_seconds=answer.step_seconds * (1 + index / 5), memory=(RankMemory(part, 0, 0, 0, 0, 0),))
        for index, part in enumerate((60_000_000_000, 59_900_000_000, 20_000_000_000))
    ]
    figure = pareto_figure(front, 80e9)
    discs = figure.axes[0].collections
    assert [tuple(disc.get_offsets()[0]) for disc in discs] == [
        (each.peak_bytes / 1e9, each.tokens_per_second) for each in front
    ]
    assert [note.partition(":")[0] for note in notes_of(as_svg(figure))] == ["1", "2", "3"]
    assert [to_hex(disc.get_facecolor()[0]) == LIMIT for disc in discs] == [True, False, False]


def test_discs_have_numbers_unless_another_numbered_disc_is_near(prediction):
    """A disc's radius is about 9 pixels: the second one would cover the first, the third only the second."""
    front = [
        replace(prediction.estimate, step_seconds=1.0, memory=(RankMemory(part, 0, 0, 0, 0, 0),))
        for part in (60_000_000_000, 58_500_000_000, 57_000_000_000)
    ]
    axes = pareto_figure(front, 80e9).axes[0]
    assert {text.get_text() for text in axes.texts if text.get_weight() == "bold"} == {"1", "3"}
    assert "Speed against memory" in axes.figure.texts[0].get_text()


def test_pictures_follow_the_colors_of_the_page(prediction):
    picture = as_svg(memory_figure(prediction.estimate))
    style, _, rest = picture.partition("</style>")
    assert "prefers-color-scheme: dark" in style
    for color in DARK:
        assert f"{color};" in style
        assert color not in rest
    assert picture == as_svg(memory_figure(prediction.estimate))
    assert "Date" not in picture


def test_long_fronts_are_cut_with_a_word(prediction):
    front = [replace(prediction.estimate, step_seconds=1.0 + index) for index in range(20)]
    assert "and 8 slower ones" in as_svg(pareto_figure(front, 80e9))


def test_a_long_schedule_is_drawn_for_some_ranks(prediction, monkeypatch):
    monkeypatch.setattr("megapipe.planner.command.reports.MOST_BARS", 10)
    page = draw_page("title", [], prediction.simulation, [])
    assert '"label":"stage 0"' in page
    assert '"label":"stage 1"' not in page
    assert MOST_BARS > 10


def test_words_are_escaped(prediction):
    page = draw_page("<b>", [], prediction.simulation, [section_html("a < b", "<p>body</p>", "c & d")])
    assert "<h3>a &lt; b</h3>" in page
    assert "<p>c &amp; d</p>" in page
    assert "<title>&lt;b&gt;</title>" in page


def test_numbers_are_printed_with_units():
    assert [bytes_text(value) for value in (512, 2e6, 79.96e9, 1.5e12)] == ["512 B", "2.0 MB", "80.0 GB", "1.5 TB"]
    assert [seconds_text(value) for value in (0, 2e-7, 1.8e-4, 0.0412, 3.0, 240.0, 2e4)] == [
        "0", "0.2 us", "180 us", "41.2 ms", "3.00 s", "240 s", "20,000 s",
    ]  # fmt: skip
    assert [duration_text(value) for value in (86400 * 34, 3600 * 2.5, 930, 40)] == [
        "34.0 days", "2.5 hours", "15.5 minutes", "40.0 s",
    ]  # fmt: skip


def test_plain_tables_align_numbers_to_the_right():
    assert plain_table(["name", "size"], [["a", "5"], ["bcd", "12"]], "title") == (
        "title\nname  size\na        5\nbcd     12"
    )


def test_a_layout_in_a_line(prediction):
    assert layout_text(prediction.estimate.config) == "data 4, pipeline 2, tensor 2, 1f1b, micro-batch 1"
    assert layout_text(parse([])) == "one rank, micro-batch 1"


@pytest.mark.slow
def test_the_page_of_a_search_fits_a_narrow_window(tmp_path):
    """Its tables and pictures scroll by themselves, and the command is there as a whole."""
    path = tmp_path / "report.html"
    output("search", *LAYOUT, "--tokens=3e9", "--html", str(path))
    with open_page(path, 420, 900) as page:
        width = page.evaluate("document.documentElement.scrollWidth")
        picture = page.evaluate("document.querySelector('.plan svg').getBoundingClientRect().width")
        command = page.evaluate("(pre => pre.scrollWidth - pre.clientWidth)(document.querySelector('.plan pre'))")
        notes = page.inner_text("section.plan:has(h3:text-is('Notes'))")
    assert width <= 420
    assert picture >= 600
    assert command <= 0
    assert "3B tokens: " in notes


def test_the_page_has_tooltips_and_fits_its_window(tmp_path):
    path = tmp_path / "report.html"
    output("predict", *LAYOUT, "--html", str(path))
    with open_page(path, 1280, 900) as page:
        x, y = page.evaluate(
            """() => { const bar = bars.find(bar => bar.rank === 1 && bar.text.startsWith('BACKWARD')),
            box = timeline.getBoundingClientRect();
            return [box.left + (xOf(bar.start) + xOf(bar.end)) / 2, box.top + yOf(bar) + 8]; }"""
        )
        page.mouse.move(x, y)
        tooltip = page.inner_text("#tooltip")
        papers = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            papers.append(page.evaluate("getComputedStyle(document.querySelector('.plan-chart path')).fill"))
        width = page.evaluate("document.documentElement.scrollWidth")
        overlaps = page.evaluate(
            """() => [...document.querySelectorAll('.plan svg')].flatMap(svg => {
            const boxes = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
            return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 3 && b.top < a.bottom - 3)); }).length"""
        )
    assert "backward" in tooltip
    assert papers == ["rgb(255, 255, 255)", "rgb(23, 28, 36)"]
    assert width <= 1280
    assert overlaps == 0
