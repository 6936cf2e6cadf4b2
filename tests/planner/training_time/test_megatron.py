"""Megatron-LM's training time and the paper's own figures (arXiv 2104.04473, section 5.1)."""

import pytest

from megapipe.planner.command.train_time import training_seconds

DAY = 86400.0


@pytest.mark.parametrize(
    ("parameters", "tokens", "devices", "rate", "days"),
    [(175e9, 300e9, 1024, 140e12, 33.9), (1.008e12, 450e9, 3072, 163e12, 83.9)],
)
def test_training_times_are_those_of_the_paper(
    parameters: float, tokens: float, devices: int, rate: float, days: float
) -> None:
    assert round(training_seconds(parameters, tokens, devices, rate) / DAY, 1) == days
