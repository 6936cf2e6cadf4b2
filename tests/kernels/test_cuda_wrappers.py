"""The kernels of csrc/ and their wrappers, on an emulated GPU: every thread, barrier, shuffle and cluster of them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megapipe.kernels import cuda_backend
from megapipe.kernels.cuda_backend import kernels as cuda_kernels
from megapipe.kernels.cuda_backend import library
from megapipe.kernels.ops import OPS
from tests.kernels import adamw_checks, norm_checks, softmax_checks
from tests.kernels.cases import DTYPES, LAYOUTS, assert_same_bits, draw, implementation, misaligned
from tests.kernels.emulated import needs_compiler, set_clusters, shared_library
from tests.kernels.norm_checks import Norm

SOFTMAX = implementation("softmax", "cuda")
ADAMW = implementation("adamw", "cuda")

pytestmark = needs_compiler

NORMS = [Norm(op, implementation(op, "cuda")) for op in ("layer_norm", "rms_norm")]
each_norm = pytest.mark.parametrize("norm", NORMS, ids=str)
SHAPES = [(7, 33), (1, 1), (3, 2, 256), (37, 96), (2, 1000)]
LONG = [
    (NORMS[0], (9, 4104), torch.float32),
    (NORMS[1], (1, 33_000), torch.float16),
    (NORMS[0], (1, 9001), torch.bfloat16),
    (NORMS[1], (1, 9001), torch.float32),
]
"""Rows of several tiles, or of several blocks where there are clusters: in 16-byte pieces and in single elements."""


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> library.Library:
    return library.Library(shared_library(tmp_path_factory), device="cpu")


@pytest.fixture(autouse=True)
def _on_the_processor(emulation: library.Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "current", lambda: emulation)
    yield
    set_clusters(emulation, True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_norm
def test_errors_of_norms_are_at_most_twice_torchs(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm_checks.check_against_double(norm, shape, dtype, "cpu")


@pytest.mark.one_in(8)
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("norm", "shape", "dtype"), LONG, ids=str)
def test_norms_of_long_rows(
    norm: Norm, shape: tuple[int, ...], dtype: torch.dtype, clusters: bool, emulation: library.Library
) -> None:
    set_clusters(emulation, clusters)
    norm_checks.check_against_double(norm, shape, dtype, "cpu")


def test_gradients_of_parameters_are_the_same_on_every_path(emulation: library.Library) -> None:
    """Rows that stay on chip, and rows that do not: those that no 16-byte access can read, and without clusters."""
    set_clusters(emulation, False)
    x, dy, dx = (draw(11, 4800, seed=seed, dtype=torch.float16) for seed in range(3))
    parameters = NORMS[0].parameters(4800, torch.float16, "cpu")
    _, *statistics = cuda_kernels.layer_norm.forward(x, *parameters, 1e-5)
    resident = cuda_kernels.layer_norm.weight_gradient(dy, x, *statistics, parameters[0])
    _, *walked = cuda_kernels.layer_norm.backward(dy, x, *statistics, parameters[0], misaligned(dx))
    for one, other in zip(resident, walked, strict=True):
        assert_same_bits(one, other)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["", "_add", "_input_gradient", "_weight_gradient", "_backward"])
@each_norm
def test_operators_keep_torchs_rules(norm: Norm, name: str) -> None:
    norm_checks.check_operator(norm, "cuda", name, "cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
@each_norm
def test_norms_of_any_layout(norm: Norm, layout: Callable[[Tensor], Tensor]) -> None:
    norm_checks.check_against_double(norm, (3, 64), torch.bfloat16, "cpu", layout=layout)


@each_norm
def test_rules_of_norms(norm: Norm) -> None:
    norm_checks.check_rules(norm, (70, 512), torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight": draw(8, dtype=torch.bfloat16)}, "weight is torch.bfloat16 .*backend 'reference'"),
        ({"weight": draw(9, dtype=torch.float32)}, r"weight is torch.float32 \[9\]"),
        ({"residual": draw(3, 8, dtype=torch.float32)}, r"residual is torch.float32 \[3, 8\]"),
    ],
)
def test_norms_refuse_operands_that_do_not_fit(wrong: dict[str, Tensor], message: str) -> None:
    good = {"x": draw(2, 8, dtype=torch.float32), "residual": draw(2, 8, dtype=torch.float32)}
    arguments = {**good, "weight": draw(8, dtype=torch.float32), **wrong}
    with pytest.raises(ValueError, match=message):
        cuda_kernels.rms_norm.add_forward(*arguments.values(), 1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", softmax_checks.SHAPES, ids=str)
def test_errors_of_softmax_are_at_most_twice_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    softmax_checks.check_against_double(SOFTMAX, shape, dtype, "cpu")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
@pytest.mark.parametrize("mask", softmax_checks.MASKS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 2, 9, 4), (2, 2, 20, 64)], ids=str)
def test_forms_of_softmax(shape: tuple[int, ...], mask: str, causal: bool, window: int | None) -> None:
    softmax_checks.check_against_double(SOFTMAX, shape, torch.bfloat16, "cpu", mask, causal, window)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("keys", "dtype"), [(33_000, torch.bfloat16), (9001, torch.float32)], ids=str)
def test_softmax_of_long_rows(keys: int, dtype: torch.dtype, clusters: bool, emulation: library.Library) -> None:
    set_clusters(emulation, clusters)
    softmax_checks.check_against_double(SOFTMAX, (1, 1, 1, keys), dtype, "cpu", "general", True, keys - 100)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mask", softmax_checks.MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_softmax_of_any_layout(layout: Callable[[Tensor], Tensor], mask: str) -> None:
    softmax_checks.check_against_double(SOFTMAX, (2, 2, 3, 48), torch.bfloat16, "cpu", mask, True, layout=layout)


@pytest.mark.parametrize("spread", [1e-6, 1e4])
def test_softmax_of_small_and_large_scores(spread: float) -> None:
    softmax_checks.check_against_double(SOFTMAX, (1, 2, 8, 100), torch.float32, "cpu", spread=spread)


def test_rules_of_softmax() -> None:
    softmax_checks.check_rules(SOFTMAX, (2, 2, 9, 64), torch.bfloat16, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_probabilities(dtype: torch.dtype, window: int | None) -> None:
    op = implementation("attention_probabilities", "cuda")
    softmax_checks.check_attention_probabilities(op, dtype, window, "cpu")


@pytest.mark.parametrize("moments", adamw_checks.MOMENTS, ids=str)
@pytest.mark.parametrize(("size", "weight_decay"), [(1, 0.1), (64, 0.0), (3001, 0.1)])
def test_errors_of_adamw_are_at_most_twice_torchs(size: int, weight_decay: float, moments: torch.dtype) -> None:
    adamw_checks.check_against_double(ADAMW, size, moments, "cpu", weight_decay)


def test_rules_of_an_adamw_step() -> None:
    adamw_checks.check_rules(ADAMW, "cpu")


def test_errors_of_cuda_become_exceptions(emulation: library.Library) -> None:
    x = torch.zeros(1)
    for wrong in ((-1, 1, 1.0, 0), (1, 1, 1.0, 9)):
        with pytest.raises(
            library.CudaError, match=r"softmax_input_gradient failed: invalid argument \(CUDA error 1\)"
        ):
            emulation.launch("softmax_input_gradient", x, x, x, *wrong)
    with pytest.raises(ValueError, match="on meta, meta, meta; they must all be on one cpu device"):
        emulation.launch("softmax_input_gradient", x.to("meta"), x.to("meta"), x.to("meta"), 1, 1, 1.0, 0)


def test_reasons_without_a_gpu() -> None:
    assert cuda_backend.unavailable("cpu") == "needs a GPU"
    assert cuda_backend.unavailable("mps") == "runs on NVIDIA GPUs, not on mps"
    assert "cuda: needs a GPU" in OPS.choice("layer_norm", "cpu", torch.float32, 8).reasons
    assert cuda_kernels.refusal("cuda", torch.float64, 8) == "takes float32, bfloat16 and float16, not float64"
    assert cuda_kernels.refusal("cuda", torch.float32, 0) == "the last axis is empty"
    assert cuda_kernels.REFUSALS["adamw"]("cuda", torch.bfloat16, 8) == "takes a float32 master, not bfloat16"


def test_an_unbuilt_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", library.PATH.with_name("absent.so"))
    assert "MEGAPIPE_CUDA=1" in str(cuda_backend.unavailable("cuda"))
