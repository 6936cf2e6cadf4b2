import math
from typing import Literal

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


def test_warm_up_is_the_same_line_for_every_decay() -> None:
    for decay in ("constant", "linear", "cosine", "wsd"):
        config = OptimizerConfig(learning_rate=1.0, decay=decay, warmup_steps=4)  # type: ignore[arg-type]
        assert [learning_rate(config, step, 100) for step in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays_at_the_peak() -> None:
    config = OptimizerConfig(learning_rate=1.0, decay="constant")
    assert {learning_rate(config, step, 10) for step in range(1, 30)} == {1.0}


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
def test_rises_to_the_peak_and_never_again(
    decay: Decay, warmup: int, decay_steps: int | None, floor: float, total: int
) -> None:
    config = OptimizerConfig(learning_rate=1.0, decay=decay, warmup_steps=warmup, decay_steps=decay_steps, floor=floor)
    if learning_rate_problems(config, total) or warmup > total:
        return
    rates = [learning_rate(config, step, total) for step in range(1, total + 1)]
    top = max(warmup, 1)
    assert max(rates) == rates[top - 1] <= 1.0
    assert [0.0, *rates[: top - 1]] == sorted({0.0, *rates[: top - 1]})
    assert rates[top - 1 :] == sorted(rates[top - 1 :], reverse=True)
    assert all(rate >= floor - 1e-12 for rate in rates[top - 1 :])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "optimizer.learning_rate is 0.0"),
        ({"learning_rate": math.nan}, "optimizer.learning_rate is nan"),
        ({"floor": 1.5}, "optimizer.floor is 1.5"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps is -1"),
        ({"decay_steps": 0}, "optimizer.decay_steps is 0"),
        (
            {"warmup_steps": 100, "decay_steps": 100},
            "optimizer.warmup_steps 100 leaves no room for the cosine decay, steps 100 to 100",
        ),
        ({"warmup_steps": 50, "decay_steps": 40}, "steps 50 to 40"),
        ({"decay": "wsd", "warmup_steps": 91}, "leaves no room for the wsd decay, steps 90 to 100"),
        ({"decay": "wsd", "decay_steps": 101}, "steps -1 to 100"),
    ],
)
def test_settings_that_contradict_each_other_are_named(changes: dict[str, object], message: str) -> None:
    config = OptimizerConfig(**changes)  # type: ignore[arg-type]
    [problem] = config.problems() + learning_rate_problems(config, 100)
    assert message in problem


def test_settings_that_agree_are_not_refused() -> None:
    assert learning_rate_problems(OptimizerConfig(), 100) == []
    assert learning_rate_problems(OptimizerConfig(decay="wsd", warmup_steps=90), 100) == []
    assert learning_rate_problems(OptimizerConfig(decay="constant", warmup_steps=500), 100) == []


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
def test_a_run_may_end_in_its_warmup(decay: Decay) -> None:
    config = OptimizerConfig(learning_rate=1.0, decay=decay, warmup_steps=20)
    assert learning_rate_problems(config, 4) == []
    assert [learning_rate(config, step, 4) for step in range(1, 5)] == pytest.approx([0.05, 0.1, 0.15, 0.2])


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step 0"):
        learning_rate(OptimizerConfig(), 0, 100)
