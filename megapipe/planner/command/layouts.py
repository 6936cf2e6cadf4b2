"""`predict`, `explain` and `compare`: layouts that are given."""

import json
from collections.abc import Sequence

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.config.words import bytes_told, seconds_told
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.validation import run_problems
from megapipe.planner.command.arguments import Request
from megapipe.planner.command.budget import check_tokens, priced, training_facts, training_told
from megapipe.planner.command.launch import check_folders
from megapipe.planner.command.planning import (
    check_fields,
    checkpoint_facts,
    checkpoint_told,
    planned_config,
    run_told,
)
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import Prediction, estimate, explain_stages, predict
from megapipe.planner.recompute_auto import resolved
from megapipe.planner.report.breakdown import Row
from megapipe.planner.report.table import print_table
from megapipe.planner.report.words import figures_cells, layout_cells, layout_told

PHASES = (
    "forward", "backward_input", "backward_weight", "recompute", "tensor", "context", "update", "reduction", "gather",
)  # fmt: skip
"""Times of a stage that `explain` prints."""


def run_predict(request: Request) -> int:
    """One layout's step time and memory."""
    check_folders(request.flags["html"])
    check_tokens(request.flags["tokens"])
    hardware, prediction, remarks = _prediction(request)
    answer = prediction.estimate
    facts = checkpoint_facts(request, answer.step_seconds)
    training = training_facts(request, answer, hardware)
    said = [
        *([training_told(training)] if training is not None else []),
        *([checkpoint_told(facts)] if facts is not None else []),
    ]
    if request.flags["html"] is not None or request.flags["pictures"] is not None:
        from megapipe.planner.command.reports import write_prediction  # what draws, where something is drawn

        write_prediction(request, hardware, prediction, [*remarks, *said])
    if request.flags["json"]:
        told = {"checkpoint": facts, "training": training, "remarks": remarks}
        print(json.dumps(answer.as_json() | told, indent=2))
        return 0
    print(run_told(answer.config, hardware, answer.world_size))
    print(f"layout: {layout_told(answer.config)}")
    for remark in remarks:
        print(f"note: {remark}")
    print()
    figures = figures_cells(answer)
    print_table(list(figures), [list(figures.values())])
    print()
    print_terms(answer)
    print()
    print_memory(answer)
    for line in said:
        print(f"\n{line}")
    return 0


def run_explain(request: Request) -> int:
    """The same with each term's source, and what each stage costs."""
    hardware, prediction, remarks = _prediction(request)
    answer = prediction.estimate
    stages = explain_stages(answer.config, hardware)
    closed = estimate(answer.config, hardware)
    if request.flags["json"]:
        told = answer.as_json() | {
            "closed_form": closed.as_json(),
            "stages": [vars(each) for each in stages],
            "memory": [vars(each) for each in answer.memory],
            "remarks": remarks,
        }
        print(json.dumps(told, indent=2))
        return 0
    print(run_told(answer.config, hardware, answer.world_size))
    print(f"layout: {layout_told(answer.config)}")
    for remark in remarks:
        print(f"note: {remark}")
    print(f"\nsimulated step: {seconds_told(answer.step_seconds)}")
    print_terms(answer)
    print(f"\nestimate, as a search uses it: {seconds_told(closed.step_seconds)}")
    print_terms(closed)
    print()
    rows = [
        [
            str(each.stage),
            str(each.rank),
            _layers(each.layers),
            *(seconds_told(getattr(each, name)) for name in PHASES),
        ]
        for each in stages
    ]
    columns = ["stage", "rank", "layers", *(name.replace("_", " ") for name in PHASES)]
    print_table(columns, rows, "times of each stage: per micro-batch; update, reduction and gather per step")
    print()
    print_memory(answer)
    return 0


def run_compare(request: Request) -> int:
    """Several configurations side by side, the fastest that fits first."""
    hardware = request.hardware()
    rows: list[Row] = []
    problems: list[str] = []
    for file in request.flags["files"]:
        try:
            rows.append(Row(file, _predict(request.for_file(file), hardware)[0].estimate))
        except ConfigError as error:
            problems += [problem if file in problem else f"{file}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    rows.sort(
        key=lambda row: (not row.estimate.fits, row.estimate.config.batch.global_size / row.estimate.step_seconds * -1)
    )
    if request.flags["json"]:
        print(json.dumps([{"file": name} | estimate.as_json() for name, estimate in rows], indent=2))
        return 0
    cells = [{"file": name} | layout_cells(each.config) | figures_cells(each) for name, each in rows]
    print_table(list(cells[0]), [list(each.values()) for each in cells])
    terms = list(dict.fromkeys(term.name for _, each in rows for term in each.terms))
    print()
    print_table(
        ["file", *terms],
        [[name, *(seconds_told(each.seconds_of(term)) for term in terms)] for name, each in rows],
        "seconds of a step",
    )
    return 0


def print_terms(answer: Estimate) -> None:
    """What a step's time is made of, and where each part comes from."""
    rows = [
        [term.name, seconds_told(term.seconds), f"{term.seconds / answer.step_seconds:.1%}", term.source]
        for term in answer.terms
    ]
    print_table(["term", "time", "of the step", "source"], rows)


def print_memory(answer: Estimate) -> None:
    """Memory by pipeline coordinate."""
    names = ("weights", "master", "gradients", "moments", "activations", "buffers", "messages", "temporaries", "total")
    alike = len(set(answer.memory_limits)) == 1
    rows = [
        [
            str(place),
            *(bytes_told(getattr(memory, name)) for name in names),
            *([] if alike else [bytes_told(answer.memory_limits[place])]),
        ]
        for place, memory in enumerate(answer.memory)
    ]
    limit = (
        f"a device has {bytes_told(answer.memory_limit)}"
        if alike
        else ("device: memory of the smallest device at the coordinate")
    )
    columns = ["coordinate", *names, *([] if alike else ["device"])]
    print_table(columns, rows, f"memory of a rank by pipeline coordinate; {limit}")


def check_run(config: PretrainConfig, devices: int) -> None:
    """Raise ConfigError with every rule that keeps a layout from running."""
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
    hardware.nodes(devices)  # tells of more devices than there are
    config, remarks = planned_config(request, hardware)
    check_run(config, devices)
    found = resolved(config, hardware, devices)
    remarks += [] if found.remark is None else [found.remark]
    return predict(found.config, hardware, world_size=devices), remarks


def _layers(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
