"""What `--html` and `--pictures` write."""

from collections.abc import Sequence
from pathlib import Path

from megapipe.config.errors import ConfigError
from megapipe.config.words import bytes_told, seconds_told
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.command.arguments import Request
from megapipe.planner.command.launch import write_text
from megapipe.planner.command.planning import run_told
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import Prediction, estimate
from megapipe.planner.report.breakdown import Row, draw_breakdown
from megapipe.planner.report.memory import draw_memory
from megapipe.planner.report.page import PageSection, command_html, draw_page, lines_html, table_html
from megapipe.planner.report.pareto import draw_pareto
from megapipe.planner.report.words import figures_cells, layout_cells, layout_told
from megapipe.planner.search.findings import Findings
from megapipe.schedules.drawing import draw_svg

DRAWN_RANKS, DRAWN_MICROBATCHES = 16, 64
"""Largest schedule whose still picture can be read."""


def write_prediction(request: Request, hardware: Hardware, prediction: Prediction, notes: Sequence[str]) -> None:
    """The report of one layout, where a flag asks for it. notes: what the command prints beside the figures."""
    rows = [Row("this layout", prediction.estimate)]
    _write(request, hardware, prediction, {"breakdown": draw_breakdown(rows)}, _notes(notes))


def write_search(
    request: Request,
    hardware: Hardware,
    prediction: Prediction,
    findings: Findings,
    command: str,
    notes: Sequence[str],
) -> None:
    """The report of a search. prediction: of the best layout. command: that starts it. notes: as above.

    Layouts are compared by their estimates, as in a search.
    """
    found = findings.best
    best = estimate(found.config, hardware, node_order=found.node_order)
    others = [
        Row(each.name, each.estimate)
        for each in findings.alternatives
        if each.estimate is not None and layout_told(each.estimate.config) != layout_told(best.config)
    ]
    pictures = {
        "breakdown": draw_breakdown([Row("best", best), *others], "Estimated time of a step, by term"),
        "pareto": draw_pareto([each.estimate for each in findings.pareto], best.memory_limit),
    }
    ranked = [layout_cells(each.config) | figures_cells(each.estimate) for each in findings.ranked]
    _write(
        request,
        hardware,
        prediction,
        pictures,
        [
            *_notes(notes),
            PageSection("The best layouts", table_html(list(ranked[0]), [list(each.values()) for each in ranked])),
            PageSection(
                "Why others lose",
                table_html(["layout", "why"], [[each.name, each.reason] for each in findings.alternatives]),
            ),
            PageSection("To start it, on every node", command_html(command)),
        ],
    )


def _notes(lines: Sequence[str]) -> list[PageSection]:
    return [PageSection("Notes", lines_html(lines))] if lines else []


def _write(
    request: Request, hardware: Hardware, prediction: Prediction, pictures: dict[str, str], extra: list[PageSection]
) -> None:
    html, folder, answer = request.flags["html"], request.flags["pictures"], prediction.estimate
    pictures = {"memory": draw_memory(answer), **pictures}
    if folder is not None:
        header = prediction.schedule.header
        if header.num_ranks <= DRAWN_RANKS and header.num_microbatches <= DRAWN_MICROBATCHES:
            pictures["timeline"] = draw_svg(prediction.simulation)
        _write_pictures(folder, pictures)
    if html is not None:
        page = draw_page(
            f"{run_told(answer.config, hardware, answer.world_size)}: {layout_told(answer.config)}",
            _figures(answer),
            prediction.simulation,
            [*_sections(hardware, answer, pictures), *extra],
        )
        write_text(html, page)


def _write_pictures(folder: Path, pictures: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}; choose another folder") from None
    for name, picture in pictures.items():
        write_text(folder / f"{name}.svg", picture)


def _figures(answer: Estimate) -> Sequence[tuple[str, str, str]]:
    cells = figures_cells(answer)
    return [
        ("a step", cells["step"], "seconds of one optimizer step"),
        ("tokens/s", f"{answer.tokens_per_second:,.0f}", "of all devices together"),
        ("tokens/s/device", cells["tokens/s/device"], "of one device"),
        ("TFLOP/s/device", cells["TFLOP/s/device"], "of the model, without recomputation"),
        (
            "fullest rank",
            bytes_told(answer.tightest_bytes),
            f"of {bytes_told(answer.memory_limit)}; fits: {cells['fits']}",
        ),
    ]


def _sections(hardware: Hardware, answer: Estimate, pictures: dict[str, str]) -> list[PageSection]:
    terms = [
        [term.name, seconds_told(term.seconds), f"{term.seconds / answer.step_seconds:.1%}", term.source]
        for term in answer.terms
    ]
    found = [
        PageSection(
            "Memory",
            pictures["memory"],
            "Weights, gradients, optimizer state and message slots exist between steps too; activations and buffers "
            "are the peak of a step. Point at a part to see its size.",
        ),
        PageSection("Time", pictures["breakdown"], run_told(answer.config, hardware, answer.world_size)),
    ]
    if "pareto" in pictures:
        found.append(
            PageSection(
                "Speed against memory",
                pictures["pareto"],
                "Layouts that no other layout beats in both speed and memory. Their speeds are estimates, as the "
                "search compares them; the figures at the top are those of the simulated schedule.",
            )
        )
    found.append(PageSection("Terms of a step", table_html(["term", "time", "of the step", "source"], terms)))
    return found
