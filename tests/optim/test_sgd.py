import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapipe.config.optimizer import OptimizerConfig
from megapipe.optim.optimizer import BLOCK, MOMENTUM, FlatSGD, ParameterGroup
from megapipe.optim.scaling import clip_coefficient

LEARNING_RATES = [3e-2, 1e-2, 5e-2, 2e-3]
DEVICES = [
    pytest.param(torch.device("cpu"), id="cpu"),
    pytest.param(torch.device("cuda"), id="cuda", marks=pytest.mark.gpu),
]
UPDATES = [(0.0, 0.0), (0.0, 0.1), (0.9, 0.0), (0.9, 0.1)]
ONE = torch.ones(())


def sgd_step(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    numbers: tuple[float, float, float],
    scale: Tensor = ONE,
) -> None:
    """One step of the optimizer. numbers: learning rate, momentum, weight decay."""
    rate, momentum, decay = numbers
    moments = {MOMENTUM: momenta} if momentum else {}
    optimizer = FlatSGD(OptimizerConfig(name="sgd", momentum=momentum, weight_decay=decay))
    optimizer._step(ParameterGroup(1, parameters, gradients, moments, decay, []), rate, scale)


def random_tensors(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """A parameter and one gradient per step."""
    generator = torch.Generator().manual_seed(count)
    parameter, *gradients = torch.randn(1 + len(LEARNING_RATES), count, generator=generator, dtype=dtype).unbind()
    return parameter.clone(), [gradient.clone() for gradient in gradients]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("momentum", "weight_decay"), UPDATES)
def test_equals_torchs_sgd_bit_for_bit(
    device: torch.device, dtype: torch.dtype, momentum: float, weight_decay: float
) -> None:
    parameter, gradients = random_tensors(BLOCK + 4099, dtype)
    parameter = parameter.to(device)
    expected = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.SGD([expected], lr=1.0, momentum=momentum, weight_decay=weight_decay)
    buffer = torch.zeros_like(parameter)
    for rate, gradient in zip(LEARNING_RATES, gradients, strict=True):
        expected.grad = gradient.to(device)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        given = [parameter], [gradient.to(device)], [buffer]
        sgd_step(*given, (rate, momentum, weight_decay), ONE.to(device))
        assert torch.equal(parameter, expected.detach())
    if momentum:
        assert torch.equal(buffer, optimizer.state[expected]["momentum_buffer"])


def train(count: int, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Parameter and momentum after a step per gradient, every buffer cut into pieces of these lengths."""
    parameter, gradients = random_tensors(count)
    momentum, scale = torch.zeros_like(parameter), torch.tensor(0.37)
    for rate, gradient in zip(LEARNING_RATES, gradients, strict=True):
        parameters, pieces, momenta = (list(torch.split(tensor, cuts)) for tensor in (parameter, gradient, momentum))
        sgd_step(parameters, pieces, momenta, (rate, 0.9, 0.1), scale)
    return parameter, momentum


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_cutting_anywhere_gives_the_same_bits(cuts: list[int]) -> None:
    count = sum(cuts)
    for whole, pieces in zip(train(count, [count]), train(count, cuts), strict=True):
        assert torch.equal(whole, pieces)


def test_clipped_steps_equal_torchs_clipping_and_sgd_bitwise() -> None:
    parameter, gradients = random_tensors(4099)
    expected = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.SGD([expected], lr=0.1, weight_decay=0.1)
    for gradient in gradients:
        kept = gradient.clone()
        expected.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([expected], 30.0)
        optimizer.step()
        sgd_step([parameter], [gradient], [], (0.1, 0.0, 0.1), clip_coefficient(norm, 30.0))
        assert torch.equal(gradient, kept)
    assert torch.equal(parameter, expected.detach())
