"""Compiled kernels at the sizes of training: the checks of tests/kernels, and what only a GPU shows."""

import pytest
import torch

from megapipe.kernels.registry import Implementation
from tests.kernels import norm_checks, softmax_checks
from tests.kernels.cases import DTYPES, LAYOUTS, Layout, assert_same_bits, draw, triton
from tests.kernels.norm_checks import EPSILON, Norm
from tests.kernels.softmax_checks import MASKS

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["layer_norm", "rms_norm"])
def norm(request: pytest.FixtureRequest) -> Norm:
    """One of the two ops in Triton."""
    return Norm(request.param, triton(request.param))


class TestNorms:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "shape", [(4096, 1024), (2049, 4096), (1000, 8191), (300, 16384), (64, 32768), (5, 70001)]
    )
    def test_against_double(self, norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        norm_checks.check_against_double(norm, shape, dtype, "cuda")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_awkward_layouts(self, norm: Norm, layout: Layout) -> None:
        norm_checks.check_against_double(norm, (513, 4096), torch.bfloat16, "cuda", layout)

    @pytest.mark.parametrize("shape", [(4099, 768), (4099, 8192), (257, 16384)])
    def test_rules(self, norm: Norm, shape: tuple[int, ...]) -> None:
        norm_checks.check_rules(norm, shape, torch.bfloat16, "cuda")

    def test_more_elements_than_32_bits_count(self, norm: Norm) -> None:
        x = torch.ones(2**21 + 3, 1024, dtype=torch.bfloat16, device="cuda")
        x[-1] = draw(1024, dtype=torch.bfloat16, device="cuda")
        parameters = norm.parameters(1024, torch.bfloat16, "cuda")
        y, *statistics = norm.module.forward(x, *parameters, EPSILON)
        dx = norm.module.input_gradient(x, x, *statistics, parameters[0])
        last, *of_last = norm.module.forward(x[-1:], *parameters, EPSILON)
        assert_same_bits(y[-1:], last)
        assert_same_bits(dx[-1:], norm.module.input_gradient(x[-1:], x[-1:], *of_last, parameters[0]))

    def test_work_follows_the_current_stream(self, norm: Norm) -> None:
        norm_checks.check_current_stream(norm)


@pytest.fixture
def softmax() -> Implementation:
    """The op in Triton."""
    return triton("softmax")


class TestSoftmax:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(2, 4, 512, 512), (1, 2, 100, 2047), (1, 2, 64, 16384), (1, 1, 16, 65536)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_against_double(
        self, softmax: Implementation, shape: tuple[int, ...], dtype: torch.dtype, causal: bool
    ) -> None:
        softmax_checks.check_against_double(softmax, shape, dtype, "cuda", causal=causal)

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("window", [None, 700])
    @pytest.mark.parametrize("keys", [1023, 4096, 40000])
    def test_masks(self, softmax: Implementation, mask: str, window: int | None, keys: int) -> None:
        softmax_checks.check_against_double(softmax, (2, 2, 50, keys), torch.bfloat16, "cuda", mask, True, window)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_awkward_layouts(self, softmax: Implementation, layout: Layout) -> None:
        softmax_checks.check_against_double(
            softmax, (2, 2, 50, 1024), torch.bfloat16, "cuda", "general", layout=layout
        )

    @pytest.mark.parametrize(("length", "keys"), [(2048, 24), (2048, 2048), (65536, 20001)])
    def test_rules(self, softmax: Implementation, length: int, keys: int) -> None:
        softmax_checks.check_rules(softmax, (1, 2, 60, length), torch.bfloat16, "cuda", keys)
