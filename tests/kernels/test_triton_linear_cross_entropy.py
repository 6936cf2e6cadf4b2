"""Output projection and cross entropy in one: the reference against float64, Triton against the reference, memory."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from megapipe.kernels.reference import linear_cross_entropy as reference
from megapipe.spec import temporaries
from tests.kernels.cases import DEVICE, DTYPES, needs_triton
from tests.kernels.linear_cross_entropy_checks import Case, check_exactness, run, run_with_bias
from tests.support.live_bytes import LiveBytes

SPLITS = [([50], 0), ([50], 6), ([20, 0, 30], 2)]


@pytest.fixture
def triton_op() -> ModuleType:
    from megapipe.kernels.triton_backend import linear_cross_entropy

    return linear_cross_entropy


@pytest.mark.parametrize("rows", [1, reference.CHUNK_ROWS, 2 * reference.CHUNK_ROWS + 3])
@pytest.mark.parametrize(("sizes", "padding"), SPLITS, ids=str)
def test_the_reference_is_right_to_double(rows: int, sizes: list[int], padding: int) -> None:
    case = Case.drawn(rows, 8, 50, torch.float64, "cpu")
    found = run(reference, case, sizes, padding) + run_with_bias(reference, case, sizes, padding)
    for ours, exact in zip(found, case.exact() + case.exact_with_bias(), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-13)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "padding"), SPLITS, ids=str)
def test_triton_with_several_chunks(
    triton_op: ModuleType, sizes: list[int], padding: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporaries, "CHUNK_BYTES", 1 << 9)
    check_exactness(triton_op, 11, 16, sizes, padding, dtype, DEVICE)


@needs_triton
def test_no_rows(triton_op: ModuleType) -> None:
    case = Case.drawn(0, 8, 50, torch.float32, "cpu")
    for op in (reference, triton_op):
        losses, dx, dweight, gradient = run(op, case, [20, 30], 1)
        assert losses.shape == (0,)
        assert dx.shape == (0, 8)
        assert gradient.shape == (0, 50)
        assert not dweight.any()


@needs_triton
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_logits_never_exist(backend: str, triton_op: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live bytes stay far below one tensor of rows times vocabulary, where the gradient is not kept."""
    op, rows, vocabulary = (triton_op, 48, 512) if backend == "triton" else (reference, 8 * reference.CHUNK_ROWS, 64)
    monkeypatch.setattr(temporaries, "CHUNK_BYTES", vocabulary * 4 * 8)
    case = Case.drawn(rows, 2, vocabulary, torch.float32, "cpu")
    (part,) = case.parts([vocabulary], 0)
    with LiveBytes() as live:
        own = op.statistics(case.x, *part.head())
        op.backward(case.x, *part.head(), own[0] + own[1].log(), case.scale, part.bias)
    assert live.peak < 0.75 * rows * vocabulary * 4


def test_chunks_stay_within_their_bytes() -> None:
    assert temporaries.chunk_rows(128256, 2) == 1024
    assert temporaries.chunk_rows(32000, 4) == 2048
    assert temporaries.chunk_rows(1 << 40, 2) == 1
    assert temporaries.chunk_rows(0, 2) >= 1 << 20


@needs_triton
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_compilers_see_through(backend: str, triton_op: ModuleType) -> None:
    """One graph for all functions of the op, with the bits of eager calls."""
    op = triton_op if backend == "triton" else reference
    case = Case.drawn(4, 8, 20, torch.float32, DEVICE)
    part, _ = case.parts([15, 5], 2)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        own, gradient = op.statistics_and_gradient(x, *part.head(), False)
        log_sum_exp = own[0] + own[1].log()
        op.complete_gradient(gradient, part.columns, part.owned, part.num_columns, own, log_sum_exp)
        found = [op.backward(x, *part.head(), log_sum_exp, case.scale, bias) for bias in (None, part.bias)]
        return op.statistics(x, *part.head(), part.bias), gradient, *found[0], *found[1]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for first, second in zip(compiled(case.x), function(case.x), strict=True):
        assert torch.equal(first, second)
