"""The CUDA C++ kernels, as installed, at the sizes of training: the checks of tests/kernels."""

import pytest
import torch

from megapipe.kernels import cuda_backend
from megapipe.kernels.cuda_backend import kernels as cuda_kernels
from megapipe.kernels.cuda_backend import library
from megapipe.kernels.reference.optimizer import Buffers, Coefficients
from tests.kernels import adamw_checks, norm_checks, softmax_checks
from tests.kernels.cases import DTYPES, LAYOUTS, Layout, assert_same_bits, draw, implementation
from tests.kernels.norm_checks import EPSILON, Norm

SOFTMAX = implementation("softmax", "cuda")
ADAMW = implementation("adamw", "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not library.PATH.exists(), reason="the CUDA C++ kernels are not built (MEGAPIPE_CUDA=1)"),
]

NORMS = [Norm(op, implementation(op, "cuda")) for op in ("layer_norm", "rms_norm")]


def test_the_library_takes_this_gpu() -> None:
    assert cuda_backend.unavailable("cuda") is None


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.op)
class TestNorms:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "shape", [(4096, 1024), (2049, 4096), (1000, 8191), (300, 16384), (33, 65536), (5, 70001)]
    )
    def test_against_double(self, norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        norm_checks.check_against_double(norm, shape, dtype, "cuda")

    def test_rows_longer_than_a_cluster(self, norm: Norm) -> None:
        norm_checks.check_against_double(norm, (2, 300_000), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_awkward_layouts(self, norm: Norm, layout: Layout) -> None:
        norm_checks.check_against_double(norm, (513, 4096), torch.bfloat16, "cuda", layout)

    @pytest.mark.parametrize("shape", [(4099, 768), (4099, 8192), (257, 40_000)])
    def test_rules(self, norm: Norm, shape: tuple[int, ...]) -> None:
        norm_checks.check_rules(norm, shape, torch.bfloat16, "cuda")

    def test_more_elements_than_32_bits_count(self, norm: Norm) -> None:
        x = torch.ones(2**21 + 3, 1024, dtype=torch.bfloat16, device="cuda")
        x[-1] = draw(1024, dtype=torch.bfloat16, device="cuda")
        parameters = norm.parameters(1024, torch.bfloat16, "cuda")
        last = norm.module.forward(x[-1:], *parameters, EPSILON)[0]
        assert_same_bits(norm.module.forward(x, *parameters, EPSILON)[0][-1:], last)

    def test_work_follows_the_current_stream(self, norm: Norm) -> None:
        norm_checks.check_current_stream(norm)


class TestSoftmax:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(2, 16, 512, 512), (1, 4, 300, 4097), (1, 1, 64, 65536), (1, 1, 3, 70001)])
    def test_against_double(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        softmax_checks.check_against_double(SOFTMAX, shape, dtype, "cuda")

    @pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 100)])
    @pytest.mark.parametrize("mask", softmax_checks.MASKS)
    def test_forms(self, mask: str, causal: bool, window: int | None) -> None:
        softmax_checks.check_against_double(SOFTMAX, (2, 4, 257, 2048), torch.bfloat16, "cuda", mask, causal, window)

    def test_rules(self) -> None:
        softmax_checks.check_rules(SOFTMAX, (2, 8, 512, 1024), torch.bfloat16, "cuda", 4096)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("window", [None, 3])
    def test_attention_probabilities(self, window: int | None, dtype: torch.dtype) -> None:
        op = implementation("attention_probabilities", "cuda")
        softmax_checks.check_attention_probabilities(op, dtype, window, "cuda")


class TestAdamW:
    @pytest.mark.parametrize("moments", adamw_checks.MOMENTS, ids=str)
    def test_against_double(self, moments: torch.dtype) -> None:
        adamw_checks.check_against_double(ADAMW, 3_000_001, moments, "cuda", weight_decay=0.1)

    def test_rules(self) -> None:
        adamw_checks.check_rules(ADAMW, "cuda")

    def test_a_captured_step_reads_its_scale_when_replayed(self) -> None:
        state = adamw_checks.buffers(5000, torch.float32, "cuda")
        scale, skip = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        update = Coefficients(3, 1e-2, (0.9, 0.95), 1e-8, 0.1)
        expected = adamw_checks.stepped(ADAMW, state, update, gradient_scale=torch.full((), 0.5, device="cuda"))
        start = {name: tensor.clone() for name, tensor in state.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cuda_kernels.adamw_step(Buffers(**state, gradient_scale=scale, skip=skip), update)
        skip.fill_(1)
        graph.replay()
        assert_same_bits(state["master"], start["master"])
        skip.zero_()
        scale.fill_(0.5)
        graph.replay()
        assert_same_bits(state["master"], expected["master"])
