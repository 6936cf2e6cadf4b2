"""Steps of flat buffers against torch's optimizers and clipping, bit for bit, however the buffers are cut."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapipe.config.optimizer import OptimizerConfig
from megapipe.optim.muon import make_optimizer
from megapipe.optim.optimizer import BLOCK, AdamW, ParameterGroup, adamw_step
from megapipe.optim.scaling import clip_coefficient
from megapipe.spec.parameters import SEGMENT_ALIGNMENT

RATES = [3e-2, 1e-2, 5e-2, 2e-3, 3e-3]
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
    if config.name == "sgd":
        optimizer = torch.optim.SGD([parameter], momentum=config.momentum, weight_decay=config.weight_decay)
    else:
        own = {"betas": config.betas, "eps": config.epsilon, "weight_decay": config.weight_decay}
        optimizer = torch.optim.AdamW([parameter], fused=fused, **own)
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
    update = AdamW(step=1, learning_rate=3e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    adamw_step([], [], [], [], update)
    empty = torch.empty(0)
    adamw_step([empty], [empty], [empty], [empty], update)
    assert empty.shape == (0,)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step is 0"):
        AdamW(step=0, learning_rate=3e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)


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
