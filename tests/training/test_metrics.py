"""metrics.jsonl: what is written can be read back, over resumptions, kills and losses that are not finite."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from megapipe.training.metrics import MetricsFile, read_losses
from tests.training.records import evaluation_record, step_record


def refuse(word: str) -> NoReturn:
    raise AssertionError(f"{word} is not JSON")


def test_every_line_is_one_json_object_of_its_record(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run")
    file.event("start", step=0)
    file.step(step_record(1, loss=math.nan, gradient_norm=math.inf, skipped=True))
    file.evaluation(evaluation_record(1))
    file.close()
    start, step, evaluation = [json.loads(line, parse_constant=refuse) for line in file.path.read_text().splitlines()]
    assert (start["event"], start["step"]) == ("start", 0)
    assert step == {**asdict(step_record(1, skipped=True)), "loss": None, "gradient_norm": None}
    assert evaluation == {**asdict(evaluation_record(1)), "event": "evaluation", "time": evaluation["time"]}


def test_losses_are_those_of_the_last_run_over_its_resumptions(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.event("start", step=0)
    file.step(step_record(1, loss=9.0))
    file.event("start", step=0)  # another run in the same folder
    for step in (1, 2, 3):
        file.step(step_record(step, loss=float(step)))
        file.evaluation(evaluation_record(step, loss=10.0 + step))
    file.event("checkpoint", step=2, path="somewhere")
    file.event("start", step=2)  # goes on from the checkpoint after step 2
    file.step(step_record(3, loss=3.5))
    file.step(step_record(4, loss=math.nan))
    file.event("end", status=0, step=4)
    file.close()
    history = read_losses(file.path)
    assert history.training == {1: 1.0, 2: 2.0, 3: 3.5}
    assert history.evaluation == {1: 11.0, 2: 12.0}


def test_half_a_line_of_a_killed_run_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n')
    assert read_losses(path).training == {1: 2.0, 3: 1.0}
