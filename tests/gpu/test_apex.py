"""NVIDIA's apex itself, where it is installed: the checks that the stand-in passes in tests/kernels/test_apex.py."""

import pytest
import torch

from megapipe.kernels import apex_backend
from megapipe.kernels.apex_backend import adamw, gradient_norm, layer_norm, rms_norm, softmax
from tests.kernels import adamw_checks, norm_checks, softmax_checks
from tests.kernels.cases import DTYPES, LAYOUTS, Layout, misaligned
from tests.kernels.norm_checks import Norm

pytestmark = pytest.mark.gpu


def needs(extension: str) -> None:
    """Skip without the extension; fail if the registry refuses the build that is installed."""
    pytest.importorskip(extension)
    modules = {"layer_norm": layer_norm, "rms_norm": rms_norm, "adamw": adamw, "gradient_norm": gradient_norm}
    for op, module in {**modules, "softmax": softmax}.items():
        if apex_backend.EXTENSIONS[op] == extension:
            dtype = torch.bfloat16 if op == "softmax" else torch.float32
            assert module.refusal("cuda", dtype, 64) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [Norm("layer_norm", layer_norm), Norm("rms_norm", rms_norm)], ids=str)
def test_norms(norm: Norm, dtype: torch.dtype, layout: Layout) -> None:
    needs("fused_layer_norm_cuda")
    norm_checks.check_against_double(norm, (37, 4096), dtype, "cuda", layout)
    norm_checks.check_empty(norm, "cuda")


@pytest.mark.parametrize("moments", adamw_checks.MOMENTS, ids=str)
def test_adamw(moments: torch.dtype) -> None:
    needs("amp_C")
    adamw_checks.check_against_double(adamw, 3_000_001, moments, "cuda", 0.1, scales_gradient=True)
    adamw_checks.check_parameter_copy(adamw, "cuda")
    adamw_checks.check_skip(adamw, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_norm(dtype: torch.dtype) -> None:
    needs("amp_C")
    values = torch.randn(10_000_001, device="cuda").to(dtype)
    exact = values.double().square().sum().item()
    assert gradient_norm.squared_norm(values).item() == pytest.approx(exact, rel=1e-5)
    values[12_345] = torch.inf
    assert not gradient_norm.squared_norm(values).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [20, 132, 2048])
def test_causal_softmax(length: int, dtype: torch.dtype) -> None:
    needs("scaled_upper_triang_masked_softmax_cuda")
    softmax_checks.check_against_double(softmax, (2, 8, length, length), dtype, "cuda", causal=True, layout=misaligned)
