"""`predict`, `explain` and `compare`: step time and memory of given layouts."""

import json
from collections.abc import Sequence

from megapipe.config.command_line import bytes_text, seconds_text
from megapipe.config.errors import ConfigError
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.validation import run_problems
from megapipe.planner.command.main import Request
from megapipe.planner.command.planning import (
    check_folders,
    figures_cells,
    layout_cells,
    layout_text,
    planned_config,
    priced,
    print_cells,
    run_line,
    terms_cells,
    training_facts,
)
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import Prediction, estimate, explain_stages, predict
from megapipe.planner.recompute import resolved


def run_predict(request: Request) -> None:
    """Print the step time and the memory of one layout."""
    check_folders(request.flags["html"])
    hardware = priced(request.hardware(), request.flags["price_per_hour"])
    prediction, remarks = _predict(request, hardware)
    answer = prediction.estimate
    facts, training_lines = training_facts(request, answer, hardware)
    if request.flags["html"] is not None or request.flags["pictures"] is not None:
        from megapipe.planner.command.reports import write_prediction  # imported only if something is drawn

        write_prediction(request, hardware, prediction, [*remarks, *training_lines])
    if request.flags["json"]:
        print(json.dumps(answer.as_json() | facts | {"remarks": remarks}, indent=2))
        return
    _print_head(answer, hardware, remarks)
    print()
    print_cells([figures_cells(answer)])
    print()
    print_cells(terms_cells(answer))
    print_memory(answer)
    for line in training_lines:
        print(f"\n{line}")


def run_explain(request: Request) -> None:
    """Print the step time and the memory of one layout, with the source of each term and the costs of each stage."""
    hardware = request.hardware()
    prediction, remarks = _predict(request, hardware)
    answer = prediction.estimate
    stages = explain_stages(answer.config, hardware)
    closed = estimate(answer.config, hardware)
    if request.flags["json"]:
        memory = [vars(each) for each in answer.memory]
        additions = {"closed_form": closed.as_json(), "stages": stages, "memory": memory, "remarks": remarks}
        print(json.dumps(answer.as_json() | additions, indent=2))
        return
    _print_head(answer, hardware, remarks)
    print(f"\nsimulated step: {seconds_text(answer.step_seconds)}")
    print_cells(terms_cells(answer))
    print(f"\nestimate that a search uses: {seconds_text(closed.step_seconds)}")
    print_cells(terms_cells(closed))
    print()
    title = "times of each stage: per micro-batch; update, reduction and gather per step"
    print_cells([_stage_row(**costs) for costs in stages], title)
    print_memory(answer)


def _stage_row(stage: int, rank: int, layers: Sequence[str], **times: float) -> dict[str, str]:
    """Return the table cells of a stage, by column."""
    names = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
    cells = {name.replace("_", " "): seconds_text(seconds) for name, seconds in times.items()}
    return {"stage": str(stage), "rank": str(rank), "layers": names} | cells


def _print_head(answer: Estimate, hardware: Hardware, remarks: Sequence[str]) -> None:
    print(run_line(answer.config, hardware, answer.world_size))
    notes = (f"note: {remark}" for remark in remarks)
    print(f"layout: {layout_text(answer.config)}", *notes, sep="\n")


def run_compare(request: Request) -> None:
    """Print several configurations side by side, the fastest that fits first."""
    hardware = request.hardware()
    rows: list[tuple[str, Estimate]] = []
    problems: list[str] = []
    for file in request.flags["files"]:
        try:
            rows.append((file, _predict(request.for_file(file), hardware)[0].estimate))
        except ConfigError as error:
            problems += [problem if file in problem else f"{file}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    rows.sort(key=lambda row: (not row[1].fits, -row[1].config.batch.global_size / row[1].step_seconds))
    if request.flags["json"]:
        print(json.dumps([{"file": name} | each.as_json() for name, each in rows], indent=2))
        return
    print_cells([{"file": name} | layout_cells(each.config) | figures_cells(each) for name, each in rows])
    terms = list(dict.fromkeys(term.name for _, each in rows for term in each.terms))
    print()
    times = [{"file": name} | {term: seconds_text(each.seconds_of(term)) for term in terms} for name, each in rows]
    print_cells(times, "seconds of a step")


def print_memory(answer: Estimate) -> None:
    """Print the memory of a rank at each pipeline coordinate, after an empty line."""
    rows = [
        {"coordinate": str(place)} | {name: bytes_text(size) for name, size in parts.items()}
        for place, parts in enumerate(vars(memory) | {"total": memory.total} for memory in answer.memory)
    ]
    limit = f"a device has {bytes_text(answer.memory_limit)}"
    if len(set(answer.memory_limits)) > 1:
        limit = "device: memory of the smallest device at the coordinate"
        rows = [row | {"device": bytes_text(each)} for row, each in zip(rows, answer.memory_limits, strict=True)]
    print()
    print_cells(rows, f"memory of a rank by pipeline coordinate; {limit}")


def _predict(request: Request, hardware: Hardware) -> tuple[Prediction, list[str]]:
    devices = request.devices()
    hardware.nodes(devices)  # raises ConfigError if the machine has fewer devices
    config, remarks = planned_config(request, hardware)
    if problems := run_problems(config, devices):
        raise ConfigError(problems)
    choice = resolved(config, hardware, devices)
    remarks += [] if choice.remark is None else [choice.remark]
    return predict(choice.config, hardware, world_size=devices), remarks
