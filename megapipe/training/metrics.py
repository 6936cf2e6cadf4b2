"""metrics.jsonl: every step, evaluation and event of all starts of a run, one JSON object per line.

The file is only appended to, line by line, so that no start destroys the lines of an earlier one, and a killed run
keeps all lines up to its last step.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megapipe.config.untrusted import decode_json
from megapipe.training.output import LineFile
from megapipe.training.records import EvaluationRecord, Listener, StepRecord

FILE_NAME = "metrics.jsonl"
_LONGEST_LINE = 1 << 24


class MetricsFile(Listener):
    """Writes `metrics.jsonl` in the run's folder.

    A step's line has the fields of StepRecord; other lines have `event`: start (with `run`, the id of this start, and
    `step`, the step that it continues from), evaluation (with the fields of EvaluationRecord), checkpoint, rewind
    (with `step`, the step that a spike made the run return to), skipped_samples, other_data (with `step`, the last
    step on the previous data), end, failed. Numbers that are not finite become null, because JSON has no such values.
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
        self._file.write(json.dumps(_finite(record)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class LossHistory:
    """Finite losses by step. training[s]: loss of step s. evaluation[s]: loss after s steps.

    dropped: training losses by step that did not lead to the newest weights, because the run went back; oldest first.
    """

    training: dict[int, float] = field(default_factory=dict)
    evaluation: dict[int, float] = field(default_factory=dict)
    dropped: list[dict[int, float]] = field(default_factory=list)

    def drop_after(self, step: int) -> None:
        """Move the losses after `step` to `dropped`, because the run continues from `step`."""
        rewound = {s: loss for s, loss in self.training.items() if s > step}
        if rewound:
            self.dropped.append(rewound)
        self.training = {s: loss for s, loss in self.training.items() if s <= step}
        self.evaluation = {s: loss for s, loss in self.evaluation.items() if s <= step}


def read_losses(path: Path) -> LossHistory:
    """Return the losses that led to the newest weights, over all starts in a metrics file.

    Lines without a complete record, such as the last line of a killed process, are skipped. Raises OSError.
    """
    history, latest = LossHistory(), 0
    for record in _records(path):
        event, step, loss = record.get("event"), record.get("step"), record.get("loss")
        if not isinstance(step, int):
            continue
        if event in ("start", "rewind"):
            history.drop_after(step)
            latest = step
        elif event == "evaluation" and isinstance(loss, float):
            history.evaluation[step] = loss
        elif event is None:
            if step <= latest:  # the line of the `start` event before it is lost
                history.drop_after(step - 1)
            latest = step
            if isinstance(loss, float):
                history.training[step] = loss
    return history


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            try:
                record = decode_json(line, str(path), ValueError)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
