"""metrics.jsonl: every step, evaluation and event of all starts of a run, one JSON object per line.

The file is only appended to, line by line, so that no start destroys the lines of an earlier one, and a killed run
keeps all lines up to its last step.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import numpy as np

from megapipe.training.output import LineFile
from megapipe.training.records import EvaluationRecord, Listener, StepRecord

FILE_NAME = "metrics.jsonl"
_LONGEST_LINE = 1 << 24
LARGEST = 1e100
"""Numbers of a metrics file are read up to this one."""


class MetricsFile(Listener):
    """Writes `metrics.jsonl` in the run's folder.

    A step's line has the fields of StepRecord; other lines have `event`: start (with `run`, the id of this start, and
    `step`, the step that it continues from), evaluation (with the fields of EvaluationRecord), checkpoint, rewind
    (with `step`, the step that a spike made the run return to), skipped_samples, other_data (with `step`, the last
    step on the previous data), ranks and save_wait (see records.py), end, failed. Numbers that are not finite become
    null, because JSON has no such values.
    All lines between one start and the next belong to the first one.
    """

    def __init__(self, directory: Path) -> None:
        self._file = LineFile(directory / FILE_NAME)

    def event(self, name: str, **fields: Any) -> None:
        self._write({"event": name, "time": time.time(), **fields})

    def step(self, record: StepRecord) -> None:
        self._write(asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self.event("evaluation", **asdict(record))

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(finite(record)))


def finite(value: Any) -> Any:
    """Return a value for JSON, in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class LossHistory:
    """Finite losses by step. training[s]: loss of step s. evaluation[s]: loss after s steps.

    dropped: training losses by step that did not lead to the newest weights, because the run went back; oldest first.
    """

    training: dict[int, float] = field(default_factory=dict)
    evaluation: dict[int, float] = field(default_factory=dict)
    dropped: list[dict[int, float]] = field(default_factory=list)

    _latest: int = 0

    def take(self, record: Mapping[str, Any]) -> int | None:
        """Add a record of a metrics file. Return the step that the run went back to before it, if it did."""
        event, step, loss = record.get("event"), record.get("step"), record.get("loss")
        if type(step) is not int or not 0 <= step < LARGEST:
            return None
        returned = None
        if event in ("start", "rewind"):
            self.drop_after(step)
            self._latest = returned = step
        elif event == "evaluation" and is_number(loss):
            self.evaluation[step] = float(loss)
        elif event is None:
            if step <= self._latest:  # the line of the `start` event before it is lost
                returned = step - 1
                self.drop_after(returned)
            self._latest = step
            if is_number(loss):
                self.training[step] = float(loss)
        return returned

    def drop_after(self, step: int) -> None:
        """Move the losses after `step` to `dropped`, because the run continues from `step`."""
        rewound = {s: loss for s, loss in self.training.items() if s > step}
        if rewound:
            self.dropped.append(rewound)
        self.training = {s: loss for s, loss in self.training.items() if s <= step}
        self.evaluation = {s: loss for s, loss in self.evaluation.items() if s <= step}


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the running mean, float64 [n], over a centred window of a fiftieth of the run, narrower at the ends."""
    reach = max(1, len(values) // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    starts, stops = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    return (sums[stops] - sums[starts]) / (stops - starts)


def read_losses(path: Path) -> LossHistory:
    """Return the losses that led to the newest weights, over all starts in a metrics file.

    Lines without a complete record, such as the last line of a killed process, are skipped. Raises OSError.
    """
    history = LossHistory()
    for record in read_records(path):
        if record is not None:
            history.take(record)
    return history


def read_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line of a metrics file, None for a line that is damaged.

    An incomplete last line is skipped: the run is writing it, or was killed. Values are not checked. Raises OSError.
    """
    decode = json.JSONDecoder(parse_constant=_no_constant).decode
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            try:
                record = decode(line.decode("utf-8"))
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield record
            elif line.endswith(b"\n") or len(line) == _LONGEST_LINE:
                yield None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value of a record is a finite number that later arithmetic can hold."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
