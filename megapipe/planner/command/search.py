"""`search`: the best layout of a model on a machine, the next ones, and why others lose."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megapipe.config.errors import ConfigError
from megapipe.config.load import parse_as
from megapipe.config.model import ModelConfig
from megapipe.config.progress import progress_bar
from megapipe.config.words import seconds_told
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.command.advice import advised, print_advice
from megapipe.planner.command.arguments import NO_DATA, Request
from megapipe.planner.command.budget import check_tokens, priced, training_facts, training_told
from megapipe.planner.command.launch import check_folders, launch_command, uneven_nodes, write_config
from megapipe.planner.command.layouts import print_memory, print_terms
from megapipe.planner.command.planning import (
    checkpoint_facts,
    checkpoint_told,
    measured_times,
    planned_config,
    provenance,
    run_told,
)
from megapipe.planner.cost.model import predict
from megapipe.planner.recompute_auto import limited
from megapipe.planner.report.table import print_table
from megapipe.planner.report.words import figures_cells, layout_cells
from megapipe.planner.search.findings import Findings, Found
from megapipe.planner.search.plan import Effort
from megapipe.planner.search.search import search
from megapipe.planner.search.space import SearchSpace

OUTPUT_NAME = "plan.yaml"
"""File that commands name where none was written."""


def run_search(request: Request) -> int:
    """Print, and where flags ask for it write, what a search finds."""
    flags = request.flags
    check_folders(flags["html"], flags["write_config"])
    check_tokens(flags["tokens"])
    hardware, devices = priced(request.hardware(), flags["price_per_hour"]), _devices(request)
    if flags["top"] < 1:
        raise ConfigError(f"--top is {flags['top']}; it must be at least 1")
    config, remarks = planned_config(request, hardware, layout_open=True)
    pinned = request.given
    if config.recompute.method == "auto":
        pinned -= {"recompute.method"}
        config, hardware = limited(config, hardware)
        remarks.append(
            "recompute.method auto: the search also chooses the method, and the memory limit of a device is the "
            "budget of recompute.method auto"
        )
    space, models, times = _space(request), _models(request), measured_times(hardware, devices)
    with _uncollected(), progress_bar("searching layouts") as report:
        findings = search(
            config,
            hardware,
            devices,
            pinned,
            objective=flags["objective"],
            space=space,
            tokens=flags["tokens"],
            models=models,
            times=times,
            effort=Effort(keep=flags["top"]),
            report=report,
        )
    best = findings.best
    facts = checkpoint_facts(request, best.estimate.step_seconds)
    training = training_facts(request, best.estimate, hardware)
    said = [
        *([training_told(training)] if training is not None else []),
        *([checkpoint_told(facts)] if facts is not None else []),
    ]
    file = OUTPUT_NAME if flags["write_config"] is None else str(flags["write_config"])
    command = launch_command(best.config, hardware, best.estimate.world_size, file)
    if flags["html"] is not None or flags["pictures"] is not None:
        times = measured_times(hardware, best.estimate.world_size)
        prediction = predict(best.config, hardware, times=times, node_order=best.node_order)
        prediction = replace(prediction, estimate=best.estimate)  # the page prints the same figures as the table
        from megapipe.planner.command.reports import write_search  # imported only if something is drawn

        write_search(request, hardware, prediction, findings, command, [*remarks, *said])
    if flags["write_config"] is not None:
        write_config(flags["write_config"], best.config, _file_remarks(hardware, best, command))
    advice = advised(request, best.config, hardware, devices)
    if flags["json"]:
        found = {
            "advice": advice,
            "launch": command,
            "checkpoint": facts,
            "training": training,
            "remarks": remarks,
            "search": findings.as_json(),
        }
        print(json.dumps(best.as_json() | found, indent=2))
        return 0
    print(run_told(best.config, hardware, best.estimate.world_size))
    for remark in remarks:
        print(f"note: {remark}")
    print_findings(findings, flags["top"])
    print("\nthe best layout:")
    print_terms(best.estimate)
    print()
    print_memory(best.estimate)
    if best.node_order is not None:
        print(f"\norder of the nodes, chosen by measured links: {' '.join(map(str, best.node_order))}")
    print_advice(advice)
    for line in said:
        print(f"\n{line}")
    _print_start(request, hardware, best, command)
    return 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for garbage in cycles: all that a search makes lives to its end, and is looked through in vain
    for a tenth of its time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def print_findings(findings: Findings, top: int) -> None:
    """The layouts that a search ranked, what it compared, and why others lose."""
    print(
        f"\n{findings.layouts:,} layouts, of which {findings.examined:,} were estimated and the others ruled out by "
        "lower bounds"
    )
    rows = [
        {"": str(place)} | layout_cells(each.config) | _figures(each)
        for place, each in enumerate(findings.ranked[:top], start=1)
    ]
    columns = [name for name in rows[0] if name != "context" or any(row[name] != "1" for row in rows)]
    print_table(columns, [[row[name] for name in columns] for row in rows])
    if any(each.simulated for each in findings.ranked[:top]):
        print("(*: time from a simulation of the schedule, others: estimates)")
    if findings.trials:
        told = [[each.name, "-" if each.found is None else f"{each.value:,.4g}"] for each in findings.trials]
        print()
        print_table(["compared", _COMPARED[findings.objective]], told)
    print(f"not searched: {'; '.join(findings.not_searched)}")
    for hint in findings.hints:
        print(f"hint: {hint}")
    if findings.alternatives:
        print("\ninstead:")
        for each in findings.alternatives:
            print(f"  {each.name}: {each.reason}")


_COMPARED = {
    "speed": "tokens per second",
    "cost": "price of a million tokens",
    "time": "days",
    "size": "parameters",
}


def _figures(found: Found) -> dict[str, str]:
    cells = figures_cells(found.estimate)
    if found.simulated:
        cells["step"] += " *"
    del cells["fits"]
    return cells | ({} if found.price is None else {"price/M tokens": f"{found.price:.4g}"})


def _devices(request: Request) -> int:
    """A search needs them said: sizes that are not given are open."""
    if request.flags["devices"] is None:
        raise ConfigError("--devices is missing; set it to the number of devices that may be used")
    if "batch.global_size" not in request.given:
        raise ConfigError(
            "--batch.global_size is missing; set it to the samples per step, because the best layout depends on it"
        )
    return request.devices()


def _models(request: Request) -> list[tuple[str, ModelConfig]]:
    """What the objective size chooses from. Raises ConfigError for models beside another objective."""
    files, objective = request.flags["models"], request.flags["objective"]
    if files is None:
        return []
    if objective != "size":
        raise ConfigError(
            f"--models needs --objective size, but the objective is {objective}; set --objective size, or leave "
            "--models out"
        )
    try:
        return [(Path(file).stem, parse_as(request.kind, ["--model", file]).model) for file in files]
    except ConfigError as error:
        raise ConfigError([problem.replace("--model ", "--models ", 1) for problem in error.problems]) from None


def _space(request: Request) -> SearchSpace:
    names = request.flags["schedules"]
    return SearchSpace() if names is None else SearchSpace(schedules=tuple(names.split(",")), other_schedules=())


def _file_remarks(hardware: Hardware, best: Found, command: str) -> list[str]:
    estimate = best.estimate
    return [
        f"Planned for {estimate.world_size:,} devices of {hardware.name}: {seconds_told(estimate.step_seconds)} a "
        f"step, {estimate.tokens_per_second:,.0f} tokens/s, predicted; {provenance(hardware)}.",
        f"Start on every node: {command}",
    ]


def _print_start(request: Request, hardware: Hardware, best: Found, command: str) -> None:
    if request.flags["write_config"] is None:
        print(f"\nto train with it, add --write_config {OUTPUT_NAME}, then run on every node")
    else:
        print(f"\nwrote {request.flags['write_config']}; to train with it, run on every node")
    print(f"  {command}")
    if not best.config.data.prefixes[0]:
        print(f"  ({NO_DATA}: path of the shard that megapipe preprocess printed)")
    warning = uneven_nodes(hardware, best.estimate.world_size)
    if warning is not None:
        print(f"  {warning}")
