"""AdamW on flat buffers: the reference, and Triton."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from megapipe.kernels.reference import adamw as reference
from megapipe.kernels.reference.adamw import Coefficients
from megapipe.optim.adamw import AdamW, adamw_step
from megapipe.spec.parameters import SEGMENT_ALIGNMENT
from tests.kernels import adamw_checks as checks
from tests.kernels.cases import DEVICE, assert_same_bits, needs_triton

Check = Callable[[ModuleType, str], None]


def triton_adamw() -> ModuleType:
    from megapipe.kernels.triton_backend import adamw

    return adamw


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_reference_has_the_bits_of_the_optimizer_where_torchs_kernel_has_none(weight_decay: float) -> None:
    state = checks.buffers(SEGMENT_ALIGNMENT - 1, torch.float32, "cpu")
    scale = torch.tensor(0.5)
    found = checks.stepped(reference, state, checks.coefficients(weight_decay=weight_decay), gradient_scale=scale)
    update = AdamW(3, 1e-2, (0.9, 0.95), 1e-8, weight_decay)
    adamw_step(*([state[name]] for name in checks.BUFFERS), update, gradient_scale=scale)
    for name in ("master", "first", "second"):
        assert_same_bits(found[name], state[name])


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step is 0"):
        Coefficients(0, 1e-3, (0.9, 0.95), 1e-8, 0.0)


@pytest.mark.parametrize("check", [checks.check_skip, checks.check_refusals, checks.check_not_a_number])
def test_the_reference(check: Check) -> None:
    check(reference, "cpu")


@needs_triton
@pytest.mark.parametrize("moments", checks.MOMENTS, ids=str)
@pytest.mark.parametrize(("size", "weight_decay"), [(1, 0.1), (64, 0.0), (3001, 0.1)])
def test_no_less_exact_than_torch(size: int, weight_decay: float, moments: torch.dtype) -> None:
    checks.check_against_double(triton_adamw(), size, moments, DEVICE, weight_decay)


@needs_triton
@pytest.mark.parametrize("moments", checks.MOMENTS, ids=str)
def test_the_same_bits_however_cut(moments: torch.dtype) -> None:
    checks.check_cuts(triton_adamw(), moments, DEVICE)


@needs_triton
@pytest.mark.parametrize(
    "check", [checks.check_parameter_copy, checks.check_skip, checks.check_not_a_number, checks.check_refusals]
)
def test_rules_of_a_step(check: Check) -> None:
    check(triton_adamw(), DEVICE)
