"""metrics.jsonl can be read back after several starts, kills and losses that are not finite."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from megapipe.training.observe.metrics import METRICS, MetricsFile, read_losses
from tests.training.records import evaluation_record, step_record


def refuse(word: str) -> NoReturn:
    raise AssertionError(f"{word} is not JSON")


def test_every_line_is_one_json_object_of_its_record(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.event("start", step=0)
    file.step(step_record(1, loss=math.nan, gradient_norm=math.inf, expert_load_variations=[math.nan], skipped=True))
    file.evaluation(evaluation_record(1))
    file.close()
    start, step, evaluation = [
        json.loads(line, parse_constant=refuse) for line in (tmp_path / METRICS).read_text().splitlines()
    ]
    assert (start["event"], start["step"]) == ("start", 0)
    not_finite = {"loss": None, "gradient_norm": None, "expert_load_variations": [None]}
    assert step == {**asdict(step_record(1, skipped=True)), **not_finite}
    assert evaluation == {**asdict(evaluation_record(1)), "event": "evaluation", "time": evaluation["time"]}


def test_losses_are_the_last_runs_across_resumes(tmp_path: Path) -> None:
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
    history = read_losses(tmp_path / METRICS)
    assert history.training == {1: 1.0, 2: 2.0, 3: 3.5}
    assert history.evaluation == {1: 11.0, 2: 12.0}
    assert history.dropped == [{1: 9.0}, {3: 3.0}], "what the run went back over"


def test_starts_with_a_lost_line_still_replace_steps(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in (1, 2, 3, 2):
        file.step(step_record(step, loss=float(step)))
    history = read_losses(tmp_path / METRICS)
    assert history.training == {1: 1.0, 2: 2.0}
    assert history.dropped == [{2: 2.0, 3: 3.0}]
