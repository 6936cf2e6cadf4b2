"""Chrome trace events, which Perfetto and chrome://tracing open. Simulated and measured runs share this format."""

import json
from collections.abc import Iterable
from typing import Any, Final

from megapipe.schedules.drawing.bars import COMPUTE, COPY_IN, COPY_OUT, REDUCTION, TRANSFER, Bar, bars_of
from megapipe.schedules.drawing.palette import NAMES
from megapipe.schedules.simulation.simulate import Simulation

THREADS: Final = {COMPUTE: 0, TRANSFER: 1, REDUCTION: 2, COPY_OUT: 3, COPY_IN: 4}


def trace_events(
    bars: Iterable[Bar], microseconds: float, process: str = "rank", first_process: int = 0
) -> list[dict[str, Any]]:
    """One complete event a bar: a process a rank, a thread a lane; ``microseconds`` is the length of a time unit.

    ``process`` is what a process is called before its rank's number; their ids count up from ``first_process``.
    """
    events: list[dict[str, Any]] = []
    named: set[tuple[int, str]] = set()
    for bar in bars:
        if (bar.rank, bar.lane) not in named:
            named.add((bar.rank, bar.lane))
            place = {"ph": "M", "pid": first_process + bar.rank, "tid": THREADS[bar.lane]}
            events.append({**place, "name": "process_name", "args": {"name": f"{process} {bar.rank}"}})
            events.append({**place, "name": "thread_name", "args": {"name": bar.lane}})
        events.append(
            {
                "ph": "X",
                "name": NAMES[bar.kind],
                "cat": bar.lane,
                "pid": first_process + bar.rank,
                "tid": THREADS[bar.lane],
                "ts": bar.start * microseconds,
                "dur": (bar.end - bar.start) * microseconds,
                "args": {
                    "stage": bar.stage, "microbatch": bar.microbatch, "step": bar.step,
                    "critical": bar.critical, "action": bar.text, "wait": bar.wait * microseconds,
                },
            }
        )  # fmt: skip
    return events


def draw_trace(simulation: Simulation, microseconds: float = 1000.0) -> str:
    """The simulated run as a trace file; a simulated time unit is a millisecond unless said otherwise."""
    document = {"traceEvents": trace_events(bars_of(simulation), microseconds), "displayTimeUnit": "ms"}
    return json.dumps(document) + "\n"
