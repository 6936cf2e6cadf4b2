"""Compare megapipe, torch.save and torch.distributed.checkpoint in saving and loading one state.

Two ranks over gloo hold halves of fp32 matrices with two moments. The contestants take turns, so that a change of the
machine's load affects all of them. A time is the time of the slower rank. What is loaded is compared with what was
saved. Loads read from the page cache. A second part measures the overhead of `checkpoint.every auto`, with steps that
sleep, on disks of three speeds. A third part measures how long copies of the state delay a step, before the step and
in its background (`checkpoint.snapshot`), and compares this with the simulator's prediction; steps and copies sleep.
The last line of the output is one JSON object.

    python benchmarks/checkpoint.py --write table.md
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from checkpoint_contest.race import RANKS, race
from checkpoint_contest.report import overhead_table, stall_table, table
from checkpoint_contest.stall import FORWARD_SECONDS, MICROBATCHES, stalls
from checkpoint_contest.state import num_matrices
from checkpoint_contest.throttled import SPEEDS, STEP_SECONDS, overhead


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2, help="size of the state over both ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500, help="steps on each disk in part 2; 0 leaves it out")
    parser.add_argument("--stalls", type=int, default=9, help="rounds of the third part; 0 leaves it out")
    parser.add_argument("--no-race", action="store_true", help="leave out the first part")
    parser.add_argument("--max-overhead", type=float, default=0.035)
    parser.add_argument("--folder", type=Path, default=Path("."), help="folder on the disk to measure")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables to this file")
    options = parser.parse_args()
    for name in ("gigabytes", "rounds", "max_overhead"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be above 0")
    if 0 < options.steps < 20:
        parser.error(f"--steps is {options.steps}; the first save is after 10, so give at least 20, or 0")
    return options


def main() -> None:
    """Measure, print the tables, and print one JSON object at the end."""
    options, text = arguments(), ""
    facts = {"benchmark": "checkpoint", "torch": torch.__version__, "rounds": options.rounds}
    if not options.no_race:
        measured = race(num_matrices(options.gigabytes), options.rounds, options.folder)
        text = f"{measured.bytes / 1e9:.2f} GB on {RANKS} ranks, median of {options.rounds}:\n\n{table(measured)}\n"
        facts |= asdict(measured)
    overheads = []
    if options.steps:
        overheads = [overhead(speed, options.steps, options.max_overhead, options.folder) for speed in SPEEDS]
        text += f"\ncheckpoint.every auto, {options.steps} steps of {STEP_SECONDS} s:\n\n{overhead_table(overheads)}\n"
    delayed = stalls(options.stalls, options.folder) if options.stalls else []
    if delayed:
        compute = MICROBATCHES * 3 * FORWARD_SECONDS
        text += (
            f"\nSteps with {compute:.2f} s of compute a rank, median of {options.stalls}:\n\n{stall_table(delayed)}\n"
        )
    print(text)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    facts |= {"overheads": [asdict(each) for each in overheads], "stalls": [asdict(each) for each in delayed]}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
