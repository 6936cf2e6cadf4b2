"""Requirements of AdamW backends, on any device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.kernels.reference.optimizer import Buffers, Coefficients
from megapipe.kernels.registry import Implementation
from tests.kernels.cases import assert_same_bits, draw, implementation

REFERENCE = implementation("adamw", "reference")

BUFFERS = ("master", "gradient", "first", "second")
MOMENTS = [torch.float32, torch.bfloat16]


def coefficients(step: int = 3, weight_decay: float = 0.1) -> Coefficients:
    return Coefficients(step, learning_rate=1e-2, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=weight_decay)


def buffers(size: int, moments: torch.dtype, device: str) -> dict[str, Tensor]:
    """A master, a gradient and moments as they are after some steps."""
    dtypes = (torch.float32, torch.float32, moments, moments)
    drawn = {name: draw(size, seed=seed) for seed, name in enumerate(BUFFERS)}
    drawn["second"] = drawn["second"].square()
    return {name: drawn[name].to(device, dtype) for name, dtype in zip(BUFFERS, dtypes, strict=True)}


def stepped(
    module: Implementation, state: dict[str, Tensor], update: Coefficients, **options: Any
) -> dict[str, Tensor]:
    """Copies of the buffers after one step."""
    copies = {name: tensor.clone() for name, tensor in state.items()}
    module.step(Buffers(**copies, **options), update)
    return copies


def check_against_double(
    module: Implementation,
    size: int,
    moments: torch.dtype,
    device: str,
    weight_decay: float,
    scales_gradient: bool = False,
) -> None:
    """At most twice the error that torch's operations make in fp32, against the same formula in fp64.

    scales_gradient: the backend leaves the scaled gradient in its buffer.
    """
    state = buffers(size, moments, device)
    scale = torch.full((), 0.37, device=device)
    update = coefficients(weight_decay=weight_decay)
    actual = stepped(module, state, update, gradient_scale=scale)
    torchs = stepped(REFERENCE, state, update, gradient_scale=scale)
    wide = {name: tensor.double() for name, tensor in state.items()}
    exact = stepped(REFERENCE, wide, update, gradient_scale=scale)
    left = state["gradient"] * scale if scales_gradient else state["gradient"]
    assert torch.equal(actual["gradient"], left)
    for name in ("master", "first", "second"):
        unit = torch.finfo(actual[name].dtype).eps
        allowed = 2 * (torchs[name].double() - exact[name]).abs().max() + unit * exact[name].abs()
        assert ((actual[name].double() - exact[name]).abs() <= allowed).all(), name


def check_rules(module: Implementation, device: str) -> None:
    """Check cut buffers, the parameter copy, the skip flag, special numbers and refusals."""
    for moments in MOMENTS:
        check_cuts(module, moments, device)
    check_parameter_copy(module, device)
    check_skip(module, device)
    check_not_a_number(module, device)
    check_refusals(module, device)


def check_parameter_copy(module: Implementation, device: str) -> None:
    """The working copy is the rounded master. The interpreter truncates, hence a unit in the last place."""
    state = buffers(1000, torch.bfloat16, device)
    parameter = torch.zeros(1000, dtype=torch.bfloat16, device=device)
    actual = stepped(module, state, coefficients(), parameter=parameter)
    torch.testing.assert_close(parameter.float(), actual["master"], rtol=2**-7, atol=0)
    plain = stepped(module, state, coefficients())
    for name in BUFFERS:
        assert_same_bits(actual[name], plain[name])


def check_cuts(module: Implementation, moments: torch.dtype, device: str) -> None:
    """The same bits in one piece and in pieces that start anywhere."""
    state = buffers(1500, moments, device)
    whole = stepped(module, state, coefficients())
    cut = {name: tensor.clone() for name, tensor in state.items()}
    for piece in (slice(0, 3), slice(3, 1029), slice(1029, 1030), slice(1030, 1500)):
        module.step(Buffers(*(cut[name][piece] for name in BUFFERS)), coefficients())
    for name in BUFFERS:
        assert_same_bits(whole[name], cut[name])


def check_skip(module: Implementation, device: str) -> None:
    """A skip flag that is not 0 leaves all as it was; 0 changes nothing about the step."""
    state = buffers(1300, torch.float32, device)
    parameter = torch.full((1300,), 7.0, dtype=torch.bfloat16, device=device)
    skipped = stepped(module, state, coefficients(), parameter=parameter, skip=torch.ones((), device=device))
    taken = stepped(module, state, coefficients(), skip=torch.zeros(1, device=device))
    plain = stepped(module, state, coefficients())
    assert (parameter == 7).all()
    for name in BUFFERS:
        assert_same_bits(skipped[name], state[name])
        assert_same_bits(taken[name], plain[name])
    assert not torch.equal(plain["master"], state["master"])


def check_not_a_number(module: Implementation, device: str) -> None:
    """A NaN in the gradient reaches its own element and no other."""
    state = buffers(1100, torch.float32, device)
    clean = stepped(module, state, coefficients())
    state["gradient"][1030] = torch.nan
    poisoned = stepped(module, state, coefficients())
    for name in ("master", "first", "second"):
        assert poisoned[name].isnan().nonzero().flatten().tolist() == [1030]
        others = torch.arange(1100, device=device) != 1030
        assert_same_bits(poisoned[name][others], clean[name][others])


def check_refusals(module: Implementation, device: str) -> None:
    """Wrong buffers and coefficients are refused by name, and an empty buffer is no error."""
    state = buffers(64, torch.float32, device)
    module.step(Buffers(*(tensor[:0] for tensor in state.values())), coefficients())
    for name, wrong in {
        "gradient": state["gradient"][:32],
        "first": state["first"].half(),
        "second": state["second"].bfloat16(),
        "master": state["master"].view(8, 8),
    }.items():
        with pytest.raises(ValueError, match=f"AdamW's {name} is"):
            module.step(Buffers(**{**state, name: wrong}), coefficients())
    with pytest.raises(ValueError, match=r"parameter is torch\.float32"):
        module.step(Buffers(**state, parameter=torch.zeros(64, device=device)), coefficients())
    with pytest.raises(ValueError, match=r"skip is torch\.int32"):
        module.step(Buffers(**state, skip=torch.zeros((), dtype=torch.int32, device=device)), coefficients())
    slow = Coefficients(1, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    with pytest.raises(ValueError, match=r"at most 0\.996"):
        module.step(Buffers(**buffers(64, torch.bfloat16, device)), slow)
