"""metrics.jsonl can be read back after several starts, kills and losses that are not finite; and its loss curve."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from megapipe.training.observe.metrics import (
    METRICS,
    LossHistory,
    MetricsFile,
    References,
    draw_loss_curves,
    read_losses,
    smoothed,
)
from tests.training.records import evaluation_record, step_record

REFERENCES = References(uniform=4.1, unigram=3.5, num_tokens=10)


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


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=400))
def test_smoothing_averages_a_window_cut_at_the_ends(values: list[float]) -> None:
    reach = max(1, len(values) // 100)
    expected = [np.mean(values[max(0, place - reach) : place + reach + 1]) for place in range(len(values))]
    np.testing.assert_allclose(smoothed(np.array(values)), expected, atol=1e-9)


@pytest.mark.parametrize(
    "history",
    [
        LossHistory({step: 9.0 / step for step in range(1, 40)}, {10: 2.0, 20: 1.0}),
        LossHistory({1: 3.0}),
        LossHistory(),
    ],
    ids=["run", "one step", "nothing finite"],
)
def test_a_picture_of_every_run(tmp_path: Path, history: LossHistory) -> None:
    path = tmp_path / "curve.png"
    draw_loss_curves(path, {"": history}, REFERENCES, title="run")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20], "big") == 1200
    assert int.from_bytes(content[20:24], "big") == 675


def test_a_short_runs_curve_has_whole_steps_on_its_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (figures.append(self), path.touch()))
    runs = {"": LossHistory({1: 3.0, 2: 2.5, 3: 2.0})}
    draw_loss_curves(tmp_path / "curve.png", runs, REFERENCES, title="run")
    (figure,) = figures
    assert [tick for tick in figure.axes[0].get_xticks() if tick % 1] == []


def test_a_picture_of_several_runs(tmp_path: Path) -> None:
    runs = {
        name: LossHistory({step: rate / step for step in range(1, 40)}, {20: rate})
        for name, rate in (("1f1b", 9.0), ("2bw", 8.0))
    }
    path, alone = tmp_path / "curves.png", tmp_path / "alone.png"
    draw_loss_curves(path, runs, REFERENCES, title="runs")
    draw_loss_curves(alone, {"1f1b": runs["1f1b"]}, REFERENCES, title="runs")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.read_bytes() != alone.read_bytes()
