"""The commands `predict`, `explain` and `compare` of given layouts, `search` of the best ones, and `fit` of a machine.

`search` prints why other layouts are slower; `fit` prints the errors of predictions that remain.
"""

import gc
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megapipe.config import ConfigError
from megapipe.config.command_line import bytes_text, check_folders, progress_bar, seconds_text, write_text
from megapipe.config.load import parse_as
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, written
from megapipe.layout.validation import run_problems
from megapipe.planner.command.main import NO_DATA, Request, with_name
from megapipe.planner.command.planning import (
    config_yaml,
    figures_cells,
    layout_cells,
    layout_text,
    measured_times,
    planned_config,
    priced,
    print_cells,
    print_table,
    provenance,
    run_line,
    terms_cells,
    training_facts,
)
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import Prediction, estimate, explain_stages, predict
from megapipe.planner.fitting import FitResult, find_table, fit, fit_table, read_rows, report_lines
from megapipe.planner.papers.galvatron import per_layer
from megapipe.planner.papers.pipedream import partition_plan, two_buffered_plan
from megapipe.planner.recompute import limited, resolved
from megapipe.planner.search.findings import Findings, PlannedLayout
from megapipe.planner.search.plan import Effort, search
from megapipe.planner.search.space import SearchSpace
from megapipe.spec.model_folder import with_model_folders


def run_predict(request: Request) -> None:
    """Print the step time and the memory of one layout."""
    check_folders(request.flags["html"], folder=request.flags["pictures"])
    hardware = priced(request.hardware(), request.flags["price_per_hour"])
    prediction, remarks = _predict(request, hardware)
    answer = prediction.estimate
    facts, training_lines = training_facts(request, answer, hardware)
    if request.flags["html"] is not None or request.flags["pictures"] is not None:
        from megapipe.planner.command.reports import write_prediction  # imported only if something is drawn

        with progress_bar("drawing"):
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
        memory = [each._asdict() for each in answer.memory]
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
    if not request.flags["files"]:
        raise ConfigError("FILE is missing; name one configuration for each layout to compare")
    hardware = request.hardware()
    rows: list[tuple[str, Estimate]] = []
    problems: list[str] = []
    for file in request.flags["files"]:
        try:
            rows.append((file, _predict(request.for_file(file), hardware)[0].estimate))
        except ConfigError as error:
            problems += with_name(file, error.problems)
    if problems:
        raise ConfigError(problems)
    rows.sort(key=lambda row: (not row[1].fits, -row[1].config.batch.global_size / row[1].step_seconds))
    if request.flags["json"]:
        print(json.dumps([{"file": name} | each.as_json() for name, each in rows], indent=2))
        return
    if any(each.config.model != rows[0][1].config.model for _, each in rows):
        print("note: the models differ, so the differences are not those of layouts alone")
    print_cells([{"file": name} | layout_cells(each.config) | figures_cells(each) for name, each in rows])
    terms = list(dict.fromkeys(term.name for _, each in rows for term in each.terms))
    print()
    times = [{"file": name} | {term: seconds_text(each.seconds_of(term)) for term in terms} for name, each in rows]
    print_cells(times, "seconds of a step")


def print_memory(answer: Estimate) -> None:
    """Print the memory of a rank at each pipeline coordinate, after an empty line."""
    rows = [
        {"coordinate": str(place)} | {name: bytes_text(size) for name, size in parts.items()}
        for place, parts in enumerate(memory._asdict() | {"total": memory.total} for memory in answer.memory)
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
    config, remark = resolved(config, hardware, devices)
    remarks += [] if remark is None else [remark]
    with progress_bar("simulating a step"):
        return predict(config, hardware, world_size=devices), remarks


OUTPUT_NAME = "plan.yaml"
"""File name in the printed command if no file was written."""
PUBLISHED = {
    "per_layer": ("Galvatron's planner", per_layer),
    "two_buffered": ("PipeDream-2BW's planner", two_buffered_plan),
    "partition": ("PipeDream's partitioner", partition_plan),
}
"""Published planners and their names, by flag."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector: objects of a search live until its end, and scanning them would take a
    tenth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@_uncollected()
def run_search(request: Request) -> None:
    """Print the result of a search, and write the files that flags request."""
    flags = request.flags
    check_folders(flags["html"], flags["write_config"], folder=flags["pictures"])
    hardware = priced(_machine(request), flags["price_per_hour"])
    config, remarks = planned_config(request, hardware, layout_open=True)
    pinned = request.given
    if config.recompute.method == "auto":
        pinned -= {"recompute.method"}
        config, hardware = limited(config, hardware)
        remarks.append(
            "recompute.method auto: the search also chooses the method, and the "
            "memory limit of a device is the budget of recompute.method auto"
        )
    findings = _findings(request, config, hardware, pinned)
    best = findings.best
    facts, lines = training_facts(request, best.estimate, hardware)
    file = str(flags["write_config"] or OUTPUT_NAME)
    command = _start_command(best.config, hardware, best.estimate.world_size, file)
    if flags["html"] is not None or flags["pictures"] is not None:
        times = measured_times(hardware, best.estimate.world_size)
        prediction = predict(best.config, hardware, times=times, node_order=best.node_order)
        prediction = replace(prediction, estimate=best.estimate)  # the table's figures
        from megapipe.planner.command.reports import write_search  # imported only if something is drawn

        with progress_bar("drawing"):
            write_search(request, hardware, prediction, findings, command, [*remarks, *lines])
    if flags["write_config"] is not None:
        write_text(flags["write_config"], _config_text(hardware, best, command))
    advice: dict[str, Any] = {}
    for flag, (name, plan) in PUBLISHED.items():
        if flags[flag]:
            with progress_bar(f"asking {name}") as report:
                try:
                    advice[flag] = plan(best.config, hardware, best.estimate.world_size, report)
                except ConfigError as error:  # the search has an answer, which must not be lost
                    advice[flag] = {"error": str(error)}
    if flags["json"]:
        more = {"advice": advice, "launch": command, **facts, "remarks": remarks}
        print(json.dumps(best.as_json() | more | {"search": findings.as_json()}, indent=2))
        return
    notes = (f"note: {remark}" for remark in remarks)
    print(run_line(best.config, hardware, best.estimate.world_size), *notes, sep="\n")
    print_findings(findings, flags["top"])
    print("\nthe best layout:")
    print_cells(terms_cells(best.estimate))
    print_memory(best.estimate)
    if best.node_order is not None:
        print("\norder of the nodes, chosen by measured links:", *best.node_order)
    print_advice(advice)
    for line in lines:
        print(f"\n{line}")
    _print_start(request, hardware, best, command)


def _findings(request: Request, config: PretrainConfig, hardware: Hardware, pinned: frozenset[str]) -> Findings:
    """Run the search that the flags describe, with a progress bar."""
    flags, devices, names = request.flags, request.devices(), request.flags["schedules"]
    space = SearchSpace() if names is None else SearchSpace(schedules=tuple(names.split(",")), other_schedules=())
    models, times, effort = _models(request), measured_times(hardware, devices), Effort(keep=flags["top"])
    options = {"objective": flags["objective"], "space": space, "tokens": flags["tokens"], "models": models}
    with progress_bar("searching layouts") as report:
        return search(config, hardware, devices, pinned, **options, times=times, effort=effort, report=report)


def print_findings(findings: Findings, top: int) -> None:
    """Print the ranked layouts of a search, the trials that it compared, and why other layouts are slower."""
    counts = f"{findings.layouts:,} layouts, of which {findings.examined:,} were estimated"
    print(f"\n{counts} and the others ruled out by lower bounds")
    ranked = enumerate(findings.ranked[:top], start=1)
    rows = [{"": str(at)} | layout_cells(each.config) | _figures(each) for at, each in ranked]
    if all(row["context"] == "1" for row in rows):
        for row in rows:
            del row["context"]
    print_cells(rows)
    if any(each.simulated for each in findings.ranked[:top]):
        print("(*: time from a simulation of the schedule, others: estimates)")
    if findings.trials:
        print()
        trials = [[each.name, "-" if each.layout is None else f"{each.value:,.4g}"] for each in findings.trials]
        print_table(["compared", _COMPARED[findings.objective]], trials)
    hints = (f"hint: {hint}" for hint in findings.hints)
    print(f"not searched: {'; '.join(findings.not_searched)}", *hints, sep="\n")
    if findings.alternatives:
        others = (f"  {each.name}: {each.reason}" for each in findings.alternatives)
        print("\nalternatives:", *others, sep="\n")


_COMPARED = {"speed": "tokens per second", "cost": "price of a million tokens", "time": "days", "size": "parameters"}


def _figures(layout: PlannedLayout) -> dict[str, str]:
    cells = figures_cells(layout.estimate)
    if layout.simulated:
        cells["step"] += " *"
    del cells["fits"]
    return cells | ({} if layout.price is None else {"price/M tokens": f"{layout.price:.4g}"})


def _machine(request: Request) -> Hardware:
    """Return the machine of a search.

    Raises ConfigError, which names everything that is missing. A search needs --devices, because it chooses the sizes
    of the layout that are not given.
    """
    missing = []
    if request.flags["devices"] is None:
        missing.append("--devices is missing; set it to the number of devices to use")
    if "batch.global_size" not in request.given:
        missing.append("--batch.global_size is missing; set it to the samples per step")
    try:
        hardware = request.hardware()
    except ConfigError as error:
        raise ConfigError([*error.problems, *missing]) from error
    if missing:
        raise ConfigError(missing)
    return hardware


def _models(request: Request) -> list[tuple[str, ModelConfig]]:
    """Return the models to try with objective size. Raises ConfigError if models are given with another objective."""
    files, objective = request.flags["models"], request.flags["objective"]
    if files is None:
        return []
    if objective != "size":
        raise ConfigError(
            "--models needs --objective size, but the objective is "
            f"{objective}; set --objective size, or leave --models out"
        )
    try:
        flags = {Path(file).stem: with_model_folders(["--model", file]) for file in files}
        return [(name, parse_as(request.kind, words).model) for name, words in flags.items()]
    except ConfigError as error:
        raise ConfigError([problem.replace("--model ", "--models ", 1) for problem in error.problems]) from None


def _config_text(hardware: Hardware, best: PlannedLayout, command: str) -> str:
    """Return the configuration file of a layout, with comments on its origin and on the command that starts it."""
    estimate, step = best.estimate, seconds_text(best.estimate.step_seconds)
    return (
        f"# Planned for {estimate.world_size:,} devices of {hardware.name}: {step} a step, "
        f"{estimate.tokens_per_second:,.0f} tokens/s, predicted; {provenance(hardware)}.\n"
        f"# Start on every node: {command}\n{config_yaml(best.config)}"
    )


def _start_command(config: PretrainConfig, hardware: Hardware, devices: int, file: str) -> str:
    """Return the command to run on every node; $HEAD_NODE is one of several (examples/launch/several_nodes.sh)."""
    nodes = hardware.nodes(devices)
    where = f"-n {min(devices, nodes[0].devices_per_node)}"
    if len(nodes) > 1:
        where += f" --nodes {len(nodes)} --rendezvous $HEAD_NODE:29500"
    kind = f" --kind {config.kind}" if config.kind != PretrainConfig.kind else ""
    data = f" --data.prefix {NO_DATA}" if not config.data.prefixes[0] else ""
    return f"megapipe train {where}{kind} --config {shlex.quote(file)}{data}"


def _print_start(request: Request, hardware: Hardware, best: PlannedLayout, command: str) -> None:
    file, devices = request.flags["write_config"], best.estimate.world_size
    sizes = [node.devices_per_node for node in hardware.nodes(devices)]
    wrote, add = (f"wrote {file}; ", "") if file else ("", f"add --write_config {OUTPUT_NAME}, then ")
    everywhere = " on every node" if len(sizes) > 1 else ""
    print(f"\n{wrote}to train with it, {add}run{everywhere}\n  {command}")
    if not best.config.data.prefixes[0]:
        print(f"  ({NO_DATA}: path of the shard that megapipe preprocess printed)")
    if len(sizes) > 1 and (sum(sizes) != devices or len(set(sizes)) > 1):
        # One command cannot express that nodes run different numbers of ranks.
        ranks = ", ".join(map(str, [*sizes[:-1], devices - sum(sizes[:-1])]))
        print(f"  nodes run {ranks} ranks: set -n on each node accordingly")


def print_advice(advice: Mapping[str, Any]) -> None:
    """Print the plans of `PUBLISHED` planners that flags request, or why a planner has none."""
    print(*(f"\n{plan['error']}\n" for plan in advice.values() if "error" in plan), sep="", end="")
    advice = {flag: plan for flag, plan in advice.items() if "error" not in plan}
    if "per_layer" in advice:
        plan = advice["per_layer"]
        print(f"\n{plan['source']}: {seconds_text(plan['step_time_s'])} per step by its model; {plan['note']}")
        for number, stage in enumerate(plan["stages"]):
            print(f"  stage {number}, {bytes_text(stage['memory_bytes'])}: {'; '.join(_runs(stage['layers']))}")
    if "two_buffered" in advice:
        plan = advice["two_buffered"]
        words = {name: each if isinstance(each, str) else json.dumps(each) for name, each in plan["settings"].items()}
        settings = " ".join(f"--{name} {shlex.quote(word)}" for name, word in words.items())
        print(
            f"\n{plan['source']}: depth {plan['depth']}, width {plan['width']}, "
            f"micro-batch {plan['micro_size']}, {bytes_text(plan['memory_bytes'])}, "
            f"{seconds_text(plan['step_time_s'])} per step by its model\n"
            f"  to train with it, add to the best layout: {settings}"
        )
    if "partition" in advice:
        plan = advice["partition"]
        print(
            f"\n{plan['source']}: {plan['tokens_per_s']:,.0f} tokens/s with {plan['in_flight']} "
            f"micro-batch{'es' if plan['in_flight'] > 1 else ''} in flight, by its model, which ignores memory; "
            "megapipe trains it if it fits and all stages have the same number of replicas"
        )
        for number, stage in enumerate(plan["stages"]):
            print(f"  stage {number}: {' to '.join(dict.fromkeys(stage['layers']))}, {stage['replicas']} replicas")


def _runs(layers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one text for each group of neighbouring layers with the same strategy."""
    for strategy, members in groupby(layers, key=_strategy_text):
        names = [each["name"] for each in members]
        yield f"{names[0] if len(names) == 1 else f'{names[0]} to {names[-1]}'}: {strategy}"


def _strategy_text(layer: Mapping[str, Any]) -> str:
    methods = ("data", "sharded_data", "tensor")
    parts = [f"{name.replace('_', ' ')} {layer[name]}" for name in methods if layer[name] > 1]
    parts = parts or ["one rank"]
    return ", ".join([*parts, "recompute"] if layer["recompute"] else parts)


def run_fit(request: Request) -> None:
    """Fit a machine, print every row with its prediction, and write the machine to --output."""
    flags = request.flags
    check_folders(flags["output"])
    result, title, unit = _fit(request)
    if flags["output"] is not None:
        write_text(flags["output"], written(result.hardware, f"Efficiency fitted by megapipe plan fit: {title}."))
    if flags["json"]:
        print(json.dumps(result.as_json(), indent=2))
        return
    print(title, *report_lines(result, unit), sep="\n")
    if flags["output"] is not None:
        print(f"wrote {flags['output']}; use it with --hardware {flags['output']}")


def _fit(request: Request) -> tuple[FitResult, str, str]:
    """Return the result, its title, and the unit of its speeds."""
    flags = request.flags
    if (flags["published"] is None) == (flags["rows"] is None):
        raise ConfigError("pass either --published NAME, or --rows FILE with your own rows")
    if (file := flags["rows"]) is not None:
        hardware = request.hardware()  # before the file is read
        return fit(read_rows(file), hardware), f"rows of {file}", "tokens/s"
    table = find_table(flags["published"])
    if flags["hardware"] is not None:
        raise ConfigError(
            f"--hardware {flags['hardware']} can only be used with --rows, because "
            f"the published rows were measured on {table.hardware}; leave it out"
        )
    return fit_table(table.name), table.title, "TFLOP/s"
