"""How NVIDIA's apex is found, compared with the table of its functions, and called (`apex_stand_in`)."""

import importlib
import sys
import types

import pytest
import torch

from megapipe.kernels import apex_backend
from megapipe.kernels.apex_backend import kernels as apex_kernels
from megapipe.kernels.ops import OPS
from megapipe.kernels.reference import attention as reference_attention
from megapipe.kernels.reference import optimizer as reference_optimizer
from megapipe.kernels.registry import KernelError
from megapipe.training.validation import described_choices
from tests.kernels import adamw_checks, apex_stand_in, norm_checks, softmax_checks
from tests.kernels.apex_stand_in import BUILDS
from tests.kernels.cases import DTYPES, LAYOUTS, Layout, assert_same_bits, draw, implementation, misaligned
from tests.kernels.norm_checks import Norm

ADAMW = implementation("adamw", "apex")

NORMS = [Norm(op, implementation(op, "apex")) for op in ("layer_norm", "rms_norm")]
each_build = pytest.mark.parametrize("_apex", BUILDS, indirect=True)
each_norm = pytest.mark.parametrize("norm", NORMS, ids=str)


@pytest.fixture(autouse=True)
def _apex(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    build = getattr(request, "param", "newest")
    if build is not None:
        apex_stand_in.install(monkeypatch, build)


@each_build
@each_norm
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms(norm: Norm, dtype: torch.dtype, layout: Layout) -> None:
    norm_checks.check_against_double(norm, (3, 2, 40), dtype, "cpu", layout)


@each_norm
def test_gradients_and_empty_inputs_of_norms(norm: Norm) -> None:
    norm_checks.check_autograd(norm, "cpu")
    norm_checks.check_empty(norm, "cpu")
    x, weight = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8)
    with pytest.raises(ValueError, match=r"weight is torch\.float32 \[8\], but x is torch\.bfloat16"):
        norm.module.forward(x, *[weight] * norm.num_parameters, 1e-5)


@pytest.mark.parametrize("moments", adamw_checks.MOMENTS, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw(moments: torch.dtype, decay: float) -> None:
    adamw_checks.check_against_double(ADAMW, 1037, moments, "cpu", decay, scales_gradient=True)


def test_rules_of_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apex_kernels, "_ADAMW_LONGEST", 333)  # long buffers are lists of shorter ones
    adamw_checks.check_rules(ADAMW, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 65_536, 140_000])
def test_gradient_norm(size: int, dtype: torch.dtype) -> None:
    values = draw(size, dtype=dtype)
    actual = apex_kernels.gradient_norm(misaligned(values))
    assert (actual.dtype, actual.shape) == (torch.float64, ())
    assert actual.item() == pytest.approx(values.double().square().sum().item(), rel=1e-5)
    if size:
        values[size // 2] = torch.nan
        assert apex_kernels.gradient_norm(values).isnan()
        assert reference_optimizer.gradient_norm(values).isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_gradient(dtype: torch.dtype) -> None:
    x, dy = (draw(2, 5, width, seed=width, dtype=dtype) for width in (16, 24))
    total = draw(24, 16, dtype=torch.float32)
    exact = total.double() + dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    apex_kernels.weight_gradient(x.transpose(0, 1), dy.transpose(0, 1), total)
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=1e-5)  # bf16 products are not rounded to bf16
    apex_kernels.weight_gradient(x[:0], dy[:0], total)
    with pytest.raises(ValueError, match="apex needs x and dy of one dtype with the same rows"):
        apex_kernels.weight_gradient(x, dy, total.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 20, 20), (1, 4, 132, 132)])
def test_causal_softmax(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    softmax_checks.check_against_double(
        implementation("softmax", "apex"), shape, dtype, "cpu", causal=True, layout=misaligned
    )


def test_attention_weights_and_gradients() -> None:
    query, key = (draw(2, rows, 4, seed=rows, dtype=torch.bfloat16).requires_grad_() for rows in (4 * 20, 20))
    dy = draw(2, 4 * 20, 20, dtype=torch.bfloat16)
    kept = dy.clone()
    weights = apex_kernels.attention_probabilities.apply(query, key, 0.3, None)
    actual = torch.autograd.grad(weights, (query, key), dy)
    assert_same_bits(dy, kept)  # apex's backward writes over its argument
    scores = (torch.matmul(query, key.transpose(1, 2)) * 0.3).view(2, 4, 20, 20)
    expected = reference_attention.softmax_forward(scores, None, 1.0, True, None).view(weights.shape)
    torch.testing.assert_close(weights, expected, rtol=2e-2, atol=1e-2)
    gradients = torch.autograd.grad(expected, (query, key), dy)
    for one, other in zip(actual, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((2, 4, 20, 20), (None, 1.0, True, 7), "a sliding window"),
        ((2, 4, 20, 20), (None, 1.0, False, None), "not causal"),
        ((2, 4, 20, 20), (torch.ones(20, dtype=torch.bool), 1.0, True, None), "does not support a mask"),
        ((2, 4, 20, 24), (None, 1.0, True, None), "not causal over one sequence"),
        ((2, 4, 22, 22), (None, 1.0, True, None), "must be a multiple of 4 between 20 and 16,384"),
        ((2, 4, 16, 16), (None, 1.0, True, None), r"\[2, 4, 16, 16\] scores"),
        ((1, 4, 20, 20), (None, 1.0, True, None), "samples times heads a multiple of 8"),
        ((1, 8, 16384, 16384), (None, 1.0, True, None), r"all together less than 2\^31"),
    ],
)
def test_what_the_causal_softmax_does_not_take(
    shape: tuple[int, ...], arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        apex_kernels.softmax.forward(torch.zeros((), dtype=torch.bfloat16).expand(shape), *arguments)


@pytest.mark.parametrize("_apex", [None], indirect=True)
def test_the_apex_of_pypi_is_another_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    assert apex_backend.unavailable("layer_norm")("cuda") == (
        "NVIDIA's apex is not installed with its extension fused_layer_norm_cuda"
    )
    assert apex_backend.described() is None


def test_installed_extensions_are_found_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in apex_backend.EXTENSIONS:
        rule = apex_backend.unavailable(op)
        assert (rule("cuda"), rule("cpu")) == (None, "needs a GPU")
        assert rule("xpu") == "runs on NVIDIA GPUs, not on xpu"
    assert apex_backend.described() == f"apex: has {', '.join(apex_backend.EXTENSIONS)}"
    monkeypatch.delitem(sys.modules, "amp_C")
    assert apex_backend.described() == (
        "apex: has layer_norm, rms_norm, softmax, attention_probabilities, weight_gradient; not built: amp_C"
    )


def test_ops_with_an_apex_backend_take_known_builds() -> None:
    """Backends that refuse some arguments are never chosen automatically."""
    backends = {op.name: backend for op in OPS.ops for backend in op.backends if backend.name == "apex"}
    assert set(backends) == set(apex_backend.EXTENSIONS)
    for name, backend in backends.items():
        dtype = torch.float32 if name == "adamw" else torch.bfloat16
        assert backend.refusal(name, "cuda", dtype, 64) is None
        assert backend.only_requested == (name in ("softmax", "attention_probabilities", "weight_gradient"))
        assert "float64" in backend.refusal(name, "cuda", torch.float64, 64)


def test_unknown_builds_are_refused_when_choosing_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    extension = importlib.import_module("fused_layer_norm_cuda")
    known = apex_kernels.LAYER_NORM_BACKWARD.forms[-1]
    longer = apex_kernels.Form("later", "2030", (*known.arguments, "more:int"))
    later = apex_stand_in.checked(apex_kernels.LAYER_NORM_BACKWARD, longer)
    for taken, function in (("unknown", lambda *arguments: None), ("10", later)):
        monkeypatch.setattr(extension, "backward_affine", function)
        assert apex_kernels.REFUSALS["layer_norm"]("cuda", torch.float32, 8) == (
            f"fused_layer_norm_cuda.backward_affine takes {taken} arguments instead of 8 or 9; build apex at commit "
            "6ff45486f"
        )
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="takes 10 arguments instead of 8 or 9"):
        apex_kernels.layer_norm.backward(x, x, x[:, :1], x[:, :1], x[0])
    monkeypatch.delattr(importlib.import_module("amp_C"), "multi_tensor_adam_capturable")
    assert apex_kernels.REFUSALS["adamw"]("cuda", torch.float32, 8) == (
        "amp_C has no function multi_tensor_adam_capturable; build an apex that has it "
        "(pull request 1560, January 2023)"
    )


def test_arguments_are_counted_in_docstrings_of_pybind11() -> None:
    """The functions are torch's, which the same library binds."""
    assert apex_kernels._count(torch._C._jit_set_profiling_mode) == 1
    assert apex_kernels._count(torch._C._jit_pass_inline) == 1
    assert apex_kernels._count(torch._C._propagate_shapes) == 3


def test_apex_is_chosen_where_triton_and_csrc_cannot_run() -> None:
    ops = OPS.with_overrides({})
    names = ("layer_norm", "adamw", "gradient_norm")
    choices = [ops.choice(name, "cuda", torch.float32, 64) for name in names]
    assert [choice.backend for choice in choices] == ["apex"] * 3
    weights = ops.choice("attention_probabilities", "cuda", torch.bfloat16, 64)
    assert weights.backend == "reference"
    assert weights.reasons[-1] == "apex: runs only where kernels.backends names it"
    requested = OPS.with_overrides({"attention_probabilities": "apex"})
    assert requested.choice("attention_probabilities", "cuda", torch.bfloat16, 64).backend == "apex"
    lines = described_choices(choices, {})
    assert sum(line.startswith("kernels: apex for ") for line in lines) == len(lines) - 1
    assert lines[-1] == f"kernels: {apex_backend.described()}"
