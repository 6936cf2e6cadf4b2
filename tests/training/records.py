"""Records of runs for tests, made up or read."""

import json
from pathlib import Path
from typing import Any

from megapipe.training.observe.records import EvaluationRecord, StepRecord

TIMES = ("time", "seconds", "data_seconds", "mfu")
"""Fields of records that differ between two equal runs."""


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def steps(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a run's steps."""
    return [record for record in records(directory) if "event" not in record]


def comparable_steps(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a run's steps without the fields that differ between two equal runs."""
    return [{name: value for name, value in step.items() if name not in TIMES} for step in steps(directory)]


def events(directory: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of a run's events of one name."""
    return [record for record in records(directory) if record.get("event") == name]


def step_record(step: int, **fields: Any) -> StepRecord:
    """A step of 4 samples of 8 tokens that took half a second; `fields` override."""
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0 - step / 10,
        "learning_rate": 1e-3,
        "gradient_norm": 0.75,
        "skipped": False,
        "samples": 4,
        "consumed_samples": 4 * step,
        "tokens": 32,
        "loss_tokens": 30,
        "seconds": 0.5,
        "data_seconds": 0.1,
        "mfu": 0.25,
    }
    return StepRecord(**{**values, **fields})


def evaluation_record(step: int, loss: float = 4.25) -> EvaluationRecord:
    """An evaluation after `step` steps."""
    return EvaluationRecord(step=step, loss=loss, perplexity=70.1, loss_tokens=512, seconds=1.5)
