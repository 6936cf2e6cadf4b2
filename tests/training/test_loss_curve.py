"""The loss curve: a PNG of the run, whatever of it there is."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.training.observe.metrics import LossHistory, References, draw_loss_curve, draw_loss_curves, smoothed


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
    draw_loss_curve(path, history, References(uniform=4.1, unigram=3.5, num_tokens=10), title="run")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20], "big") == 1200
    assert int.from_bytes(content[20:24], "big") == 675


def test_a_picture_of_several_runs(tmp_path: Path) -> None:
    rates = {"1f1b": 9.0, "2bw": 8.0}
    runs = {
        name: LossHistory({step: rate / step for step in range(1, 40)}, {20: rate}) for name, rate in rates.items()
    }
    path, alone = tmp_path / "curves.png", tmp_path / "alone.png"
    references = References(uniform=4.1, unigram=3.5, num_tokens=10)
    draw_loss_curves(path, runs, references, title="runs")
    draw_loss_curves(alone, {"1f1b": runs["1f1b"]}, references, title="runs")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.read_bytes() != alone.read_bytes()
