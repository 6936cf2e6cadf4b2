"""Checks after a case ran: its results are exact up to rounding, and it moved the bytes that it must."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from megapipe.kernels.triton_backend.launch import Launch
from tests.kernels.launches import arguments
from tests.ptx.cases import Case
from tests.ptx.execution import Compiled, Executed, execute


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    error: the largest of any result, relative to the result's largest number. excess: the same beyond half a unit in
    the last place of each number. distinct, requested: bytes of the large tensors.
    """

    executed: Executed
    error: float
    excess: float
    distinct: int
    requested: int


def errors(case: Case, launch: Launch) -> tuple[float, float]:
    """(error, excess) of a launch that ran, as `Outcome` has them."""
    before = SimpleNamespace(**{name: _exact(value) for name, value in arguments(case.launch()).items()})
    after = SimpleNamespace(**arguments(launch))
    error = excess = 0.0
    for actual, exact in case.results(before, after).values():
        assert actual.shape == exact.shape
        wrong = (actual.double() - exact).abs()
        beyond = wrong - torch.finfo(actual.dtype).eps / 2 * exact.abs()
        largest = exact.abs().max().item()
        # A NaN is infinitely wrong.
        error = max(error, wrong.nan_to_num(torch.inf).max().item() / largest)
        excess = max(excess, beyond.nan_to_num(torch.inf).max().item() / largest)
    return error, excess


def _exact(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def run(case: Case, compiled: Compiled, change: Callable[[str], str] = str) -> Outcome:
    """Execute a case. Raises PtxError where it breaks a rule."""
    launch = case.launch()
    executed = execute(compiled, launch, case.outputs, change=change)
    moved = [executed.moved[name] for name in case.large if name in executed.moved]
    return Outcome(
        executed,
        *errors(case, launch),
        sum(each.distinct_read + each.distinct_written for each in moved),
        sum(each.requested_read + each.requested_written for each in moved),
    )


def problems(case: Case, outcome: Outcome) -> list[str]:
    """Return the problems, in words."""
    faults = []
    if not outcome.excess <= case.slack:
        faults.append(f"error {outcome.excess:.1e} beyond rounding, above {case.slack:.1e}")
    expected = case.moved
    for what, counted, wanted in (
        ("distinct", outcome.distinct, expected.distinct),
        ("requested", outcome.requested, expected.requested),
        ("declared", outcome.distinct - expected.beyond, expected.declared),
    ):
        if wanted is not None and counted != wanted:
            faults.append(f"{counted} bytes {what}, not {wanted}")
    for name, moved in outcome.executed.moved.items():
        if moved.requested_written != moved.distinct_written:
            faults.append(f"{moved.requested_written} bytes written to {name}, which gets {moved.distinct_written}")
    return [f"{case.name}: {problem}" for problem in faults]
