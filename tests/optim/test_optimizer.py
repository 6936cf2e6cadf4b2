"""Optimizers against torch: over UnitStates and versions; steps of flat buffers, and clipping, bit for bit."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapipe.config.optimizer import MuonConfig, OptimizerConfig
from megapipe.config.run import PretrainConfig
from megapipe.kernels.reference.optimizer import Coefficients
from megapipe.layout.units import Unit, UnitCosts
from megapipe.optim.muon import make_optimizer
from megapipe.optim.optimizer import BLOCK, FlatOptimizer, ParameterGroup, adamw_step
from megapipe.optim.scaling import clip_coefficient, learning_rate_problems
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import SEGMENT_ALIGNMENT, Init, ParameterSpec

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
RATES = [3e-2, 1e-2, 5e-2, 2e-3, 3e-3]


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


def torchs_optimizer(
    config: OptimizerConfig, decayed: list[Tensor], others: Sequence[Tensor] = (), fused: bool = False
) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": config.weight_decay}]
    groups += [{"params": [each], "weight_decay": 0.0} for each in others]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=1.0, betas=config.betas, eps=config.epsilon, fused=fused)


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "sgd", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_versions", [1, 2])
def test_equals_torchs_optimizer_with_two_groups(
    config: OptimizerConfig, dtype: torch.dtype, num_versions: int
) -> None:
    state, optimizer = unit(dtype, num_versions), make_optimizer(config)
    expected = {name: torch.nn.Parameter(value.clone()) for name, value in values(state, state.master).items()}
    torchs = torchs_optimizer(config, [expected["layer.weight"]], [expected["layer.bias"]])
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
        (True, OptimizerConfig(name="sgd"), 0),
        (True, OptimizerConfig(name="sgd", momentum=0.9), 4 * (2048 + 128)),
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
        ({"name": "sgd", "moment_dtype": "bf16"}, "moment_dtype is bf16 but optimizer.name is sgd; only adamw"),
    ],
)
def test_settings_that_contradict_each_other_are_named(changes: dict[str, Any], message: str) -> None:
    config = OptimizerConfig(**changes)
    [problem] = config.problems() + learning_rate_problems(config, 100)
    assert message in problem


ADAMW = [OptimizerConfig(name="adamw", betas=(0.9, 0.95), weight_decay=decay) for decay in (0.0, 0.1)]
SGD = [
    OptimizerConfig(name="sgd", momentum=momentum, weight_decay=decay)
    for momentum in (0.0, 0.9)
    for decay in (0.0, 0.1)
]
IN_TORCH = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq", "momentum": "momentum_buffer"}


def random_tensors(count: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """A parameter, and one gradient per step, of different magnitudes."""
    generator = torch.Generator().manual_seed(count)
    parameter, *gradients = torch.randn(1 + len(RATES), count, generator=generator, dtype=dtype).to(device)
    return parameter, [gradient * 10 ** (step - 2) for step, gradient in enumerate(gradients)]


def train(
    config: OptimizerConfig, tensors: tuple[Tensor, list[Tensor]], cuts: Sequence[int], coefficients: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The parameter after every step, and the moments after all, every buffer cut into pieces of these lengths."""
    parameter, gradients = tensors[0].clone(), tensors[1]
    optimizer = make_optimizer(config)
    moments = {name: torch.zeros_like(parameter) for name in optimizer.moment_names}
    history = []
    for step, (gradient, rate, coefficient) in enumerate(zip(gradients, RATES, coefficients, strict=True), 1):
        given = gradient.clone()
        parameters, own, *kept = (
            list(torch.split(each, list(cuts))) for each in (parameter, given, *moments.values())
        )
        named = dict(zip(moments, kept, strict=True))
        optimizer._step(ParameterGroup(step, parameters, own, named, config.weight_decay, []), rate, coefficient)
        history.append(parameter.clone())
        assert config.name == "adamw" or torch.equal(given, gradient)
    return {"parameter": torch.stack(history), **moments}


def trained_by_torch(
    config: OptimizerConfig, tensors: tuple[Tensor, list[Tensor]], fused: bool = False, limit: float = math.inf
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The same by torch, which clips norms above the limit; and the norms."""
    parameter = torch.nn.Parameter(tensors[0].clone())
    optimizer = torchs_optimizer(config, [parameter], fused=fused)
    history, norms = [], []
    for gradient, rate in zip(tensors[1], RATES, strict=True):
        parameter.grad = gradient.clone()
        norms.append(torch.nn.utils.clip_grad_norm_([parameter], limit))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        history.append(parameter.detach().clone())
    state = optimizer.state[parameter]
    moments = {name: state[theirs] for name, theirs in IN_TORCH.items() if state.get(theirs) is not None}
    return {"parameter": torch.stack(history), **moments}, norms


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    ("device", "config", "dtype", "count"),
    [
        *(("cpu", config, torch.float32, n) for config in ADAMW for n in (2 * BLOCK + 64, SEGMENT_ALIGNMENT - 1)),
        *(("cpu", config, dtype, BLOCK + 4099) for config in SGD for dtype in (torch.float32, torch.float64)),
        *(pytest.param("cuda", each, torch.float32, 2 * BLOCK + 4099, marks=pytest.mark.gpu) for each in ADAMW + SGD),
        *(pytest.param("cuda", each, torch.float64, BLOCK + 4099, marks=pytest.mark.gpu) for each in SGD),
    ],
)
def test_steps_have_the_bits_of_torch(device: str, config: OptimizerConfig, dtype: torch.dtype, count: int) -> None:
    """AdamW is compared with torch's fused one, except for fewer than SEGMENT_ALIGNMENT elements."""
    tensors = random_tensors(count, device, dtype)
    expected, _ = trained_by_torch(config, tensors, fused=count >= SEGMENT_ALIGNMENT)
    assert_same_bits(train(config, tensors, [count], [torch.ones((), device=device)] * len(RATES)), expected)


@pytest.mark.parametrize("config", [ADAMW[1], SGD[1]], ids=["adamw", "sgd"])
def test_clipped_steps_equal_torchs_clipping_and_step(config: OptimizerConfig) -> None:
    """torch's AdamW divides by the coefficient's reciprocal, where its clipping multiplies."""
    tensors = random_tensors(4099)
    expected, norms = trained_by_torch(config, tensors, limit=30.0)
    actual = train(config, tensors, [4099], [clip_coefficient(norm, 30.0) for norm in norms])
    if config.name == "sgd":
        assert_same_bits(actual, expected)
    torch.testing.assert_close(actual["parameter"], expected["parameter"], rtol=1e-5, atol=1e-6)


ANYWHERE = st.lists(st.integers(1, 200), min_size=1, max_size=12)
BETWEEN_SEGMENTS = st.lists(
    st.integers(1, 4).map(lambda multiple: multiple * SEGMENT_ALIGNMENT), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(BETWEEN_SEGMENTS, st.lists(st.integers(1, SEGMENT_ALIGNMENT - 1), max_size=1), ANYWHERE)
def test_cuts_of_buffers_change_no_bit(between: list[int], rest: list[int], anywhere: list[int]) -> None:
    """SGD may be cut anywhere."""
    for config, cuts in ((ADAMW[1], between + rest), (SGD[3], anywhere)):
        assert_same_after_cuts(config, cuts)


@pytest.mark.parametrize(
    ("device", "length"),
    [("cpu", SEGMENT_ALIGNMENT), ("cpu", BLOCK), ("cpu", 2 * BLOCK)]
    + [pytest.param("cuda", length, marks=pytest.mark.gpu) for length in (1, 13, 1000, BLOCK + 7)],
)
def test_equal_pieces_of_long_buffers_give_equal_bits(device: str, length: int) -> None:
    count = 3001 if length == 1 else 2 * BLOCK + 77
    assert_same_after_cuts(ADAMW[1], [length] * (count // length) + [count % length] * (count % length > 0), device)


def assert_same_after_cuts(config: OptimizerConfig, cuts: list[int], device: str = "cpu") -> None:
    tensors = random_tensors(sum(cuts), device)
    coefficients = [torch.tensor(0.37, device=device)] * len(RATES)
    whole = train(config, tensors, [sum(cuts)], coefficients)
    assert_same_bits(train(config, tensors, cuts, coefficients), whole)


def test_an_empty_list_and_an_empty_shard_are_fine() -> None:
    update = Coefficients(step=1, learning_rate=3e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    adamw_step([], [], [], [], update)
    empty = torch.empty(0)
    adamw_step([empty], [empty], [empty], [empty], update)
    assert empty.shape == (0,)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step is 0"):
        Coefficients(step=0, learning_rate=3e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("size", [1e-3, 1.0, 17.0, 1e6])
def test_clipping_has_the_bits_of_torch(size: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000))
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * size
    parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 2.5)
    assert torch.equal(parameter.grad, gradient * clip_coefficient(norm, 2.5))


@pytest.mark.parametrize(("norm", "expected"), [(0.0, 1.0), (0.999, 1.0), (math.inf, 0.0)])
def test_only_norms_above_the_limit_are_clipped(norm: float, expected: float) -> None:
    assert clip_coefficient(norm, 1.0).item() == expected
    assert math.isnan(clip_coefficient(math.nan, 1.0).item())


def test_norms_may_be_floats_or_tensors_of_either_precision() -> None:
    single = clip_coefficient(torch.tensor(3.0), 1.0)
    double = clip_coefficient(torch.tensor(3.0, dtype=torch.float64), 1.0)
    plain = clip_coefficient(3.0, 1.0)
    assert single.dtype == double.dtype == plain.dtype == torch.float32
    assert single.shape == double.shape == plain.shape == ()
    assert torch.equal(double, plain)
    torch.testing.assert_close(single, plain, rtol=2e-7, atol=0)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_not_positive_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.clip_norm"):
        clip_coefficient(1.0, limit)
