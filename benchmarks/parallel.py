"""Compare a data-parallel step of megapipe with torch's DDP and FSDP2, on the same GPT, weights and batches.

Ranks are processes with one thread each, connected by gloo. megapipe's processes are set up as its trainer does, and
torch's have torch's defaults. The contestants take turns, so that a change of the machine's load affects all of them.
A time is the time of the slower rank. The losses must agree. The last line of the output is one JSON object.

    python benchmarks/parallel.py --write table.md
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from parallel_contest.race import num_parameters, race
from parallel_contest.report import table
from parallel_contest.setting import SIZES


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="12m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7, help="at least 2")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table to this file")
    options = parser.parse_args()
    if options.repeats < 2:
        parser.error(f"--repeats is {options.repeats}; quartiles need at least 2")
    if options.ranks < 2:
        parser.error(f"--ranks is {options.ranks}; replicas need at least 2")
    return options


def main() -> None:
    """Measure, print the table, and print one JSON object at the end."""
    options = arguments()
    setting, count = SIZES[options.size], num_parameters(options.size)
    figures = race(options.size, options.ranks, options.repeats)
    share = (
        f"{setting.num_microbatches} micro-batches of {setting.micro_size} x {setting.shape.sequence_length} tokens"
    )
    title = (
        f"{count / 1e6:.1f} million parameters, {options.ranks} ranks, {share} each, fp32, median of {options.repeats}"
    )
    text = f"{title}:\n\n{table(figures)}\n"
    print(text)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    facts = {"benchmark": "parallel", "size": options.size, "ranks": options.ranks, "repeats": options.repeats}
    print(json.dumps({**facts, "torch": torch.__version__, "figures": [asdict(each) for each in figures]}))


if __name__ == "__main__":
    main()
