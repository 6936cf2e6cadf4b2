"""Kernels run from their sm_90 PTX: exact up to rounding, in bounds, without races, with the declared bytes."""

from typing import Any

import pytest

from megapipe.kernels import triton_backend
from tests.kernels.cases import needs_triton

pytestmark = needs_triton

if triton_backend.installed():
    from megapipe.kernels.triton_backend.launch import Launch
    from tests.kernels.launches import constants, divisible, signature
    from tests.kernels.specimens import specimens
    from tests.ptx.cases import CASES, ODD_CASES, SPECIMEN_CASES
    from tests.ptx.checks import problems, run
    from tests.ptx.execution import compile_cases

FAST = [
    "add and layer norm, forward, bf16 768",
    "layer norm, backward, bf16 768",
    "softmax, causal forward, bf16 2048",
    "odd: gradient fp16 5001",
    "odd: layer norm, backward, fp16 7 x 333",
    "odd: adamw with a bf16 copy 1001",
]


def check(names: list[str]) -> None:
    """One process compiles all of them."""
    compiled = compile_cases(names)
    faults = [problem for name in names for problem in problems(CASES[name], run(CASES[name], compiled[name]))]
    assert not faults, "\n".join(faults)


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
