"""The learning rate of each step against torch's schedulers, and the loss scale against torch's own rule."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from megapipe.config import ConfigError
from megapipe.config.optimizer import LossScaleConfig, OptimizerConfig
from megapipe.config.run import PretrainConfig
from megapipe.optim.scaling import LossScaleError, LossScaler, learning_rate, learning_rate_problems
from megapipe.training.validation import validate

PEAK, FLOOR = 3e-4, 0.1
Decay = Literal["constant", "linear", "cosine", "wsd"]


def rates_of_torch(decay: Decay, warmup: int, length: int, steps: int) -> list[float]:
    """Learning rates of steps 1 to `steps`: torch's warm-up and then torch's decay over `length` steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    rising = LinearLR(optimizer, start_factor=1 / warmup, end_factor=1.0, total_iters=warmup - 1)
    falling: LRScheduler
    if decay == "cosine":
        falling = CosineAnnealingLR(optimizer, T_max=length, eta_min=PEAK * FLOOR)
    else:
        falling = LinearLR(optimizer, start_factor=1.0, end_factor=FLOOR, total_iters=length)
    scheduler = SequentialLR(optimizer, [rising, falling], milestones=[warmup - 1])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [2, 5, 20])
@pytest.mark.parametrize("decay_steps", [None, 60])
def test_equals_torchs_schedulers(decay: Decay, warmup: int, decay_steps: int | None) -> None:
    total = 80
    config = OptimizerConfig(
        learning_rate=PEAK, floor=FLOOR, decay=decay, warmup_steps=warmup, decay_steps=decay_steps
    )
    stop = total if decay_steps is None else decay_steps
    expected = rates_of_torch(decay, warmup, stop - warmup, stop)
    assert [learning_rate(config, step, total) for step in range(1, stop + 1)] == pytest.approx(expected, rel=1e-9)
    assert learning_rate(config, stop, total) == PEAK * FLOOR
    assert learning_rate(config, total + 9, total) == PEAK * FLOOR


def test_wsd_stays_then_decays_linearly_to_the_end() -> None:
    config = OptimizerConfig(learning_rate=1.0, floor=0.2, decay="wsd", warmup_steps=2, decay_steps=4)
    rates = [learning_rate(config, step, 10) for step in range(1, 13)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    config.decay_steps = None
    assert learning_rate(config, 90, 100) == 1.0
    assert learning_rate(config, 95, 100) == pytest.approx(0.6)
    assert learning_rate(config, 100, 100) == pytest.approx(0.2)


@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(0, 50),
    st.one_of(st.none(), st.integers(1, 100)),
    st.floats(0, 1),
    st.integers(1, 100),
)
def test_rises_in_a_line_and_never_again(
    decay: Decay, warmup: int, decay_steps: int | None, floor: float, total: int
) -> None:
    """To the peak, unless the run ends in its warm-up."""
    config = OptimizerConfig(learning_rate=1.0, decay=decay, warmup_steps=warmup, decay_steps=decay_steps, floor=floor)
    if learning_rate_problems(config, total):
        return
    rates = [learning_rate(config, step, total) for step in range(1, total + 1)]
    assert rates[:warmup] == [step / warmup for step in range(1, min(warmup, total) + 1)]
    falling = rates[max(warmup, 1) - 1 :]
    assert falling[:1] in ([1.0], [])
    assert falling == sorted(falling, reverse=True)
    assert all(rate >= (1.0 if decay == "constant" else floor - 1e-12) for rate in falling)


@pytest.mark.parametrize(
    ("fields", "total"),
    [
        ({}, 100),
        ({"decay": "wsd", "warmup_steps": 90}, 100),
        ({"decay": "constant", "warmup_steps": 500}, 100),
        *(({"decay": decay, "warmup_steps": 20}, 4) for decay in ("linear", "cosine", "wsd")),
    ],
)
def test_settings_that_agree_are_not_refused(fields: dict[str, Any], total: int) -> None:
    """A run may end in its warm-up."""
    assert learning_rate_problems(OptimizerConfig(**fields), total) == []


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step 0"):
        learning_rate(OptimizerConfig(), 0, 100)


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
