"""The learning rate of each step against torch's schedulers, and what all its forms have in common."""

from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from megapipe.config.optimizer import OptimizerConfig
from megapipe.optim.scaling import learning_rate, learning_rate_problems

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
