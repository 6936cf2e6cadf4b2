"""`predict`, `explain` and `compare`: step time and memory of given layouts."""

import json
from collections.abc import Sequence

from megapipe.config.command_line import bytes_text, seconds_text
from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.validation import run_problems
from megapipe.planner.command.main import Request
from megapipe.planner.command.planning import (
    check_fields,
    check_folders,
    figures_cells,
    layout_cells,
    layout_text,
    planned_config,
    priced,
    print_cells,
    run_told,
    terms_cells,
    training_facts,
)
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import Prediction, estimate, explain_stages, predict
from megapipe.planner.recompute import resolved

PHASES = (
    "forward", "backward_input", "backward_weight", "recompute", "tensor", "context", "update", "reduction", "gather",
)  # fmt: skip
"""Times of a stage that `explain` prints."""


def run_predict(request: Request) -> int:
    """Print the step time and the memory of one layout."""
    check_folders(request.flags["html"])
    hardware, prediction, remarks = _prediction(request)
    answer = prediction.estimate
    facts, training_lines = training_facts(request, answer, hardware)
    if request.flags["html"] is not None or request.flags["pictures"] is not None:
        from megapipe.planner.command.reports import write_prediction  # imported only if something is drawn

        write_prediction(request, hardware, prediction, [*remarks, *training_lines])
    if request.flags["json"]:
        print(json.dumps(answer.as_json() | facts | {"remarks": remarks}, indent=2))
        return 0
    _print_head(answer, hardware, remarks)
    print()
    print_cells([figures_cells(answer)])
    print()
    print_terms(answer)
    print()
    print_memory(answer)
    for line in training_lines:
        print(f"\n{line}")
    return 0


def run_explain(request: Request) -> int:
    """Print the step time and the memory of one layout, with the source of each term and the costs of each stage."""
    hardware, prediction, remarks = _prediction(request)
    answer = prediction.estimate
    stages = explain_stages(answer.config, hardware)
    closed = estimate(answer.config, hardware)
    if request.flags["json"]:
        figures = answer.as_json() | {
            "closed_form": closed.as_json(),
            "stages": [vars(each) for each in stages],
            "memory": [vars(each) for each in answer.memory],
            "remarks": remarks,
        }
        print(json.dumps(figures, indent=2))
        return 0
    _print_head(answer, hardware, remarks)
    print(f"\nsimulated step: {seconds_text(answer.step_seconds)}")
    print_terms(answer)
    print(f"\nestimate, as a search uses it: {seconds_text(closed.step_seconds)}")
    print_terms(closed)
    print()
    rows = [
        {"stage": str(each.stage), "rank": str(each.rank), "layers": _layers(each.layers)}
        | {name.replace("_", " "): seconds_text(getattr(each, name)) for name in PHASES}
        for each in stages
    ]
    print_cells(rows, "times of each stage: per micro-batch; update, reduction and gather per step")
    print()
    print_memory(answer)
    return 0


def _print_head(answer: Estimate, hardware: Hardware, remarks: Sequence[str]) -> None:
    print(run_told(answer.config, hardware, answer.world_size))
    print(f"layout: {layout_text(answer.config)}")
    for remark in remarks:
        print(f"note: {remark}")


def run_compare(request: Request) -> int:
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
        print(json.dumps([{"file": name} | estimate.as_json() for name, estimate in rows], indent=2))
        return 0
    print_cells([{"file": name} | layout_cells(each.config) | figures_cells(each) for name, each in rows])
    terms = list(dict.fromkeys(term.name for _, each in rows for term in each.terms))
    print()
    times = [{"file": name} | {term: seconds_text(each.seconds_of(term)) for term in terms} for name, each in rows]
    print_cells(times, "seconds of a step")
    return 0


def print_terms(answer: Estimate) -> None:
    """Print the terms of a step's time and the source of each."""
    print_cells(terms_cells(answer))


def print_memory(answer: Estimate) -> None:
    """Print the memory of a rank at each pipeline coordinate."""
    names = ("weights", "master", "gradients", "moments", "activations", "buffers", "messages", "temporaries", "total")
    same_limits = len(set(answer.memory_limits)) == 1
    rows = [
        {"coordinate": str(place)} | {name: bytes_text(getattr(memory, name)) for name in names}
        for place, memory in enumerate(answer.memory)
    ]
    limit = f"a device has {bytes_text(answer.memory_limit)}"
    if not same_limits:
        limit = "device: memory of the smallest device at the coordinate"
        rows = [row | {"device": bytes_text(each)} for row, each in zip(rows, answer.memory_limits, strict=True)]
    print_cells(rows, f"memory of a rank by pipeline coordinate; {limit}")


def check_run(config: PretrainConfig, devices: int) -> None:
    """Raise ConfigError with every rule that a run breaks."""
    check_fields(config)
    problems = run_problems(config, devices)
    if problems:
        raise ConfigError(problems)


def _prediction(request: Request) -> tuple[Hardware, Prediction, list[str]]:
    hardware = priced(request.hardware(), request.flags.get("price_per_hour"))
    prediction, remarks = _predict(request, hardware)
    return hardware, prediction, remarks


def _predict(request: Request, hardware: Hardware) -> tuple[Prediction, list[str]]:
    devices = request.devices()
    hardware.nodes(devices)  # raises ConfigError if the machine has fewer devices
    config, remarks = planned_config(request, hardware)
    check_run(config, devices)
    choice = resolved(config, hardware, devices)
    remarks += [] if choice.remark is None else [choice.remark]
    return predict(choice.config, hardware, world_size=devices), remarks


def _layers(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
