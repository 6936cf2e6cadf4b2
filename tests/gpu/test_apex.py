"""NVIDIA's apex itself, where it is installed: the checks that the stand-in passes in tests/kernels/test_apex.py."""

import pytest
import torch

from megapipe.kernels import apex_backend
from megapipe.kernels.apex_backend import kernels as apex_kernels
from tests.kernels import adamw_checks, norm_checks, softmax_checks
from tests.kernels.cases import DTYPES, LAYOUTS, Layout, implementation, misaligned
from tests.kernels.norm_checks import Norm

NORMS = [Norm(op, implementation(op, "apex")) for op in ("layer_norm", "rms_norm")]
ADAMW = implementation("adamw", "apex")
SOFTMAX = implementation("softmax", "apex")

pytestmark = pytest.mark.gpu


def needs(extension: str) -> None:
    """Skip without the extension; fail if the registry refuses the build that is installed."""
    pytest.importorskip(extension)
    for op in ("layer_norm", "rms_norm", "adamw", "gradient_norm", "softmax"):
        if apex_backend.EXTENSIONS[op] == extension:
            dtype = torch.bfloat16 if op == "softmax" else torch.float32
            assert apex_kernels.REFUSALS[op]("cuda", dtype, 64) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_norms(norm: Norm, dtype: torch.dtype, layout: Layout) -> None:
    needs("fused_layer_norm_cuda")
    norm_checks.check_against_double(norm, (37, 4096), dtype, "cuda", layout)
    norm_checks.check_empty(norm, "cuda")


@pytest.mark.parametrize("moments", adamw_checks.MOMENTS, ids=str)
def test_adamw(moments: torch.dtype) -> None:
    needs("amp_C")
    adamw_checks.check_against_double(ADAMW, 3_000_001, moments, "cuda", 0.1, scales_gradient=True)
    adamw_checks.check_parameter_copy(ADAMW, "cuda")
    adamw_checks.check_skip(ADAMW, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_norm(dtype: torch.dtype) -> None:
    needs("amp_C")
    values = torch.randn(10_000_001, device="cuda").to(dtype)
    exact = values.double().square().sum().item()
    assert apex_kernels.gradient_norm(values).item() == pytest.approx(exact, rel=1e-5)
    values[12_345] = torch.inf
    assert not apex_kernels.gradient_norm(values).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [20, 132, 2048])
def test_causal_softmax(length: int, dtype: torch.dtype) -> None:
    needs("scaled_upper_triang_masked_softmax_cuda")
    softmax_checks.check_against_double(SOFTMAX, (2, 8, length, length), dtype, "cuda", causal=True, layout=misaligned)
