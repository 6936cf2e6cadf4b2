"""Optimizers over UnitStates against torch's own, with their two groups, over versions and across a restart."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.optimizer import MuonConfig, OptimizerConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.units import Unit, UnitCosts
from megapipe.optim.muon import make_optimizer
from megapipe.optim.optimizer import FlatOptimizer
from megapipe.optim.scaling import learning_rate_problems
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import Init, ParameterSpec

SPECS = [
    ParameterSpec("layer.weight", (5, 7), None, Init("normal", 0.4), decay=True, matrix=True),
    ParameterSpec("layer.bias", (7,), None, Init("normal", 0.4), decay=False, matrix=False),
]
CONFIGS = [
    OptimizerConfig(name="adamw"),
    OptimizerConfig(name="sgd"),
    OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.03),
]
MUON: dict[str, Any] = {"name": "muon"}
RATES = [1e-2, 3e-2, 2e-2, 5e-3, 1e-3, 4e-2]


def unit(dtype: torch.dtype, num_versions: int) -> UnitState:
    state = UnitState("layer", SPECS, compute_dtype=dtype, num_versions=num_versions)
    state.initialize(7)
    return state


def values(state: UnitState, flat: Tensor) -> dict[str, Tensor]:
    return {segment.spec.name: state.owned_view(flat, segment) for segment in state.table}


def gradients(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {spec.name: torch.randn(spec.shape, generator=generator, dtype=dtype) for spec in SPECS}


def take_steps(optimizer: FlatOptimizer, state: UnitState, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step, state.master.dtype).items():
            values(state, state.gradients[0])[name].copy_(gradient)
        optimizer.update([state], state.newest + 1, RATES[step], torch.tensor(0.25))


def torchs_optimizer(config: OptimizerConfig, weight: Tensor, bias: Tensor) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [weight], "weight_decay": config.weight_decay},
        {"params": [bias], "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=1.0, betas=config.betas, eps=config.epsilon)


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "sgd", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_versions", [1, 2])
def test_equals_torchs_optimizer_with_two_groups(
    config: OptimizerConfig, dtype: torch.dtype, num_versions: int
) -> None:
    state, optimizer = unit(dtype, num_versions), make_optimizer(config)
    expected = {name: torch.nn.Parameter(value.clone()) for name, value in values(state, state.master).items()}
    torchs = torchs_optimizer(config, expected["layer.weight"], expected["layer.bias"])
    for step, rate in enumerate(RATES):
        take_steps(optimizer, state, range(step, step + 1))
        for name, gradient in gradients(step, dtype).items():
            expected[name].grad = gradient * 0.25
        for group in torchs.param_groups:
            group["lr"] = rate
        torchs.step()
        for name, value in values(state, state.master).items():
            if config.name == "adamw" and dtype == torch.float32:  # torch's fused kernel is not its default on CPUs
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(value, expected[name])


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "sgd", "momentum"])
def test_goes_on_exactly_from_its_named_moments(config: OptimizerConfig) -> None:
    whole, straight = unit(torch.float32, 2), make_optimizer(config)
    take_steps(straight, whole, range(6))

    before, first = unit(torch.float32, 2), make_optimizer(config)
    take_steps(first, before, range(3))
    assert tuple(before.moments) == first.moment_names
    after, second = unit(torch.float32, 2), make_optimizer(config)
    for old, new in zip(before.weights, after.weights, strict=True):
        new.copy_(old)
    after.newest = before.newest
    after.moments = {name: before.moments[name].clone() for name in second.moment_names}
    second.applied = dict(first.applied)
    take_steps(second, after, range(3, 6))
    for left, right in zip(whole.weights, after.weights, strict=True):
        assert torch.equal(left, right)
    for name in second.moment_names:
        assert torch.equal(whole.moments[name], after.moments[name])


@pytest.mark.parametrize("config", [*CONFIGS, OptimizerConfig(**MUON)], ids=["adamw", "sgd", "momentum", "muon"])
@pytest.mark.parametrize("num_versions", [1, 2])
def test_working_copies_follow_their_master(config: OptimizerConfig, num_versions: int) -> None:
    """Whether a step writes them or `publish` does, which then leaves them as they are."""
    state, optimizer = unit(torch.bfloat16, num_versions), make_optimizer(config)
    for step in range(2):
        take_steps(optimizer, state, range(step, step + 1))
        written = state.weights[state.newest % num_versions].clone()
        state.publish()
        assert state.working_copy is not None
        assert torch.equal(state.working_copy, state.master.bfloat16())
        assert torch.equal(written, state.working_copy) == optimizer.writes_copies


@pytest.mark.parametrize(
    ("master", "config", "moments"),
    [
        *((master, OptimizerConfig(), 8 * (2048 + 128)) for master in (True, False)),
        *((master, OptimizerConfig(moment_dtype="bf16"), 4 * (2048 + 128)) for master in (True, False)),
        (True, OptimizerConfig(**MUON), 4 * 2048 + 8 * 128),
    ],
)
def test_the_formula_counts_persistent_bytes(master: bool, config: OptimizerConfig, moments: int) -> None:
    """Muon has one moment for matrices."""
    init = Init("normal", 1.0)
    specs = tuple(ParameterSpec(str(m), (64, 32 if m else 2), None, init, decay=True, matrix=m) for m in (True, False))
    state = UnitState("u", specs, compute_dtype=torch.bfloat16, master_weights=master)
    make_optimizer(config).update([state], 1, 1e-3, torch.tensor(1.0))
    kept = {*state.weights, state.master, *state.gradients, *state.moments.values()}
    storages = {each.data_ptr(): each.nbytes for each in kept}
    run = PretrainConfig(optimizer=config)
    run.training = replace(run.training, precision="bf16", master_weights=master)
    expected = UnitCosts(run, replicas=1).state(Unit(specs))
    assert expected.moments == moments
    assert sum(storages.values()) == expected.total == (2048 + 128) * (6 + 4 * master) + moments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "optimizer.learning_rate is 0.0"),
        ({"learning_rate": math.nan}, "optimizer.learning_rate is nan"),
        ({"floor": 1.5}, "optimizer.floor is 1.5"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps is -1"),
        ({"decay_steps": 0}, "optimizer.decay_steps is 0"),
        ({"warmup_steps": 100, "decay_steps": 100}, "warmup_steps 100 leaves no room for the cosine decay, steps 100"),
        ({"warmup_steps": 50, "decay_steps": 40}, "steps 50 to 40"),
        ({"decay": "wsd", "warmup_steps": 91}, "leaves no room for the wsd decay, steps 90 to 100"),
        ({"decay": "wsd", "decay_steps": 101}, "steps -1 to 100"),
        ({"name": "sgd", "momentum": 1.0}, "optimizer.momentum is 1.0; it must be at least 0 and below 1"),
        ({"momentum": 0.9}, "optimizer.momentum is 0.9 but optimizer.name is adamw"),
        ({**MUON, "muon": MuonConfig(momentum=1.0)}, "optimizer.muon.momentum is 1.0; it must be"),
        ({**MUON, "muon": MuonConfig(newton_schulz_steps=0)}, "newton_schulz_steps is 0; it must be from 1 to 99"),
        ({**MUON, "muon": MuonConfig(elementwise_rate=0)}, "elementwise_rate is 0; it must be above 0"),
        ({**MUON, "momentum": 0.9}, "whose momentum is optimizer.muon.momentum; set that instead"),
        ({"muon": MuonConfig(momentum=0.9)}, "optimizer.muon is set but optimizer.name is adamw"),
        ({**MUON, "moment_dtype": "bf16"}, "moment_dtype is bf16 but optimizer.name is muon; only adamw supports"),
        (
            {"name": "sgd", "moment_dtype": "bf16"},
            "moment_dtype is bf16 but optimizer.name is sgd; only adamw supports",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named(changes: dict[str, Any], message: str) -> None:
    config = OptimizerConfig(**changes)
    [problem] = config.problems() + learning_rate_problems(config, 100)
    assert message in problem
