"""The loss scale against torch's own rule, and what it does beyond that."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.optimizer import LossScaleConfig
from megapipe.config.run import PretrainConfig
from megapipe.optim.scaling import LossScaleError, LossScaler
from megapipe.training.validation import validate

OUTCOMES = st.lists(st.booleans(), max_size=40)
NO_END = 1000


def scales(scaler: LossScaler, outcomes: Sequence[bool], lag: int = 0) -> list[float]:
    """Scales of all steps, each asked for when `lag` steps are under way."""
    used = []
    for step in range(len(outcomes)):
        used.append(scaler.scale(step))
        if step >= lag:
            scaler.observe(step - lag, outcomes[step - lag])
    return used


@given(OUTCOMES, st.integers(1, 5))
def test_without_hysteresis_it_is_torchs_rule(outcomes: list[bool], window: int) -> None:
    config = LossScaleConfig(window=window, hysteresis=1, minimum=2.0**-100, patience=NO_END)
    scale, growth = torch.tensor(config.initial), torch.zeros((), dtype=torch.int32)
    expected = []
    for skipped in outcomes:
        expected.append(scale.item())
        torch._amp_update_scale_(scale, growth, torch.tensor(float(skipped)), 2.0, 0.5, window)
    assert scales(LossScaler(config), outcomes) == expected


def test_hysteresis_tolerates_overflows_until_the_scale_grows() -> None:
    config = LossScaleConfig(initial=64.0, window=2, hysteresis=3, minimum=8.0)
    skipped = [True, False, True, True, True, False, False, True, True, True, True, True, True, False]
    expected = [64, 64, 64, 64, 32, 16, 16, 32, 32, 32, 16, 8, 8, 8]
    assert scales(LossScaler(config), [bool(each) for each in skipped]) == expected


@given(OUTCOMES, st.integers(0, 1), st.data())
def test_a_resumed_scaler_goes_on_as_if_never_stopped(outcomes: list[bool], lag: int, data: st.DataObject) -> None:
    """Stopping ends the current step; later steps must not know more than they would have."""
    config = LossScaleConfig(window=3, hysteresis=2, minimum=2.0**-100, patience=NO_END)
    expected = scales(LossScaler(config, lag), outcomes, lag)
    stop = data.draw(st.integers(0, len(outcomes)))
    first, second = LossScaler(config, lag), LossScaler(config, lag)
    assert scales(first, outcomes[:stop], lag) == expected[:stop]
    for step in range(max(0, stop - lag), stop):
        first.observe(step, outcomes[step])
    second.restore(first.state(), stop)
    for step in range(stop, len(outcomes)):
        assert second.scale(step) == expected[step]
        if step - lag >= stop:
            second.observe(step - lag, outcomes[step - lag])


@pytest.mark.parametrize("kind", ["dynamic", "constant"])
def test_too_many_skips_at_the_lowest_scale_end_runs(kind: str) -> None:
    scaler = LossScaler(LossScaleConfig(kind=kind, initial=4.0, minimum=4.0, patience=3))  # type: ignore[arg-type]
    scales(scaler, [True, True, False, True, True])
    with pytest.raises(LossScaleError, match=r"3 steps in a row, up to step 6, .* loss scale 4, the lowest allowed"):
        scaler.observe(5, True)


def test_a_constant_scale_stays() -> None:
    config = LossScaleConfig(kind="constant", initial=128.0)
    assert scales(LossScaler(config), [True, False] * 5) == [128.0] * 10
    resumed = LossScaler(config)
    resumed.restore(LossScaler(LossScaleConfig()).state(), 4)
    assert resumed.scale(4) == 128.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "loss_scale.window is 0; it must be at least 1"),
        ({"minimum": 0.0}, "loss_scale.minimum is 0.0; it must be above 0"),
        ({"initial": 0.5}, "loss_scale.initial is 0.5; it must be at least loss_scale.minimum 1.0"),
        ({"kind": "constant", "initial": 0.0}, "loss_scale.initial is 0.0; it must be above 0"),
    ],
)
def test_wrong_values_are_refused(fields: dict[str, object], message: str) -> None:
    config = PretrainConfig(loss_scale=LossScaleConfig(**fields))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"loss_scale is set but training.precision is fp32(?s:.*){message}"):
        validate(config, 1)
