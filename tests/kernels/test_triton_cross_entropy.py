"""Vocabulary-parallel cross entropy in Triton, and what its reference promises."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megapipe.kernels.reference import cross_entropy as reference
from tests.kernels.cases import DEVICE, DTYPES, draw, needs_triton
from tests.kernels.cross_entropy_checks import Case, alone, check_alone, check_shared, shared


@pytest.fixture
def triton_op() -> ModuleType:
    from megapipe.kernels.triton_backend import cross_entropy

    return cross_entropy


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(40, 33), (1, 1000), (5, 4096), (2, 16390), (20, 1)])
def test_one_rank(triton_op: ModuleType, rows: int, width: int, dtype: torch.dtype) -> None:
    check_alone(triton_op, rows, width, dtype, DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("rows", "sizes"), [(40, [33]), (9, [500, 1, 499]), (3, [64, 0]), (2, [9000, 41])], ids=str)
def test_several_ranks(triton_op: ModuleType, rows: int, sizes: list[int], padding: int, dtype: torch.dtype) -> None:
    check_shared(triton_op, rows, sizes, dtype, DEVICE, padding)


def test_the_reference_is_right_to_double() -> None:
    case = Case.drawn(7, 50, torch.float64, "cpu")
    case.scale = case.scale.double()
    for found, exact in zip(alone(reference, case), case.exact(scaled=False), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)
    for found, exact in zip(shared(reference, case, [20, 0, 30]), case.exact(scaled=True), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)


def test_merging_changes_no_bit_of_log_sum_exps() -> None:
    """Neither alone, nor beside torch's own sum of several."""
    log_sum_exp, target = draw(4, 100, dtype=torch.float32), draw(4, 100, seed=1, dtype=torch.float32)
    by_rank = torch.stack([reference.with_sums(*pair) for pair in zip(log_sum_exp, target, strict=True)])
    assert torch.equal(reference.merged(by_rank[:1])[0], log_sum_exp[0])
    found, total = reference.merged(by_rank)
    assert torch.equal(found, torch.logsumexp(log_sum_exp, dim=0))
    assert torch.equal(total, target.sum(0))


BEYOND = {
    "far apart": [1e4, -1e4, 0.0, 88.0],
    "all alike": [-1e4, -1e4, -1e4, -1e4],
    "some hidden": [-math.inf, 1.0, -math.inf, 2.0],
    "NaN": [1.0, math.nan, 2.0, 3.0],
    "infinite": [1.0, 2.0, math.inf, 3.0],
    "all hidden": [-math.inf] * 4,
}


@needs_triton
@pytest.mark.parametrize("split", [[4], [2, 2], [1, 3]], ids=str)
@pytest.mark.parametrize("kind", BEYOND)
def test_numbers_beyond_the_ordinary(triton_op: ModuleType, kind: str, split: list[int]) -> None:
    """NaN where float64 has NaN, and close to the accuracy of the logits elsewhere. Rows do not touch each other."""
    logits = torch.tensor([BEYOND[kind], [1.0, 2.0, 3.0, 4.0]], device=DEVICE)
    labels = torch.tensor([3, 0], device=DEVICE)
    case = Case(logits, labels, torch.ones(2, device=DEVICE))
    tolerance = torch.finfo(torch.float32).eps * max(8.0, logits[0].nan_to_num(0.0, 0.0, 0.0).abs().max().item())
    found = [shared(triton_op, case, split)] + ([alone(triton_op, case)] if len(split) == 1 else [])
    for results in found:
        for ours, exact in zip(results, case.exact(scaled=False), strict=True):
            torch.testing.assert_close(ours, exact.float(), rtol=1e-6, atol=tolerance, equal_nan=True)


@needs_triton
def test_no_rows(triton_op: ModuleType) -> None:
    case = Case(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), torch.empty(0))
    for losses, gradient in (alone(triton_op, case), shared(triton_op, case, [5, 3])):
        assert losses.shape == (0,)
        assert gradient.shape == (0, 8)


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def misaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@needs_triton
@pytest.mark.parametrize("layout", [transposed, misaligned])
def test_any_layout_in_memory(triton_op: ModuleType, layout) -> None:  # type: ignore[no-untyped-def]
    case = Case.drawn(5, 80, torch.bfloat16, DEVICE)
    owned = torch.ones(5, dtype=torch.bool, device=DEVICE)
    log_sum_exp = torch.zeros(5, device=DEVICE)
    for call in (
        lambda logits: triton_op.statistics_and_gradient(logits, case.labels, owned),
        lambda logits: triton_op.gradient(logits, case.labels, owned, log_sum_exp, None),
    ):
        plain, other = case.logits.clone(), layout(case.logits)
        call(plain)
        call(other)
        assert torch.equal(plain, other)
        assert not torch.equal(plain, case.logits)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_in_a_tensor_of_its_own(triton_op: ModuleType, dtype: torch.dtype) -> None:
    """The form that needs no second pass over the logits of a rank with others."""
    case = Case.drawn(6, 100, dtype, DEVICE)
    softmax = torch.full((6, 110), 5.0, dtype=dtype, device=DEVICE)
    owned = torch.arange(6, device=DEVICE) % 2 == 0
    found, target = triton_op.row_statistics(case.logits, case.labels, owned, softmax[:, :100])
    expected, expected_target = reference.row_statistics(case.logits, case.labels, owned, None)
    torch.testing.assert_close(found, expected)
    assert torch.equal(target, expected_target)
    exact = case.logits.double().softmax(-1)
    # What is subtracted in the exponent is itself rounded to fp32.
    error = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * float(expected.abs().max()))
    assert (softmax[:, :100].double() - exact).abs().max() <= 2 * error
    assert (softmax[:, 100:] == 5.0).all()


@needs_triton
def test_compilers_see_through(triton_op: ModuleType) -> None:
    """One graph, in which logits and a softmax behind padding are written in place."""
    case = Case.drawn(4, 20, torch.float32, DEVICE)
    owned = torch.ones(4, dtype=torch.bool, device=DEVICE)

    def function(logits: Tensor) -> tuple[Tensor, ...]:
        whole, softmax = logits * 1, torch.zeros(4, 25, device=logits.device)
        log_sum_exp, target = triton_op.row_statistics(logits, case.labels, owned, softmax[:, :20])
        statistics = triton_op.statistics_and_gradient(whole, case.labels, owned)
        scaled = logits * 1
        triton_op.gradient(scaled, case.labels, owned, log_sum_exp, case.scale)
        return log_sum_exp, target, softmax, statistics, whole, scaled

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for first, second in zip(compiled(case.logits), function(case.logits), strict=True):
        assert torch.equal(first, second)
