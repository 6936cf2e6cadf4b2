"""Compiled kernels of the optimizer's flat buffers and of attention weights, and what a GPU is given by default."""

import math

import pytest
import torch

from megapipe.kernels.ops import OPS
from megapipe.kernels.reference import attention as reference_attention
from tests.kernels import adamw_checks
from tests.kernels.cases import DTYPES, assert_as_exact_as_torch, draw, triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("moments", adamw_checks.MOMENTS, ids=str)
def test_adamw(moments: torch.dtype) -> None:
    adamw_checks.check_against_double(triton("adamw"), 3_000_001, moments, "cuda", weight_decay=0.1)


def test_rules_of_adamw() -> None:
    adamw_checks.check_rules(triton("adamw"), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [65_537, 50_000_001])
def test_gradient_norm(size: int, dtype: torch.dtype) -> None:
    values = torch.randn(size, device="cuda").to(dtype)
    norm = triton("gradient_norm").apply(values)
    assert norm.item() == pytest.approx(values.double().square().sum().item(), rel=1e-13)
    values[-1] = torch.inf
    assert not math.isfinite(triton("gradient_norm").apply(values).item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_attention_probabilities(window: int | None, dtype: torch.dtype) -> None:
    query, key = (draw(2, rows, 64, seed=rows, dtype=dtype, device="cuda") for rows in (3 * 1024, 1024))
    actual = triton("attention_probabilities").apply(query, key, 0.125, window)
    expected = reference_attention.attention_probabilities(query, key, 0.125, window)
    exact = reference_attention.attention_probabilities(query.double(), key.double(), 0.125, window)
    assert_as_exact_as_torch(actual, expected, exact)
    if window is not None:
        assert actual[:, -1, : 1024 - window].count_nonzero() == 0


@pytest.mark.parametrize("op", [op.name for op in OPS.ops if op.name != "weight_gradient"])
def test_triton_is_what_a_gpu_gets(op: str) -> None:
    pytest.importorskip("triton")
    dtype = torch.float32 if op in ("adamw", "gradient_norm") else torch.bfloat16
    choice = OPS.choice(op, "cuda", dtype, 4096)
    assert choice.backend == "triton", str(choice)
