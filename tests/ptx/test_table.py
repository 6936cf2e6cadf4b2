"""The table of docs/ptx.md says what the interpreter finds now."""

import pytest

from megapipe.kernels import triton_backend
from tests.kernels.cases import needs_triton

pytestmark = needs_triton

if triton_backend.installed():
    import triton

    from tests.ptx.cases import CASES
    from tests.ptx.table import PAGE, rows, rows_of

ERRORS = (2, 3)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def alike(one: str, other: str) -> bool:
    """Within a factor of 2, or both those of fp64: torch's and numpy's functions and sums depend on the processor."""
    low, high = sorted((float(one), float(other)))
    return high <= max(2 * low, 1e-14)


def check(names: list[str]) -> None:
    page = PAGE.read_text()
    if f"Triton {triton.__version__}" not in page:
        pytest.skip(f"the table is of another version than Triton {triton.__version__}")
    written = {cells(row)[0]: cells(row) for row in rows_of(page)}
    assert list(written) == list(CASES)
    for row in map(cells, rows(names)):
        for column, (actual, expected) in enumerate(zip(row, written[row[0]], strict=True)):
            assert alike(actual, expected) if column in ERRORS else actual == expected, (row, written[row[0]])


def test_two_rows() -> None:
    check(["softmax, backward, bf16 512", "odd: swiglu backward fp16 5 x 77"])


@pytest.mark.exhaustive
def test_every_row() -> None:
    check(list(CASES))
