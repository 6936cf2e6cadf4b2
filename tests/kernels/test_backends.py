"""Norms, masked softmax and AdamW of Triton, in its interpreter, and of csrc/, on an emulated GPU: exactness, awkward
inputs, determinism, autograd, and inside of compiled graphs."""

import pytest
import torch

from megapipe.kernels.cuda_backend import library
from megapipe.kernels.ops import OPS
from megapipe.layers import norms
from megapipe.layers.split import SplitTape
from tests.kernels import adamw_checks, norm_checks, softmax_checks
from tests.kernels.cases import DEVICE, DTYPES, LAYOUTS, Layout, draw, implementation, needs_triton
from tests.kernels.emulated import needs_compiler
from tests.kernels.norm_checks import Norm
from tests.kernels.softmax_checks import LONG, MASKS, SCALE, mask_of

TRITON, CUDA = pytest.param("triton", marks=needs_triton), pytest.param("cuda", marks=needs_compiler)
DEVICES = {"reference": "cpu", "triton": DEVICE, "cuda": "cpu"}
DTYPE_OF = {"triton": torch.float32, "cuda": torch.bfloat16}
"""Dtype of tests that have one alone."""
each_norm = pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])


@pytest.fixture(params=[TRITON, CUDA])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        emulation = request.getfixturevalue("emulation")
        monkeypatch.setattr(library, "current", lambda: emulation)
    return str(request.param)


def norm_of(op: str, backend: str) -> Norm:
    return Norm(op, implementation(op, backend))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", norm_checks.SHAPES, ids=str)
@each_norm
def test_errors_of_norms_are_at_most_twice_torchs(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    norm_checks.check_against_double(norm_of(op, backend), shape, dtype, DEVICES[backend])


@pytest.mark.parametrize("layout", LAYOUTS)
@each_norm
def test_norms_of_any_layout(op: str, layout: Layout, backend: str) -> None:
    norm_checks.check_against_double(norm_of(op, backend), (5, 64), DTYPE_OF[backend], DEVICES[backend], layout)


@needs_triton
@pytest.mark.parametrize(("spread", "shift"), [(1e-6, 0), (1e12, 0), (1, 1e4)])
@each_norm
def test_norms_of_extreme_values(op: str, spread: float, shift: float) -> None:
    norm = norm_of(op, "triton")
    norm_checks.check_against_double(norm, (60, 200), torch.float32, DEVICE, spread=spread, shift=shift)


@each_norm
def test_rules_of_norms(op: str, backend: str) -> None:
    shape = {"triton": (37, 96), "cuda": (70, 512)}[backend]
    norm_checks.check_rules(norm_of(op, backend), shape, DTYPE_OF[backend], DEVICES[backend])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["", "_add", "_input_gradient", "_weight_gradient", "_backward"])
@each_norm
def test_operators_of_norms_keep_torchs_rules(op: str, name: str, backend: str) -> None:
    norm_checks.check_operator(norm_of(op, backend), backend, name, DEVICES[backend])


@needs_triton
@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", norm_checks.LONG, ids=str)
@each_norm
def test_norms_of_rows_in_chunks(op: str, shape: tuple[int, ...]) -> None:
    norm_checks.check_against_double(norm_of(op, "triton"), shape, torch.float32, DEVICE)


@needs_triton
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
def test_errors_of_softmax_are_at_most_twice_torchs(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    softmax_checks.check_against_double(implementation("softmax", backend), shape, dtype, DEVICES[backend])


FORMS = [
    *(("triton", shape) for shape in [(2, 3, 5, 7), (1, 2, 40, 33), LONG]),
    *(("cuda", shape) for shape in [(2, 3, 5, 7), (1, 2, 9, 4), (2, 2, 20, 64)]),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("backend", "shape"), FORMS, ids=str, indirect=["backend"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_forms_of_softmax(backend: str, shape: tuple[int, ...], mask: str, causal: bool, window: int | None) -> None:
    softmax, dtype = implementation("softmax", backend), DTYPE_OF[backend]
    softmax_checks.check_against_double(softmax, shape, dtype, DEVICES[backend], mask, causal, window)


@needs_triton
@pytest.mark.parametrize(("shape", "window"), [(LONG, 5000), ((1, 2, 9, 4), None)], ids=str)
def test_windows_that_start_late_and_few_keys(shape: tuple[int, ...], window: int | None) -> None:
    softmax = implementation("softmax", "triton")
    softmax_checks.check_against_double(softmax, shape, torch.float32, DEVICE, "general", True, window)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_softmax_of_any_layout(layout: Layout, mask: str, backend: str) -> None:
    softmax, dtype = implementation("softmax", backend), DTYPE_OF[backend]
    softmax_checks.check_against_double(softmax, (2, 2, 3, 48), dtype, DEVICES[backend], mask, True, layout=layout)


@pytest.mark.parametrize("spread", [1e-6, 1e4])
def test_softmax_of_small_and_large_scores(spread: float, backend: str) -> None:
    softmax = implementation("softmax", backend)
    softmax_checks.check_against_double(softmax, (1, 2, 8, 100), torch.float32, DEVICES[backend], spread=spread)


@pytest.mark.parametrize(
    ("backend", "shape", "keys"),
    [*((backend, (2, 2, 9, 64), 24) for backend in ("triton", "cuda")), ("triton", LONG, LONG[-1])],
    ids=str,
    indirect=["backend"],
)
def test_rules_of_softmax(backend: str, shape: tuple[int, ...], keys: int) -> None:
    softmax = implementation("softmax", backend)
    softmax_checks.check_rules(softmax, shape, DTYPE_OF[backend], DEVICES[backend], keys)


@needs_triton
def test_operators_of_softmax_keep_torchs_rules() -> None:
    """Schema, fake results, registered gradients and tracing, as `torch.library.opcheck` sees them."""
    scores = draw(1, 2, 4, 8, dtype=torch.float32, device=DEVICE)
    mask = mask_of("general", (1, 2, 4, 8), DEVICE)
    arguments = (scores.clone().requires_grad_(), mask, SCALE, True, 3)
    torch.library.opcheck(torch.ops.megapipe.softmax_triton.default, arguments)
    torch.library.opcheck(torch.ops.megapipe.softmax_triton_input_gradient.default, (scores, scores, SCALE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_probabilities(dtype: torch.dtype, window: int | None, backend: str) -> None:
    op = implementation("attention_probabilities", backend)
    softmax_checks.check_attention_probabilities(op, dtype, window, DEVICES[backend])


@pytest.mark.parametrize("moments", adamw_checks.MOMENTS, ids=str)
@pytest.mark.parametrize(("size", "weight_decay"), [(1, 0.1), (64, 0.0), (3001, 0.1)])
def test_errors_of_adamw_are_at_most_twice_torchs(
    size: int, weight_decay: float, moments: torch.dtype, backend: str
) -> None:
    adamw = implementation("adamw", backend)
    adamw_checks.check_against_double(adamw, size, moments, DEVICES[backend], weight_decay)


@pytest.mark.parametrize("backend", ["reference", TRITON, CUDA], indirect=True)
def test_rules_of_adamw(backend: str) -> None:
    adamw_checks.check_rules(implementation("adamw", backend), DEVICES[backend])
