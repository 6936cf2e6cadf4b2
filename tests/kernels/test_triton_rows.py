"""Triton's norms and masked softmax: exactness, awkward inputs, determinism, autograd, inside of compiled graphs."""

import pytest
import torch

from megapipe.kernels.ops import OPS
from megapipe.layers import norms
from megapipe.layers.split import SplitTape
from tests.kernels import norm_checks, softmax_checks
from tests.kernels.cases import DEVICE, DTYPES, LAYOUTS, Layout, draw, implementation
from tests.kernels.norm_checks import Norm
from tests.kernels.softmax_checks import MASKS, SCALE, mask_of

pytest.importorskip("triton")

NORMS = [Norm(op, implementation(op, "triton")) for op in ("layer_norm", "rms_norm")]
SOFTMAX = implementation("softmax", "triton")
each_norm = pytest.mark.parametrize("norm", NORMS, ids=str)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", norm_checks.SHAPES, ids=str)
@each_norm
def test_against_double_of_norms(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm_checks.check_against_double(norm, shape, dtype, DEVICE)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", norm_checks.LONG, ids=str)
@each_norm
def test_long_rows_of_norms(norm: Norm, shape: tuple[int, ...]) -> None:
    norm_checks.check_against_double(norm, shape, torch.float32, DEVICE)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_norm
def test_awkward_layouts_of_norms(norm: Norm, layout: Layout) -> None:
    norm_checks.check_against_double(norm, (5, 64), torch.float32, DEVICE, layout)


@pytest.mark.parametrize(("spread", "shift"), [(1e-6, 0), (1e12, 0), (1, 1e4)])
@each_norm
def test_extreme_values_of_norms(norm: Norm, spread: float, shift: float) -> None:
    norm_checks.check_against_double(norm, (60, 200), torch.float32, DEVICE, spread=spread, shift=shift)


@each_norm
def test_rules_of_norms(norm: Norm) -> None:
    norm_checks.check_rules(norm, (37, 96), torch.float32, DEVICE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["", "_add", "_input_gradient", "_weight_gradient", "_backward"])
@each_norm
def test_operators_of_norms_keep_torchs_rules(norm: Norm, name: str) -> None:
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", softmax_checks.SHAPES, ids=str)
def test_against_double_of_softmax(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    softmax_checks.check_against_double(SOFTMAX, shape, dtype, DEVICE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 2, 40, 33), softmax_checks.LONG], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_masks_of_softmax(shape: tuple[int, ...], mask: str, causal: bool, window: int | None) -> None:
    softmax_checks.check_against_double(SOFTMAX, shape, torch.float32, DEVICE, mask, causal, window)


@pytest.mark.parametrize(("shape", "window"), [(softmax_checks.LONG, 5000), ((1, 2, 9, 4), None)], ids=str)
def test_windows_that_start_late_and_few_keys(shape: tuple[int, ...], window: int | None) -> None:
    softmax_checks.check_against_double(SOFTMAX, shape, torch.float32, DEVICE, "general", True, window)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_awkward_layouts_of_softmax(layout: Layout, mask: str) -> None:
    softmax_checks.check_against_double(SOFTMAX, (2, 2, 3, 48), torch.float32, DEVICE, mask, True, layout=layout)


@pytest.mark.parametrize("spread", [1e-6, 1e4])
def test_extreme_values_of_softmax(spread: float) -> None:
    softmax_checks.check_against_double(SOFTMAX, (1, 2, 8, 100), torch.float32, DEVICE, spread=spread)


@pytest.mark.parametrize(
    ("shape", "keys"), [((2, 2, 9, 64), 24), (softmax_checks.LONG, softmax_checks.LONG[-1])], ids=str
)
def test_rules_of_softmax(shape: tuple[int, ...], keys: int) -> None:
    softmax_checks.check_rules(SOFTMAX, shape, torch.float32, DEVICE, keys)


def test_operators_of_softmax_keep_torchs_rules() -> None:
    """Schema, fake results, registered gradients and tracing, as `torch.library.opcheck` sees them."""
    scores = draw(1, 2, 4, 8, dtype=torch.float32, device=DEVICE)
    mask = mask_of("general", (1, 2, 4, 8), DEVICE)
    arguments = (scores.clone().requires_grad_(), mask, SCALE, True, 3)
    torch.library.opcheck(torch.ops.megapipe.softmax_triton.default, arguments)
    torch.library.opcheck(torch.ops.megapipe.softmax_triton_input_gradient.default, (scores, scores, SCALE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_probabilities(dtype: torch.dtype, window: int | None) -> None:
    op = implementation("attention_probabilities", "triton")
    softmax_checks.check_attention_probabilities(op, dtype, window, DEVICE)
