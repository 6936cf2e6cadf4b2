"""Megatron-LM's closed forms beside the paper's own figures (arXiv 2104.04473, table 1 and section 5.1)."""

import pytest

from megapipe.planner.training_time.megatron import GptShape, training_seconds

DAY = 86400.0


@pytest.mark.parametrize(
    ("billions", "hidden", "layers"),
    [(1.7, 2304, 24), (7.5, 4096, 36), (39.1, 8192, 48), (145.6, 12288, 80), (529.6, 20480, 105)],
)
def test_parameters_are_those_of_the_table(billions: float, hidden: int, layers: int) -> None:
    assert round(GptShape(layers, hidden, 51200, 2048).parameters / 1e9, 1) == billions


def test_an_iteration_of_the_145_billion_model_takes_its_time_at_the_rate_of_the_table() -> None:
    flops = GptShape(80, 12288, 51200, 2048).flops(2304)
    assert flops == pytest.approx(5.642e18, rel=1e-4)
    assert flops / (1536 * 148e12) == pytest.approx(24.8, abs=0.05)


@pytest.mark.parametrize(
    ("parameters", "tokens", "devices", "rate", "days"),
    [(175e9, 300e9, 1024, 140e12, 33.9), (1.008e12, 450e9, 3072, 163e12, 83.9)],
)
def test_training_times_are_those_of_the_paper(
    parameters: float, tokens: float, devices: int, rate: float, days: float
) -> None:
    assert round(training_seconds(parameters, tokens, devices, rate) / DAY, 1) == days


def test_values_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match=r"hidden_size must be an integer of at least 1, got 0"):
        GptShape(1, 0, 10, 10)
    with pytest.raises(ValueError, match=r"tokens must be a finite number above 0, got -1"):
        training_seconds(1e9, -1, 8, 1e12)
