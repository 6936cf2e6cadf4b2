"""Compiled kernels of activations, positions, dropout and the loss at the sizes of training."""

import pytest
import torch

from tests.kernels.cases import DTYPES, draw, triton
from tests.kernels.elementwise_checks import (
    ACTIVATIONS,
    DROPOUT,
    ROTARY,
    case,
    check_exactness,
    check_mask,
    token_keys,
)
from tests.kernels.loss_checks import check_logits, check_projection

pytestmark = pytest.mark.gpu


SHAPES = [
    *((kind, shape) for kind in ACTIVATIONS for shape in [(4099, 3072), (1023, 14336), (513, 16385)]),
    *((kind, shape) for kind in ROTARY for shape in [(2, 2049, 32, 128), (1, 8191, 5, 80), (3, 700, 12, 64)]),
    *((kind, shape) for kind in DROPOUT for shape in [(4, 1025, 768), (1, 2047, 8192), (2, 300, 16385)]),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "shape"), SHAPES, ids=str)
def test_elementwise_ops(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    check_exactness(case(kind, shape, dtype, "cuda"))


def test_dropout_of_attention_weights() -> None:
    channels = torch.arange(8 * 1024, dtype=torch.int32, device="cuda").view(8, 1, 1024)
    keys = token_keys(2, 1024, "cuda")[:, None, :, None]
    weights = draw(2, 8, 1024, 1024, dtype=torch.float32, device="cuda")
    check_mask(triton("dropout"), weights, keys, channels, 0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8192, 16384, 32001, 50257, 128256])
def test_cross_entropy_of_one_rank(width: int, dtype: torch.dtype) -> None:
    check_logits(triton("cross_entropy"), 515, [width], dtype, "cuda", alone=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[50257], [25152, 25105], [16384, 1, 40000]], ids=str)
def test_cross_entropy_of_several_ranks(sizes: list[int], dtype: torch.dtype) -> None:
    check_logits(triton("cross_entropy"), 515, sizes, dtype, "cuda", padding=7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[50257], [25152, 25105]], ids=str)
def test_linear_cross_entropy(sizes: list[int], dtype: torch.dtype) -> None:
    check_projection(triton("linear_cross_entropy"), 3000, 256, sizes, 7, dtype, "cuda")


def test_more_logits_than_32_bits_count() -> None:
    """The last of 17,000 rows of 128k columns, alone and after all others."""
    op = triton("cross_entropy")
    logits = torch.zeros(17_000, 128_256, dtype=torch.bfloat16, device="cuda")
    logits[-1] = draw(128_256, dtype=torch.bfloat16, device="cuda")
    labels = torch.full((17_000,), 5, device="cuda")
    owned = torch.ones_like(labels, dtype=torch.bool)
    last = logits[-1:].clone()
    expected = op.statistics_and_gradient(last, labels[-1:], owned[-1:])
    actual = op.statistics_and_gradient(logits, labels, owned)
    assert torch.equal(actual[:, -1:], expected)
    assert torch.equal(logits[-1:], last)
