"""How NVIDIA's apex is found and called; a stand-in with its functions, made of torch's, takes the module's place."""

import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megapipe.kernels import apex_backend
from megapipe.kernels.apex_backend import layer_norm, rms_norm
from megapipe.kernels.ops import OPS
from megapipe.kernels.reference import layer_norm as layer_norm_reference
from megapipe.kernels.reference import rms_norm as rms_norm_reference
from tests.kernels import norm_checks
from tests.kernels.cases import LAYOUTS, Layout
from tests.kernels.norm_checks import Norm

NORMS = [Norm("layer_norm", layer_norm), Norm("rms_norm", rms_norm)]


def forward_affine(x: Tensor, shape: torch.Size, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    assert all(tensor.is_contiguous() for tensor in (x, weight, bias))
    y, mean, rstd = layer_norm_reference.forward(x, weight, bias, epsilon)
    return y, mean.flatten(), rstd.flatten()


def backward_affine(
    dy: Tensor,
    mean: Tensor,
    rstd: Tensor,
    x: Tensor,
    shape: torch.Size,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    memory_efficient: bool,
) -> tuple[Tensor, ...]:
    assert not memory_efficient
    assert mean.shape == rstd.shape == (x.shape[:-1].numel(),)
    rows = (*x.shape[:-1], 1)
    return layer_norm_reference.backward(dy, x, mean.view(rows), rstd.view(rows), weight)


def rms_forward_affine(x: Tensor, shape: torch.Size, weight: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    assert x.is_contiguous()
    y, rstd = rms_norm_reference.forward(x, weight, epsilon)
    return y, rstd.flatten()


def rms_backward_affine(
    dy: Tensor, rstd: Tensor, x: Tensor, shape: torch.Size, weight: Tensor, epsilon: float, memory_efficient: bool
) -> tuple[Tensor, ...]:
    assert not memory_efficient
    assert rstd.shape == (x.shape[:-1].numel(),)
    return rms_norm_reference.backward(dy, x, rstd.view(*x.shape[:-1], 1), weight)


def module(name: str, *functions: object) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    made.__dict__.update({function.__name__: function for function in functions})  # type: ignore[attr-defined]
    return made


@pytest.fixture
def _apex(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = (forward_affine, backward_affine, rms_forward_affine, rms_backward_affine)
    monkeypatch.setitem(sys.modules, apex_backend.EXTENSION, module(apex_backend.EXTENSION, *functions))


@pytest.mark.usefixtures("_apex")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.op)
def test_norms_through_apex(norm: Norm, dtype: torch.dtype, layout: Layout) -> None:
    norm_checks.check_against_double(norm, (3, 2, 40), dtype, "cpu", layout)


@pytest.mark.usefixtures("_apex")
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.op)
def test_gradients_through_apex(norm: Norm) -> None:
    norm_checks.check_autograd(norm, "cpu")


def test_the_apex_of_pypi_is_not_nvidia_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", module("apex"))
    monkeypatch.delitem(sys.modules, apex_backend.EXTENSION, raising=False)
    assert apex_backend.unavailable("cuda") == (
        "NVIDIA's apex is not installed with its norms (there is no module fused_layer_norm_cuda)"
    )


@pytest.mark.usefixtures("_apex")
def test_nvidia_s_apex_is_found() -> None:
    assert apex_backend.unavailable("cuda") is None
    assert apex_backend.unavailable("cpu") == "needs a GPU"
    assert apex_backend.unavailable("xpu") == "runs on NVIDIA GPUs, not on xpu"
    assert "apex: needs a GPU" in OPS.choice("layer_norm", "cpu", torch.float32, 8).reasons
