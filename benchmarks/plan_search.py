"""How long plan searches take on one core, and how many layouts they looked at; JSON on standard output.

1. GPTs of table 1 of Narayanan et al. (2021, arXiv 2104.04473) on A100s: 39.1B on 64, 1008B on 3,072. Each search is
   timed twice in one process: for the best alone by closed forms, and with everything that a search answers besides
   (ranking by simulation, Pareto front, alternatives). The first includes caches that start out empty.
2. The layout that the authors chose beside the best one, by the same cost model, and what differs in words.
3. PipeDream-2BW's own planner for its 2.2B and 3.8B models on 64 V100s.

    python benchmarks/plan_search.py --rows 39.1B:64 1008B:3072
"""

import argparse
import json
import os
import time
from dataclasses import replace
from typing import Any

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.planner.cost.model import estimate
from megapipe.planner.fitting.published import A100, PublishedRun
from megapipe.planner.hardware.description import Hardware
from megapipe.planner.hardware.reader import load_hardware
from megapipe.planner.pipedream.transformer import TransformerShape
from megapipe.planner.pipedream.two_buffered import Machine, plan
from megapipe.planner.search.differences import differences
from megapipe.planner.search.plan import Effort, search_speed

QUICK = Effort(keep=1, slowest=0, actions=0, alternatives=False, stages=False)
V100_16 = Machine(devices=64, devices_per_server=8, memory_bytes=16 * 2**30, fast=150e9, slow=25e9 / 8)
V100_FLOPS = 45e12


def timed(base: PretrainConfig, hardware: Hardware, devices: int, effort: Effort) -> dict[str, Any]:
    """One search: wall and processor seconds, layouts, the best."""
    wall, processor = time.perf_counter(), time.process_time()
    found = search_speed(base, hardware, devices, effort=effort)
    return {
        "wall_s": time.perf_counter() - wall,
        "processor_s": time.process_time() - processor,
        "layouts": found.layouts,
        "examined": found.examined,
        "pruned": found.pruned,
        "step_time_s": found.best.estimate.step_seconds,
        "simulated": found.best.simulated,
        "layout": found.best.estimate.as_json()["layout"],
    }


def of_row(run: PublishedRun, devices: int) -> dict[str, Any]:
    """A row's model on a number of devices, with the authors' layout where that is their number."""
    hardware = load_hardware("a100-80")
    base = next(run.candidates())
    base = replace(base, parallel=replace(base.parallel, data=None, layers_per_stage=None))
    result = {
        "model": run.name,
        "devices": devices,
        "best_alone": timed(base, hardware, devices, QUICK),
        "everything": timed(base, hardware, devices, Effort()),
    }
    if devices == run.row.devices:
        theirs = min((estimate(each, hardware) for each in run.candidates()), key=lambda each: each.step_seconds)
        best = search_speed(base, hardware, devices, effort=QUICK).best.estimate
        result["authors_step_time_s"] = theirs.step_seconds
        result["differences"] = differences(best, theirs)
    return result


def two_buffered(billions: float, hidden: int) -> dict[str, Any]:
    """The planner of PipeDream-2BW."""
    started = time.perf_counter()
    best = plan(TransformerShape(32, hidden, 32).blocks(V100_FLOPS), V100_16, 512)
    return {"model": f"{billions}B", "depth": best.depth, "width": best.width, "wall_s": time.perf_counter() - started}


def main() -> None:
    """Print all results as one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", nargs="+", default=["39.1B:64", "1008B:3072"], help="model:devices")
    arguments = parser.parse_args()
    runs = {run.name: run for run in (*A100.runs(), *A100.told_runs())}
    wanted = [row.partition(":") for row in arguments.rows]
    for name, _, devices in wanted:
        if name not in runs or not devices.isdigit():
            parser.error(f"--rows {name}:{devices}: give model:devices, with a model of {', '.join(runs)}")
    try:
        searches = [of_row(runs[name], int(devices)) for name, _, devices in wanted]
    except ConfigError as error:
        parser.error(str(error))
    print(
        json.dumps(
            {
                "cores": os.cpu_count(),
                "searches": searches,
                "two_buffered": [two_buffered(2.2, 2304), two_buffered(3.8, 3072)],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
