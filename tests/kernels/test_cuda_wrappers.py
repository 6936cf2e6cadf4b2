"""Properties of the CUDA kernels and their wrappers that no other backend has, on an emulated GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megapipe.kernels import cuda_backend
from megapipe.kernels.cuda_backend import kernels as cuda_kernels
from megapipe.kernels.cuda_backend import library
from megapipe.kernels.ops import OPS
from tests.kernels import norm_checks, softmax_checks
from tests.kernels.cases import assert_same_bits, draw, implementation, misaligned
from tests.kernels.emulated import needs_compiler, set_clusters
from tests.kernels.norm_checks import Norm

SOFTMAX = implementation("softmax", "cuda")

pytestmark = needs_compiler

NORMS = [Norm(op, implementation(op, "cuda")) for op in ("layer_norm", "rms_norm")]
LONG = [
    (NORMS[0], (9, 4104), torch.float32),
    (NORMS[1], (1, 33_000), torch.float16),
    (NORMS[0], (1, 9001), torch.bfloat16),
    (NORMS[1], (1, 9001), torch.float32),
]
"""Rows of several tiles, or of several blocks where there are clusters: in 16-byte pieces and in single elements."""


@pytest.fixture(autouse=True)
def _on_the_processor(emulation: library.Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "current", lambda: emulation)
    yield
    set_clusters(emulation, True)


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
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("keys", "dtype"), [(33_000, torch.bfloat16), (9001, torch.float32)], ids=str)
def test_softmax_of_long_rows(keys: int, dtype: torch.dtype, clusters: bool, emulation: library.Library) -> None:
    set_clusters(emulation, clusters)
    softmax_checks.check_against_double(SOFTMAX, (1, 1, 1, keys), dtype, "cpu", "general", True, keys - 100)


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
