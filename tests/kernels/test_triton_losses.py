"""Vocabulary-parallel cross entropy, alone and fused with the output projection: the references, and Triton."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megapipe.kernels.reference import cross_entropy as reference_cross_entropy
from megapipe.spec import linear
from tests.kernels.cases import DEVICE, DTYPES, draw, each_backend, implementation, misaligned, triton
from tests.kernels.loss_checks import Logits, Projection, check_logits, check_projection
from tests.support.live_bytes import LiveBytes

REFERENCE, LINEAR_REFERENCE = (implementation(op, "reference") for op in ("cross_entropy", "linear_cross_entropy"))
SPLITS = [([50], 0), ([50], 6), ([20, 0, 30], 2)]


ALONE = [(rows, [width], 0, True) for rows, width in [(40, 33), (1, 1000), (5, 4096), (2, 16390), (20, 1)]]
SHARED = [(40, [33]), (9, [500, 1, 499]), (3, [64, 0]), (2, [9000, 41])]
CASES = [*ALONE, *((rows, sizes, padding, False) for rows, sizes in SHARED for padding in (0, 3))]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "sizes", "padding", "alone"), CASES, ids=str)
def test_errors_are_like_the_references(
    rows: int, sizes: list[int], padding: int, alone: bool, dtype: torch.dtype
) -> None:
    check_logits(triton("cross_entropy"), rows, sizes, dtype, DEVICE, padding, alone)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "padding"), SPLITS, ids=str)
def test_errors_of_projections_in_chunks_are_like_the_references(
    sizes: list[int], padding: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "CHUNK_BYTES", 1 << 9)
    check_projection(triton("linear_cross_entropy"), 11, 16, sizes, padding, dtype, DEVICE)


@pytest.mark.parametrize("rows", [1, reference_cross_entropy.CHUNK_ROWS, 2 * reference_cross_entropy.CHUNK_ROWS + 3])
@pytest.mark.parametrize(("sizes", "padding"), SPLITS, ids=str)
def test_references_are_exact_in_float64(rows: int, sizes: list[int], padding: int) -> None:
    case = Projection.drawn(rows, 8, 50, torch.float64, "cpu")
    for with_bias in (False, True):
        ours = case.run(LINEAR_REFERENCE, sizes, padding, with_bias)
        torch.testing.assert_close(ours, case.exact(with_bias), rtol=1e-11, atol=1e-13)
    logits = Logits.drawn(rows, 50, torch.float64, "cpu")
    torch.testing.assert_close(logits.alone(REFERENCE), logits.exact(scaled=False), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(logits.shared(REFERENCE, sizes), logits.exact(scaled=True), rtol=1e-12, atol=1e-14)


def test_merging_changes_no_bit_of_log_sum_exps() -> None:
    """The loss of one rank, and that of several in comparison with torch's own sum."""
    log_sum_exp, target = draw(4, 100, dtype=torch.float32), draw(4, 100, seed=1, dtype=torch.float32)
    by_rank = torch.stack([reference_cross_entropy.with_sums(*pair) for pair in zip(log_sum_exp, target, strict=True)])
    assert torch.equal(reference_cross_entropy.merged(by_rank[:1])[0], log_sum_exp[0])
    merged, total = reference_cross_entropy.merged(by_rank)
    assert torch.equal(merged, torch.logsumexp(log_sum_exp, dim=0))
    assert torch.equal(total, target.sum(0))


SPECIAL = {
    "far apart": [1e4, -1e4, 0.0, 88.0],
    "all alike": [-1e4, -1e4, -1e4, -1e4],
    "some hidden": [-math.inf, 1.0, -math.inf, 2.0],
    "NaN": [1.0, math.nan, 2.0, 3.0],
    "infinite": [1.0, 2.0, math.inf, 3.0],
    "all hidden": [-math.inf] * 4,
}


@each_backend
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_logits_act_as_in_float64(backend: str, kind: str) -> None:
    """NaN where float64 has NaN, and close to the accuracy of the logits elsewhere. Rows do not affect each other."""
    op = implementation("cross_entropy", backend)
    logits = torch.tensor([SPECIAL[kind], [1.0, 2.0, 3.0, 4.0]], device=DEVICE)
    case = Logits(logits, torch.tensor([3, 0], device=DEVICE), torch.ones(2, device=DEVICE))
    tolerance = torch.finfo(torch.float32).eps * max(8.0, logits[0].nan_to_num(0.0, 0.0, 0.0).abs().max().item())
    exact = tuple(each.float() for each in case.exact(scaled=False))
    for each in (case.alone(op), *(case.shared(op, split) for split in ([4], [2, 2], [1, 3]))):
        torch.testing.assert_close(each, exact, rtol=1e-6, atol=tolerance, equal_nan=True)


def test_no_rows() -> None:
    case = Logits(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), torch.empty(0))
    op = triton("cross_entropy")
    for losses, gradient in (case.alone(op), case.shared(op, [5, 3])):
        assert (losses.shape, gradient.shape) == ((0,), (0, 8))
    for each in (LINEAR_REFERENCE, triton("linear_cross_entropy")):
        losses, dx, dweight, gradient = Projection.drawn(0, 8, 50, torch.float32, "cpu").run(each, [20, 30], 1, False)
        assert (losses.shape, dx.shape, gradient.shape) == ((0,), (0, 8), (0, 50))
        assert not dweight.any()


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@pytest.mark.parametrize("layout", [transposed, misaligned])
def test_layout_in_memory_changes_no_bit(layout: Callable[[Tensor], Tensor]) -> None:
    op = triton("cross_entropy")
    case = Logits.drawn(5, 80, torch.bfloat16, DEVICE)
    owned = torch.ones(5, dtype=torch.bool, device=DEVICE)
    for call in (
        lambda logits: op.statistics_and_gradient(logits, case.labels, owned),
        lambda logits: op.gradient(logits, case.labels, owned, torch.zeros(5, device=DEVICE), None),
    ):
        plain, other = case.logits.clone(), layout(case.logits)
        call(plain)
        call(other)
        assert torch.equal(plain, other)
        assert not torch.equal(plain, case.logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_in_a_tensor_of_its_own(dtype: torch.dtype) -> None:
    """A rank among others then needs no second pass over the logits."""
    row_statistics = reference_cross_entropy.cross_entropy_row_statistics
    case = Logits.drawn(6, 100, dtype, DEVICE)
    softmax = torch.full((6, 110), 5.0, dtype=dtype, device=DEVICE)
    owned = torch.arange(6, device=DEVICE) % 2 == 0
    log_sum_exp, target = row_statistics(case.logits, case.labels, owned, softmax[:, :100])
    exact = row_statistics(case.logits.double(), case.labels, owned, None)
    torch.testing.assert_close(log_sum_exp, exact[0].float())
    assert torch.equal(target, exact[1].float())
    # What is subtracted in the exponent is itself rounded to fp32.
    error = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * float(exact[0].abs().max()))
    assert (softmax[:, :100].double() - case.logits.double().softmax(-1)).abs().max() <= 2 * error
    assert (softmax[:, 100:] == 5.0).all()


@each_backend
def test_memory_stays_below_one_tensor_of_logits(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    each = implementation("linear_cross_entropy", backend)
    rows, vocabulary = (48, 512) if backend == "triton" else (8 * reference_cross_entropy.CHUNK_ROWS, 64)
    monkeypatch.setattr(linear, "CHUNK_BYTES", vocabulary * 4 * 8)
    case = Projection.drawn(rows, 2, vocabulary, torch.float32, "cpu")
    (part,) = case.parts([vocabulary], 0)
    with LiveBytes() as live:
        own = each.statistics(case.x, *part.head())
        each.backward(case.x, *part.head(), own[0] + own[1].log(), case.scale, part.bias)
    assert live.peak < 0.75 * rows * vocabulary * 4


def test_chunks_stay_within_their_bytes() -> None:
    sizes = [(128256, 2), (32000, 4), (1 << 40, 2)]
    assert [linear.chunk_rows(*each) for each in sizes] == [1024, 2048, 1]
    assert linear.chunk_rows(0, 2) >= 1 << 20


def test_compiled_graphs_have_the_bits_of_eager_calls() -> None:
    """Logits are written in place."""
    op = triton("cross_entropy")
    case = Logits.drawn(4, 20, torch.float32, DEVICE)
    owned = torch.ones(4, dtype=torch.bool, device=DEVICE)

    def function(logits: Tensor) -> tuple[Tensor, ...]:
        whole, scaled = logits * 1, logits * 1
        own = op.statistics(logits, case.labels, owned)
        statistics = op.statistics_and_gradient(whole, case.labels, owned)
        op.gradient(scaled, case.labels, owned, own[0] + own[1].log(), case.scale)
        return own, statistics, whole, scaled

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(case.logits), function(case.logits)))


@each_backend
def test_compiled_projections_have_the_bits_of_eager_calls(backend: str) -> None:
    each = implementation("linear_cross_entropy", backend)
    case = Projection.drawn(4, 8, 20, torch.float32, DEVICE)
    part, _ = case.parts([15, 5], 2)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        own, gradient = each.statistics_and_gradient(x, *part.head(), False)
        log_sum_exp = own[0] + own[1].log()
        each.complete_gradient(gradient, part.columns, part.owned, part.num_columns, own, log_sum_exp)
        gradients = [each.backward(x, *part.head(), log_sum_exp, case.scale, bias) for bias in (None, part.bias)]
        return each.statistics(x, *part.head(), part.bias), gradient, *gradients[0], *gradients[1]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(case.x), function(case.x)))
