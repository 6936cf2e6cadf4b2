"""Compare predictions of the planner with measured steps: profile this machine, predict layouts, and train them.

`megapipe.planner.cost.model.predict` predicts every layout from the profile only. Then the layout is trained with the
real engine and optimizer on random tokens, in processes with one thread each, which are connected by gloo and shared
memory. A step's time is the median over its steps on rank 0, over several starts that alternate with those of the
other layouts, because the memory of a start and the load of the machine change the time by a few percent. The last
line of the output is one JSON object.

    python benchmarks/plan_truth.py --write table.md
    python benchmarks/plan_truth.py --hardware machine.yaml --layouts "tensor 2" "pipeline 2, 1f1b"
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from megapipe.calibration.layers import samples_for
from megapipe.calibration.machine import on_ranks, profile
from megapipe.config import ConfigError
from megapipe.config.load import parse_as
from megapipe.config.parallel import DIMENSIONS, MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.layout.hardware.description import Hardware, load_hardware
from megapipe.optim.scaling import learning_rate
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.planner.cost.model import Prediction, predict
from megapipe.training.loop.batches import open_loader
from megapipe.training.loop.replica import Replica

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "quickstart.yaml"
WARM_UP = 2
RANKS = 4
MEASURED = {"tensor_sizes": (1, 2), "micro_sizes": (1, 2, 4), "context_sizes": (1, 2)}
"""Sizes to profile: those that the layouts use."""

Changes = dict[str, dict[str, Any]]
LAYOUTS: dict[str, Changes] = {
    "1 rank": {},
    "1 rank, micro_size 1": {"batch": {"micro_size": 1}},
    "1 rank, recompute full": {"recompute": {"method": "full"}},
    "pipeline 2, gpipe": {"parallel": {"pipeline": 2}, "schedule": {"name": "gpipe"}},
    "pipeline 2, 1f1b": {"parallel": {"pipeline": 2}, "batch": {"micro_size": 2}},
    "pipeline 2, interleaved_1f1b": {
        "parallel": {"pipeline": 2},
        "schedule": {"name": "interleaved_1f1b", "chunks": 2},
    },
    "pipeline 2, zb_h1": {"parallel": {"pipeline": 2}, "schedule": {"name": "zb_h1"}},
    "tensor 2": {"parallel": {"tensor": 2}},
    "context 2": {"parallel": {"context": 2}},
    "data 2": {"parallel": {"data": 2}},
    "data 2, zero 1": {"parallel": {"data": 2}, "zero": {"stage": 1}},
    "data 2, zero 3": {"parallel": {"data": 2}, "zero": {"stage": 3}},
    "pipeline 2 x data 2": {"parallel": {"pipeline": 2, "data": 2}},
    "tensor 2 x pipeline 2": {"parallel": {"tensor": 2, "pipeline": 2}},
    "pipeline 4": {"parallel": {"pipeline": 4}, "batch": {"micro_size": 1}},
}


@dataclass(frozen=True)
class Figure:
    """Predicted and measured seconds of a step of one layout, and the terms of the prediction.

    terms: predicted seconds of each term. source: origin of the times of compute.
    """

    name: str
    predicted: float
    measured: float
    terms: dict[str, float]
    source: str

    @property
    def error(self) -> float:
        """Relative error of the prediction; 0.1 means 10% above the measured time."""
        return self.predicted / self.measured - 1.0


def base_config() -> PretrainConfig:
    """Return the configuration of the quickstart, in fp32."""
    return parse_as(PretrainConfig, ["--config", str(EXAMPLE), "--training.precision", "fp32"])


def config_of(name: str) -> PretrainConfig:
    """Return the configuration of a layout, with all parallel sizes set."""
    changes = {**LAYOUTS[name], "parallel": {"data": 1, "device": "cpu", **LAYOUTS[name].get("parallel", {})}}
    config = base_config()
    return replace(config, **{group: replace(getattr(config, group), **made) for group, made in changes.items()})


def sizes_of(config: PretrainConfig) -> dict[str, int]:
    """Return the number of ranks along each dimension."""
    return {dimension: getattr(config.parallel, dimension) for dimension in DIMENSIONS}


def train(mesh: Mesh, config: PretrainConfig, steps: int) -> list[float]:
    """Return the seconds of every step on this rank after a warm-up."""
    mesh = connected_mesh(MeshShape(sizes_of(config)), mesh.device)
    replica = Replica(config, mesh)
    batch = open_loader(config, mesh, replica, samples_for(config)).load(0)
    times = []
    mesh.world.barrier()
    clock = time.perf_counter()
    for step in range(WARM_UP + steps):
        rate = learning_rate(config.optimizer, step + 1, config.training.steps)
        replica.engine.run(StepInput(step, batch.contexts, batch.token_counts, rate))
        now = time.perf_counter()
        times.append(now - clock)
        clock = now
    return times[WARM_UP:]


def measured(names: list[str], steps: int, starts: int) -> dict[str, float]:
    """Train each layout `starts` times, and return its median seconds of a step."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(starts):
        for name in names:
            config = config_of(name)
            seconds = on_ranks(MeshShape(sizes_of(config)).world_size, "cpu", train, config, steps)[0]
            times[name] += seconds
            print(f"start {turn + 1}: {name}: {median(seconds):.3f} s", file=sys.stderr)
    return {name: median(seconds) for name, seconds in times.items()}


def figure(name: str, prediction: Prediction, seconds: float) -> Figure:
    """Return the figure of a layout from its prediction and the measured seconds."""
    terms: dict[str, float] = {}
    for term in prediction.estimate.terms:
        terms[term.name] = terms.get(term.name, 0.0) + term.seconds
    source = next(term.source for term in prediction.estimate.terms if term.name == "compute")
    return Figure(name, prediction.estimate.step_seconds, seconds, terms, source)


def rank_correlation(one: list[float], two: list[float]) -> float:
    """Return Spearman's rank correlation, for numbers without ties."""
    ranks = [np.argsort(np.argsort(each)).astype(float) for each in (one, two)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def table(figures: list[Figure]) -> str:
    """Return a Markdown table."""
    lines = ["| layout | predicted s | measured s | error | layers' times |", "|---|---|---|---|---|"]
    for figure in figures:
        times = f"{figure.predicted:.3f} | {figure.measured:.3f} | {figure.error:+.1%}"
        lines.append(f"| {figure.name} | {times} | {figure.source.partition(' ')[0]} |")
    return "\n".join(lines)


def summary(figures: list[Figure]) -> dict[str, float]:
    """Return the figures of all layouts together. A correlation needs three."""
    predicted, measured = [each.predicted for each in figures], [each.measured for each in figures]
    errors = [abs(each.error) for each in figures]
    result = {"median_error": median(errors), "worst_error": max(errors), "spread": max(measured) / min(measured)}
    return result if len(figures) < 3 else {"rank_correlation": rank_correlation(predicted, measured), **result}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(f'"{name}"' for name in LAYOUTS)
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=list(LAYOUTS),
        default=list(LAYOUTS),
        metavar="NAME",
        help=f"by default all of them: {names}",
    )
    parser.add_argument("--steps", type=int, default=7, help="measured in each start, after a warm-up; 5 or more")
    parser.add_argument("--starts", type=int, default=2, help="number of starts of each layout")
    parser.add_argument("--hardware", metavar="FILE", help="an existing profile; by default, a new one is measured")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the new profile to this file")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table to this file")
    options = parser.parse_args()
    if options.steps < 5:
        parser.error(f"--steps is {options.steps}; a median needs 5 or more")
    if options.starts < 1:
        parser.error(f"--starts is {options.starts}; it must be at least 1")
    if options.hardware and options.keep:
        parser.error("--keep is for a new profile, and --hardware names an existing one; use only one of them")
    return options


def machine(options: argparse.Namespace) -> Hardware:
    """Return the profile for the predictions: that of --hardware, or a new one."""
    if options.hardware:
        return load_hardware(options.hardware)
    with tempfile.TemporaryDirectory() as folder:
        out = options.keep or Path(folder) / "machine.yaml"
        return profile(base_config(), out, ranks=RANKS, say=lambda line: print(line, file=sys.stderr), **MEASURED)


def main() -> None:
    """Profile, predict and measure, print the table, and print one JSON object at the end."""
    options = arguments()
    try:
        hardware = machine(options)
        predictions = {name: predict(config_of(name), hardware) for name in options.layouts}
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    seconds = measured(list(predictions), options.steps, options.starts)
    figures = [figure(name, prediction, seconds[name]) for name, prediction in predictions.items()]
    facts = summary(figures)
    totals = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in facts.items())
    text = f"{table(figures)}\n\nmedians of {options.starts} x {options.steps} steps; {totals}\n"
    print(text)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    rows = [{**vars(each), "error": each.error} for each in figures]
    print(json.dumps({"benchmark": "plan_truth", "torch": torch.__version__, **facts, "layouts": rows}))


if __name__ == "__main__":
    main()
