"""Kernels run from their sm_90 PTX: exact up to rounding, in bounds, without races, with the declared bytes, and with
the rows of docs/ptx.md."""

from typing import Any

import pytest

from megapipe.kernels import triton_backend
from tests.kernels.cases import needs_triton

pytestmark = needs_triton

if triton_backend.installed():
    import triton

    from megapipe.kernels.triton_backend.launch import Launch
    from tests.kernels.launches import constants, divisible, signature
    from tests.kernels.specimens import specimens
    from tests.ptx.cases import CASES, ODD_CASES, SPECIMEN_CASES
    from tests.ptx.table import PAGE, rows, rows_of

FAST = [
    "add and layer norm, forward, bf16 768",
    "layer norm, backward, bf16 768",
    "softmax, causal forward, bf16 2048",
    "odd: gradient fp16 5001",
    "odd: layer norm, backward, fp16 7 x 333",
    "odd: adamw with a bf16 copy 1001",
]
ERRORS = (2, 3)
"""Columns of the table."""


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def alike(one: str, other: str) -> bool:
    """Within a factor of 2, or both those of fp64: torch's and numpy's functions and sums depend on the processor."""
    low, high = sorted((float(one), float(other)))
    return high <= max(2 * low, 1e-14)


def check(names: list[str]) -> None:
    """Run cases, which fails where one has a problem, and compare their rows with those of the page."""
    page, made = PAGE.read_text(), rows(names)
    if f"Triton {triton.__version__}" not in page:
        pytest.skip(f"the table is of another version than Triton {triton.__version__}")
    written = {cells(row)[0]: cells(row) for row in rows_of(page)}
    assert list(written) == list(CASES)
    for row in map(cells, made):
        for column, (actual, expected) in enumerate(zip(row, written[row[0]], strict=True)):
            assert alike(actual, expected) if column in ERRORS else actual == expected, (row, written[row[0]])


def test_some_kernels() -> None:
    check(FAST)


@pytest.mark.slow
def test_odd_sizes() -> None:
    check(list(ODD_CASES))


@pytest.mark.exhaustive
def test_every_specimen() -> None:
    check(list(SPECIMEN_CASES))


def machine_code(launch: "Launch") -> tuple[Any, ...]:
    """All that the compiler sees of a launch."""
    kernel = launch.kernel.fn
    name = kernel.__module__, kernel.__name__
    return name, signature(launch), constants(launch), divisible(launch), launch.num_warps


@pytest.mark.slow
def test_every_specimen_has_a_case_with_its_machine_code() -> None:
    launches = {specimen.name: specimen.launch for specimen in specimens()}
    assert launches.keys() == SPECIMEN_CASES.keys()
    for name, case in SPECIMEN_CASES.items():
        assert machine_code(case.launch()) == machine_code(launches[name])
