"""metrics.jsonl: every step, evaluation and event of a run, one JSON object a line.

The file is appended to and flushed line by line, so that a run never destroys what an earlier one wrote, and one that
was killed leaves all it had told.
"""

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megapipe.config.untrusted import DECODING_ERRORS, decode_json
from megapipe.training.records import EvaluationRecord, Listener, StepRecord

FILE_NAME = "metrics.jsonl"
_LONGEST_LINE = 1 << 24


class MetricsFile(Listener):
    """Writes `metrics.jsonl` in the run's folder.

    A step's line has the fields of StepRecord; others have `event`: start (with `step`, where the run goes on from),
    evaluation (with the fields of EvaluationRecord), checkpoint, rewind (with `step`, where a spike made the run go on
    from), skipped_samples, other_data (with `step`, the last one on the samples before), end. What is not finite
    becomes null: JSON has no word for it.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE_NAME
        self._file = self.path.open("a", encoding="utf-8")

    def event(self, name: str, **fields: Any) -> None:
        self._write({"event": name, "time": time.time(), **fields})

    def step(self, record: StepRecord) -> None:
        self._write(asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self.event("evaluation", **asdict(record))

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(_finite(record)) + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class LossHistory:
    """Losses by step, where they were finite. training[s]: of step s. evaluation[s]: after s steps."""

    training: dict[int, float] = field(default_factory=dict)
    evaluation: dict[int, float] = field(default_factory=dict)

    def drop_after(self, step: int) -> None:
        """Forget what a run that goes on from `step` does again."""
        self.training = {s: loss for s, loss in self.training.items() if s <= step}
        self.evaluation = {s: loss for s, loss in self.evaluation.items() if s <= step}


def read_losses(path: Path) -> LossHistory:
    """The losses of the run that a metrics file ends with, over all its resumptions."""
    history = LossHistory()
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            try:
                record = decode_json(line, str(path), ValueError)
                event, step, loss = record.get("event"), int(record.get("step", 0)), record.get("loss")
                loss = None if loss is None else float(loss)
            except DECODING_ERRORS:  # the end of a line was lost with a killed process
                continue
            if event in ("start", "rewind"):
                history.drop_after(step)
            elif event == "evaluation" and loss is not None:
                history.evaluation[step] = loss
            elif event is None and loss is not None:
                history.training[step] = loss
    return history
