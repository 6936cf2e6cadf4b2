import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapipe.kernels.reference import optimizer as reference_optimizer
from megapipe.optim.optimizer import BLOCK, AdamW, adamw_step
from megapipe.optim.scaling import clip_coefficient
from megapipe.spec.parameters import SEGMENT_ALIGNMENT

CPU = torch.device("cpu")


def update(step: int, weight_decay: float = 0.1) -> AdamW:
    return AdamW(step=step, learning_rate=3e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=weight_decay)


def random_tensors(count: int, device: torch.device, steps: int = 5) -> tuple[Tensor, list[Tensor]]:
    """A parameter and one gradient per step."""
    generator = torch.Generator().manual_seed(count)
    parameter = torch.randn(count, generator=generator)
    gradients = [torch.randn(count, generator=generator) * 10 ** (step - 2) for step in range(steps)]
    return parameter.to(device), [gradient.to(device) for gradient in gradients]


def train(
    parameter: Tensor, gradients: list[Tensor], cuts: list[int], scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter and moments after one step per gradient, every buffer cut into pieces of these lengths."""
    parameter = parameter.clone()
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, gradient in enumerate(gradients, 1):
        pieces = [list(torch.split(tensor, cuts)) for tensor in (parameter, gradient.clone(), first, second)]
        adamw_step(*pieces, update(step), gradient_scale=scale)
    return parameter, first, second


@pytest.mark.parametrize(
    ("device", "count", "fused"),
    [
        pytest.param(CPU, 2 * BLOCK + 64, True, id="cpu"),
        pytest.param(CPU, SEGMENT_ALIGNMENT - 1, False, id="cpu, less than a multiple"),
        pytest.param(torch.device("cuda"), 2 * BLOCK + 4099, True, id="cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torchs_adamw_bit_for_bit(device: torch.device, count: int, fused: bool, weight_decay: float) -> None:
    parameter, gradients = random_tensors(count, device)
    expected = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW(
        [expected], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, fused=fused
    )
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, gradient in enumerate(gradients, 1):
        expected.grad = gradient.clone()
        optimizer.step()
        adamw_step([parameter], [gradient], [first], [second], update(step, weight_decay))
        assert torch.equal(parameter, expected.detach())
    assert torch.equal(first, optimizer.state[expected]["exp_avg"])
    assert torch.equal(second, optimizer.state[expected]["exp_avg_sq"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, SEGMENT_ALIGNMENT - 1))
def test_cutting_at_segment_borders_gives_the_same_bits(multiples: list[int], rest: int) -> None:
    cuts = [SEGMENT_ALIGNMENT * multiple for multiple in multiples] + [rest] * (rest > 0)
    parameter, gradients = random_tensors(sum(cuts), CPU)
    whole = train(parameter, gradients, [sum(cuts)])
    pieces = train(parameter, gradients, cuts)
    for left, right in zip(whole, pieces, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("device", "length"),
    [(CPU, SEGMENT_ALIGNMENT), (CPU, BLOCK), (CPU, 2 * BLOCK)]
    + [pytest.param(torch.device("cuda"), length, marks=pytest.mark.gpu) for length in (1, 13, 1000, BLOCK + 7)],
)
def test_equal_pieces_of_long_buffers_give_equal_bits(device: torch.device, length: int) -> None:
    count = 3001 if length == 1 else 2 * BLOCK + 77
    parameter, gradients = random_tensors(count, device, steps=3)
    scale = torch.tensor(0.37, device=device)
    cuts = [length] * (count // length) + [count % length] * (count % length > 0)
    for left, right in zip(
        train(parameter, gradients, [count], scale), train(parameter, gradients, cuts, scale), strict=True
    ):
        assert torch.equal(left, right)


def test_clipped_step_equals_torchs_clipping_and_adamw() -> None:
    """torch divides by the coefficient's reciprocal, where its clipping multiplies."""
    parameter, gradients = random_tensors(4099, CPU)
    expected = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW([expected], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, gradient in enumerate(gradients, 1):
        expected.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([expected], 30.0)
        optimizer.step()
        adamw_step(
            [parameter], [gradient], [first], [second], update(step), gradient_scale=clip_coefficient(norm, 30.0)
        )
    torch.testing.assert_close(parameter, expected.detach(), rtol=1e-5, atol=1e-6)


def test_the_fused_kernel_takes_the_step_of_the_reference() -> None:
    """They differ in the last bits alone."""
    parameter, gradients = random_tensors(4099, CPU)
    plain, fused = ([parameter.clone(), *torch.zeros(2, 4099).unbind()] for _ in range(2))
    scale = torch.tensor(0.37)
    for step, gradient in enumerate(gradients, 1):
        buffers = reference_optimizer.Buffers(plain[0], gradient, plain[1], plain[2], gradient_scale=scale)
        reference_optimizer.adamw_step(buffers, update(step))
        adamw_step([fused[0]], [gradient], [fused[1]], [fused[2]], update(step), gradient_scale=scale)
    for left, right in zip(plain, fused, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_an_empty_list_and_an_empty_shard_are_fine() -> None:
    adamw_step([], [], [], [], update(1))
    empty = torch.empty(0)
    adamw_step([empty], [empty], [empty], [empty], update(1))
    assert empty.shape == (0,)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step is 0"):
        adamw_step([], [], [], [], update(0))
