import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapipe.optim.optimizer import BLOCK, SGD, sgd_step
from megapipe.optim.scaling import clip_coefficient

LEARNING_RATES = [3e-2, 1e-2, 5e-2, 2e-3]
DEVICES = [
    pytest.param(torch.device("cpu"), id="cpu"),
    pytest.param(torch.device("cuda"), id="cuda", marks=pytest.mark.gpu),
]
UPDATES = [(0.0, 0.0), (0.0, 0.1), (0.9, 0.0), (0.9, 0.1)]


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
        sgd_step([parameter], [gradient.to(device)], [buffer] if momentum else [], SGD(rate, momentum, weight_decay))
        assert torch.equal(parameter, expected.detach())
    if momentum:
        assert torch.equal(buffer, optimizer.state[expected]["momentum_buffer"])


def train(count: int, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Parameter and momentum after a step per gradient, every buffer cut into pieces of these lengths."""
    parameter, gradients = random_tensors(count)
    momentum, scale = torch.zeros_like(parameter), torch.tensor(0.37)
    for rate, gradient in zip(LEARNING_RATES, gradients, strict=True):
        parameters, pieces, momenta = (list(torch.split(tensor, cuts)) for tensor in (parameter, gradient, momentum))
        sgd_step(parameters, pieces, momenta, SGD(rate, 0.9, 0.1), gradient_scale=scale)
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
        sgd_step([parameter], [gradient], [], SGD(0.1, 0.0, 0.1), gradient_scale=clip_coefficient(norm, 30.0))
        assert torch.equal(gradient, kept)
    assert torch.equal(parameter, expected.detach())


def test_momentum_asks_for_its_buffers() -> None:
    flat = torch.zeros(4)
    with pytest.raises(ValueError, match="zip"):
        sgd_step([flat], [flat], [], SGD(0.1, 0.9, 0.0))


@pytest.mark.parametrize("wrong", [torch.zeros(2, 2), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8)[::2]])
def test_a_tensor_that_is_not_flat_fp32_is_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"SGD got a .* pass flat, contiguous fp32 views"):
        sgd_step([wrong], [torch.zeros(4)], [], SGD(0.1, 0.0, 0.0))


def test_two_precisions_in_one_step_are_refused() -> None:
    with pytest.raises(ValueError, match="SGD got float32 and float64 tensors in one step"):
        sgd_step([torch.zeros(4)], [torch.zeros(4, dtype=torch.float64)], [], SGD(0.1, 0.0, 0.0))
