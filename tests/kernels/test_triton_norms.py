"""Triton's norms: exactness, awkward inputs, determinism, autograd, and inside of compiled graphs."""

import pytest
import torch

from megapipe.kernels.ops import OPS
from megapipe.layers import norms
from megapipe.layers.split import SplitTape
from tests.kernels import norm_checks
from tests.kernels.cases import DEVICE, DTYPES, LAYOUTS, Layout, draw, implementation, needs_triton
from tests.kernels.norm_checks import LONG, SHAPES, Norm

pytestmark = needs_triton


@pytest.fixture(params=["layer_norm", "rms_norm"])
def norm(request: pytest.FixtureRequest) -> Norm:
    """One of the two ops in Triton."""
    return Norm(request.param, implementation(request.param, "triton"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_double(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm_checks.check_against_double(norm, shape, dtype, DEVICE)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_long_rows(norm: Norm, shape: tuple[int, ...]) -> None:
    norm_checks.check_against_double(norm, shape, torch.float32, DEVICE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_awkward_layouts(norm: Norm, layout: Layout) -> None:
    norm_checks.check_against_double(norm, (5, 64), torch.float32, DEVICE, layout)


@pytest.mark.parametrize(("spread", "shift"), [(1e-6, 0), (1e12, 0), (1, 1e4)])
def test_extreme_values(norm: Norm, spread: float, shift: float) -> None:
    norm_checks.check_against_double(norm, (60, 200), torch.float32, DEVICE, spread=spread, shift=shift)


def test_rules(norm: Norm) -> None:
    norm_checks.check_rules(norm, (37, 96), torch.float32, DEVICE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["", "_add", "_input_gradient", "_weight_gradient", "_backward"])
def test_operators_keep_torchs_rules(norm: Norm, name: str) -> None:
    norm_checks.check_operator(norm, "triton", name, DEVICE)


@pytest.mark.parametrize("kind", ["layer_norm", "layer_norm_without_bias", "rms_norm", "rms_norm_unit_offset"])
def test_compiled_layer_with_a_split_backward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, and the bits of the eager layer: whole and in halves."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    shapes = {"weight": (40,), "bias": (40,)} if kind == "layer_norm" else {"weight": (40,)}
    layer = norms.Norm(kind, shapes, 1e-5, OPS.with_overrides({kind: "triton"})).to_empty(device=DEVICE)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(draw(40, seed=seed))
    x = draw(3, 5, 40, dtype=torch.float32, device=DEVICE).requires_grad_()
    dy = draw(3, 5, 40, seed=1, dtype=torch.float32, device=DEVICE)

    def gradients(forward: object) -> list[torch.Tensor]:
        return list(torch.autograd.grad(forward(x, None), [x, *layer.parameters()], dy))  # type: ignore[operator]

    expected = gradients(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    tape = SplitTape()
    y = layer(x, tape)
    (dx,) = tape.backward_input([y], [dy], [x])
    tape.backward_weight()
    split = [dx, *(parameter.grad for parameter in layer.parameters())]
    for one, other, third in zip(expected, gradients(compiled), split, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
