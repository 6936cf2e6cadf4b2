"""Compare the time to create schedules in megapipe and in torch.distributed.pipelining.

Megapipe builds, lowers and validates interleaved 1F1B; torch orders, checks the order and lowers the same schedule,
but does not check the lowered one. tools/schedule.py is started in a new process, as by a user. On a busy host,
processor seconds are more reliable than wall-clock seconds. Every figure is the minimum over the repeats. The last
line of the output is one JSON object.

    python benchmarks/schedule_speed.py --repeats 3
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from megapipe.schedules import build, validate

ROOT = Path(__file__).parents[1]
TOOL_FLAGS = ("simulate", "--schedule", "interleaved_1f1b", "--ranks", "8", "--microbatches", "32", "--json")


def megapipe(ranks: int, microbatches: int, chunks: int) -> int:
    """Build, lower and validate a schedule; return its number of actions."""
    schedule = build("interleaved_1f1b", ranks, microbatches, chunks=chunks)
    validate(schedule)
    return sum(len(rows) for rows in schedule.sections.body)


def peer(ranks: int, microbatches: int, chunks: int) -> int:
    """Let torch order and lower a schedule for all ranks, as each of its ranks does; return the number of actions."""
    stages = [
        SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, stage_index=chunk * ranks)
        for chunk in range(chunks)
    ]
    schedule = ScheduleInterleaved1F1B(stages, microbatches)  # type: ignore[arg-type]
    return sum(len(actions) for actions in schedule.pipeline_order_with_comms.values())


def tool() -> int:
    """Run one simulation from the command line; return the number of entries in its output."""
    done = subprocess.run([sys.executable, ROOT / "tools" / "schedule.py", *TOOL_FLAGS], check=True, cwd=ROOT,
                          capture_output=True, timeout=60)  # fmt: skip
    return len(json.loads(done.stdout))


def processor_seconds() -> float:
    """Return the processor seconds of this process and of the child processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(work: Callable[[], int], repeats: int) -> dict[str, float]:
    """Return the minimum wall-clock and processor seconds over the repeats, and the number that `work` returned."""
    wall, processor, count = [], [], 0
    for _ in range(repeats):
        start = time.perf_counter(), processor_seconds()
        count = work()
        wall.append(time.perf_counter() - start[0])
        processor.append(processor_seconds() - start[1])
    return {"seconds": round(min(wall), 3), "processor_seconds": round(min(processor), 3), "count": count}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="repeats, of which the least counts")
    repeats = parser.parse_args().repeats
    works: dict[str, Callable[[], int]] = {
        "megapipe_p64_m512_v4": partial(megapipe, 64, 512, 4),
        "torch_p64_m512_v4": partial(peer, 64, 512, 4),
        "megapipe_p512_m2048_v2": partial(megapipe, 512, 2048, 2),
        "tool_p8_m32": tool,
    }
    figures: dict[str, object] = {"benchmark": "schedule_speed", "torch": torch.__version__, "repeats": repeats}
    for name, work in works.items():
        times = measure(work, repeats)
        figures[name] = times
        print(f"{name:34} {times['seconds']:8.3f} s, processor {times['processor_seconds']:8.3f} s", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
