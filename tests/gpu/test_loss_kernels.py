"""Compiled kernels of activations, positions, dropout and the loss at the sizes of training."""

import importlib
from types import ModuleType

import pytest
import torch

from tests.kernels import cross_entropy_checks, dropout_checks, linear_cross_entropy_checks, rotary_checks
from tests.kernels.activation_cases import KINDS, case
from tests.kernels.apply_checks import check_exactness
from tests.kernels.cases import DTYPES, draw

pytestmark = pytest.mark.gpu


def backend(op: str) -> ModuleType:
    """The op in Triton."""
    pytest.importorskip("triton")
    return importlib.import_module(f"megapipe.kernels.triton_backend.{op}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4099, 3072), (1023, 14336), (513, 16385)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    function, reference, inputs = case(kind, "cuda", shape[:-1], shape[-1], dtype)
    check_exactness(function, reference, inputs, shape[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 2049, 32, 128), (1, 8191, 5, 80), (3, 700, 12, 64)], ids=str)
def test_rotary(shape: tuple[int, int, int, int], interleaved: bool, dtype: torch.dtype) -> None:
    rotary_checks.check(backend("rotary"), shape, dtype, "cuda", interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 1025, 768), (1, 2047, 8192), (2, 300, 16385)], ids=str)
def test_dropout_before_a_residual(shape: tuple[int, int, int], with_bias: bool, dtype: torch.dtype) -> None:
    dropout_checks.check_fused(backend("bias_dropout_residual"), shape, dtype, "cuda", with_bias)


def test_dropout_of_attention_weights() -> None:
    channels = torch.arange(8 * 1024, dtype=torch.int32, device="cuda").view(8, 1, 1024)
    keys = dropout_checks.token_keys(2, 1024, "cuda")[:, None, :, None]
    weights = draw(2, 8, 1024, 1024, dtype=torch.float32, device="cuda")
    dropout_checks.check_mask(backend("dropout"), weights, keys, channels, 0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8192, 16384, 32001, 50257, 128256])
def test_cross_entropy_of_one_rank(width: int, dtype: torch.dtype) -> None:
    cross_entropy_checks.check_alone(backend("cross_entropy"), 515, width, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[50257], [25152, 25105], [16384, 1, 40000]], ids=str)
def test_cross_entropy_of_several_ranks(sizes: list[int], dtype: torch.dtype) -> None:
    cross_entropy_checks.check_shared(backend("cross_entropy"), 515, sizes, dtype, "cuda", padding=7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[50257], [25152, 25105]], ids=str)
def test_linear_cross_entropy(sizes: list[int], dtype: torch.dtype) -> None:
    op = backend("linear_cross_entropy")
    linear_cross_entropy_checks.check_exactness(op, 3000, 256, sizes, 7, dtype, "cuda")


def test_more_logits_than_32_bits_count() -> None:
    """The last of 17,000 rows of 128k columns, by itself and behind all others."""
    op = backend("cross_entropy")
    logits = torch.zeros(17_000, 128_256, dtype=torch.bfloat16, device="cuda")
    logits[-1] = draw(128_256, dtype=torch.bfloat16, device="cuda")
    labels = torch.full((17_000,), 5, device="cuda")
    owned = torch.ones_like(labels, dtype=torch.bool)
    last = logits[-1:].clone()
    expected = op.statistics_and_gradient(last, labels[-1:], owned[-1:])
    found = op.statistics_and_gradient(logits, labels, owned)
    assert torch.equal(found[:, -1:], expected)
    assert torch.equal(logits[-1:], last)
