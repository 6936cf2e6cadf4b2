"""Measure the time of plan searches on one core, and the number of layouts that they examine.

1. The command `tools/plan.py search`, from its flags to the last printed line and the written configuration; also with
   the page of pictures, and with advice layer by layer. The models have 39.1B and 20B parameters on 64 devices, and 1T
   on 3,072. Each command runs in a separate process, so that its caches are empty at the start. `processor_s` excludes
   the start of Python and the imports, and `whole_processor_s` is the time of the whole process.
2. GPTs of table 1 of Narayanan et al. (2021, arXiv 2104.04473) on A100s: 39.1B on 64, 1008B on 3,072. The searches
   return more and more: only the best layout by estimates; also the ranking by simulation; also the Pareto front; and
   also the alternatives. All of them run in one process, and only the first starts with empty caches.
3. The layout of the authors compared with the best one by the same cost model, with their differences in words.
4. The planner of PipeDream-2BW for its 2.2B and 3.8B models on 64 V100s.

Times are processor seconds. On a busy machine, they are also longer. The output is JSON.

    python benchmarks/plan_search.py --rows 39.1B:64 1008B:3072

`--against FOLDER`, with a checkout of another commit, only compares commands of both checkouts: the requests of
`tests/golden`. The checkouts take turns, each command runs in a separate process, and the medians of the times and of
their ratio are reported.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapipe.config import ConfigError
from megapipe.config.model import ModelConfig
from megapipe.config.run import BatchConfig, DataConfig, PretrainConfig, TrainingConfig
from megapipe.layout.hardware.description import Hardware, load_hardware
from megapipe.planner.cost.model import estimate
from megapipe.planner.fitting import A100, PublishedRun
from megapipe.planner.papers.pipedream import two_buffered_plan
from megapipe.planner.search.findings import faster_or_slower, term_differences
from megapipe.planner.search.plan import QUICK, Effort, search_speed

EFFORTS = {
    "best_alone": QUICK,
    "simulated": Effort(slowest=0, alternatives=False, hints=False),
    "with_front": Effort(alternatives=False, hints=False),
    "everything": Effort(),
}
"""Efforts of a search. Each one includes the work of those before it."""
ROOT = Path(__file__).parents[1]
PAGE = "--html"
COMMANDS = (
    "--model examples/models/megatron_39.1b.yaml --hardware a100-80 --devices 64 --batch.global_size 1536 "
    "--data.sequence_length 2048",
    "--model examples/models/megatron_18.4b.yaml --model.num_layers 44 --hardware h100 --devices 64 "
    "--batch.global_size 1024 --data.sequence_length 2048",
    "--model examples/models/megatron_1t.yaml --hardware a100-80 --devices 3072 --batch.global_size 3072 "
    "--data.sequence_length 2048",
)
GOLDEN = (
    "--model gpt3_1.3b --hardware a100-80 --devices 16 --batch.global_size 512",
    "--model llama3_8b --hardware h100 --devices 32 --batch.global_size 256",
    "--model mixtral_8x7b --hardware h100 --devices 64 --batch.global_size 512",
    "--model bert_large --hardware v100-32 --devices 8 --batch.global_size 256",
    "--model megatron_39.1b --hardware a100-80 --devices 64 --batch.global_size 1536",
    "--model llama2_13b --hardware a100-40 --devices 24 --batch.global_size 480",
    "--model megatron_1t --hardware a100-80 --devices 3072 --batch.global_size 3072",
)
"""Searches of `tests/golden`, and the largest search."""
PAIRS = 5
"""Number of runs of each command in each checkout. The two checkouts take turns."""
TIMED = """
import gc, sys, time
gc.disable()
from importlib import import_module
from megapipe.planner.command.main import HANDLERS, main
import_module(f"megapipe.planner.command.{HANDLERS['search'][0]}")
gc.freeze()
gc.enable()
start = time.process_time()
status = main(sys.argv[1:], {})
if status == 0:
    print(time.process_time() - start, time.process_time(), file=sys.stderr)
sys.exit(status)
"""
"""Program that starts a command as tools/plan.py does. It prints two numbers on standard error: the processor seconds
after all imports, and those of the whole process."""


def timed(base: PretrainConfig, hardware: Hardware, devices: int, effort: Effort) -> dict[str, Any]:
    """Run one search; return its processor seconds, its numbers of layouts, and the best layout."""
    start = time.process_time()
    findings = search_speed(base, hardware, devices, effort=effort)
    return {
        "processor_s": time.process_time() - start,
        "layouts": findings.layouts,
        "examined": findings.examined,
        "pruned": findings.pruned,
        "step_time_s": findings.best.estimate.step_seconds,
        "simulated": findings.best.simulated,
        "layout": findings.best.estimate.as_json()["layout"],
    }


def of_row(run: PublishedRun, devices: int) -> dict[str, Any]:
    """Search a layout for a published model with every effort. If the authors used this number of devices, compare the
    best layout with theirs."""
    hardware = load_hardware("a100-80")
    base = next(run.candidates())
    base = replace(base, parallel=replace(base.parallel, data=None, layers_per_stage=None))
    result = {
        "model": run.name,
        "devices": devices,
    } | {name: timed(base, hardware, devices, effort) for name, effort in EFFORTS.items()}
    if devices == run.devices:
        authors_best = min((estimate(each, hardware) for each in run.candidates()), key=lambda each: each.step_seconds)
        best = search_speed(base, hardware, devices, effort=QUICK).best.estimate
        result["authors_step_time_s"] = authors_best.step_seconds
        result["differences"] = [faster_or_slower(best, authors_best), *term_differences(best, authors_best)]
    return result


def command(arguments: list[str], root: Path = ROOT) -> dict[str, Any]:
    """Run a command of a checkout in a separate process, and return its times. Raises RuntimeError with its error
    output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        written = [f"--write_config={folder}/plan.yaml"]
        written += [f"--html={folder}/plan.html"] if PAGE in arguments else []
        flags = [each for each in arguments if each != PAGE]
        process = subprocess.run(
            [sys.executable, "-c", TIMED, *flags, *written],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    if process.returncode:
        raise RuntimeError(f"plan.py {' '.join(arguments)}: {process.stderr.strip()}")
    seconds, whole = map(float, process.stderr.split())
    return {"command": f"plan.py {' '.join(arguments)}", "processor_s": seconds, "whole_processor_s": whole}


def commands() -> list[dict[str, Any]]:
    """Run each of `COMMANDS`, without more flags and with each additional flag."""
    return [
        command(["search", *flags.split(), *more])
        for flags in COMMANDS
        for more in ([], [PAGE], ["--per_layer"])
        if more != ["--per_layer"] or "3072" not in flags  # Galvatron's degrees are powers of 2
    ]


def compared(flags: str, other: Path) -> dict[str, Any]:
    """Compare the times of a command in this checkout and in another one, which take turns."""
    pairs = []
    for turn in range(PAIRS):
        order = [ROOT, other] if turn % 2 else [other, ROOT]
        seconds = {root: command(["search", *flags.split()], root)["processor_s"] for root in order}
        pairs.append((seconds[ROOT], seconds[other]))
    here, there = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(one / two for one, two in pairs)
    return {"command": f"search {flags}", "processor_s": here, "other_processor_s": there, "ratio": ratio}


def two_buffered(billions: float, hidden: int) -> dict[str, Any]:
    """Measure the planner of PipeDream-2BW for one model."""
    model = ModelConfig(vocabulary_size=51200, num_layers=32, hidden_size=hidden, num_heads=32, max_positions=512)
    config = PretrainConfig(
        model=model,
        data=DataConfig(sequence_length=512),
        batch=BatchConfig(global_size=512),
        training=TrainingConfig(precision="fp16"),
    )
    start = time.process_time()
    best = two_buffered_plan(config, load_hardware("v100-16"), 64)
    return {
        "model": f"{billions}B",
        "depth": best["depth"],
        "width": best["width"],
        "processor_s": time.process_time() - start,
    }


def main() -> None:
    """Print all results as one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", nargs="+", default=["39.1B:64", "1008B:3072"], help="model:devices")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="checkout to compare whole commands with")
    arguments = parser.parse_args()
    if arguments.against is not None:
        other = arguments.against.resolve()
        print(json.dumps([compared(flags, other) for flags in GOLDEN], indent=1))
        return
    runs = {run.name: run for run in (*A100.rows, *A100.unfitted)}
    rows = [row.partition(":") for row in arguments.rows]
    for name, _, devices in rows:
        if name not in runs or not devices.isdigit():
            parser.error(f"--rows {name}:{devices}: give model:devices, with a model of {', '.join(runs)}")
    try:
        searches = [of_row(runs[name], int(devices)) for name, _, devices in rows]
        whole = commands()
    except (ConfigError, RuntimeError) as error:
        parser.error(str(error))
    print(
        json.dumps(
            {
                "cores": os.cpu_count(),
                "commands": whole,
                "searches": searches,
                "two_buffered": [two_buffered(2.2, 2304), two_buffered(3.8, 3072)],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
