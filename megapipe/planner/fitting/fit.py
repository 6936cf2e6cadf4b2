"""Fitting a machine's efficiency to rows of training speed, and how well it then tells them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Protocol

import numpy as np

from megapipe.config.errors import ConfigError
from megapipe.layout.hardware.description import Efficiency, Hardware
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.fitting.least_squares import Floats, Parameter, fit_parameters, spreads
from megapipe.planner.fitting.priors import ROW_ERROR, Prior

PARAMETERS = (
    Parameter("ceiling", 0.05, 1.0, 0.7, 0.02),
    Parameter("memory", 0.05, 1.0, 0.7, 0.05),
    Parameter("links", 0.05, 1.0, 0.7, 0.05),
)
"""All that is free: shares of the nominal figures that matrix products, memory and links reach. See `Efficiency`."""


class FittingRow(Protocol):
    """Something that was run, and how fast it was."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def source(self) -> str:
        """Where its speed comes from."""
        ...

    def predict(self, hardware: Hardware) -> Estimate:
        """The run on a machine; ConfigError where nothing fits."""
        ...

    def speeds(self, estimate: Estimate) -> tuple[float, float]:
        """Predicted and measured, in one unit, more being faster."""
        ...


@dataclass(frozen=True)
class RowResult:
    """A row beside its prediction. error: predicted over measured speed, less 1. left_out: the same with parameters
    that were fitted without this row; None for rows that are not fitted."""

    name: str
    source: str
    measured: float
    predicted: float
    left_out: float | None
    estimate: Estimate

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1.0

    def as_json(self) -> dict[str, Any]:
        """All but the estimate, and what was assumed of the run."""
        config = self.estimate.config
        return {
            "name": self.name,
            "source": self.source,
            "measured": self.measured,
            "predicted": self.predicted,
            "error": self.error,
            "leave_one_out_error": self.left_out,
            "micro_size": config.batch.micro_size,
            "chunks": config.schedule.chunks,
            "step_time_s": self.estimate.step_seconds,
        }


@dataclass(frozen=True)
class FitResult:
    """Parameters and how rows come out with them.

    spreads: one standard deviation of each of `PARAMETERS`, a row's being `ROW_ERROR`; infinite where rows do not tell
    it. fitted: rows that they were fitted to; told: others. prior: what was known before; None where nothing was.
    """

    hardware: Hardware
    efficiency: Efficiency
    spreads: tuple[float, ...]
    fitted: tuple[RowResult, ...]
    told: tuple[RowResult, ...]
    prior: Prior | None = None

    @property
    def mean_error(self) -> float:
        """Of the fitted rows, without sign."""
        return float(np.mean([abs(row.error) for row in self.fitted]))

    @property
    def worst_error(self) -> float:
        """Of the fitted rows, without sign."""
        return max(abs(row.error) for row in self.fitted)

    @property
    def left_out_errors(self) -> tuple[float, ...]:
        """Of the fitted rows, each told by the others alone, without sign; empty where none was left out."""
        return tuple(abs(row.left_out) for row in self.fitted if row.left_out is not None)

    def as_json(self) -> dict[str, Any]:
        """Everything, machine-readable."""
        left_out = self.left_out_errors
        return {
            "hardware": self.hardware.name,
            "parameters": {each.name: getattr(self.efficiency, each.name) for each in PARAMETERS},
            "standard_deviations": {
                each.name: spread if isfinite(spread) else None
                for each, spread in zip(PARAMETERS, self.spreads, strict=True)
            },
            "prior": None if self.prior is None else self.prior.as_json(),
            "mean_error": self.mean_error,
            "worst_error": self.worst_error,
            "leave_one_out_mean_error": float(np.mean(left_out)) if left_out else None,
            "leave_one_out_worst_error": max(left_out) if left_out else None,
            "rows": [row.as_json() for row in self.fitted],
            "rows_not_fitted": [row.as_json() for row in self.told],
        }


def with_shares(hardware: Hardware, shares: Mapping[str, float]) -> Hardware:
    """The machine whose devices reach these shares (`PARAMETERS`) of their figures, and are else as they were."""
    groups = []
    for group in hardware.groups:
        efficiency = replace(group.device.efficiency, **shares)
        groups.append(replace(group, device=replace(group.device, efficiency=efficiency)))
    return replace(hardware, groups=tuple(groups))


def fit(
    rows: Sequence[FittingRow],
    hardware: Hardware,
    told: Sequence[FittingRow] = (),
    *,
    prior: Prior | None = None,
    leave_one_out: bool = True,
) -> FitResult:
    """The efficiency under which predictions come nearest to the rows, by least squares of log speed.

    Its half_size and launch stay what they are. prior: what is known of the shares besides; their distance from it
    counts with the rows' errors. leave_one_out: fit once more without each row, to see how well the others foretell
    it.

    Raises:
        ConfigError: fewer rows than parameters, or with leave_one_out not one more; nothing of a row fits.
    """
    needed = len(PARAMETERS) + leave_one_out
    if len(rows) < needed:
        raise ConfigError(
            f"{len(rows)} rows given: {len(PARAMETERS)} parameters ({', '.join(each.name for each in PARAMETERS)}) "
            f"need {needed} or more; measure more layouts"
        )
    errors = _errors_of(rows, hardware, prior)
    point = fit_parameters(errors, PARAMETERS)
    machine = _machine(hardware, point)
    left_out: list[float | None] = [None] * len(rows)
    if leave_one_out:
        for index, row in enumerate(rows):
            others = [*rows[:index], *rows[index + 1 :]]
            without = fit_parameters(_errors_of(others, hardware, prior), PARAMETERS)
            left_out[index] = judge(row, _machine(hardware, without)).error
    fitted = (judge(row, machine, left) for row, left in zip(rows, left_out, strict=True))
    return FitResult(
        machine,
        machine.groups[0].device.efficiency,
        spreads(errors, PARAMETERS, point, ROW_ERROR),
        tuple(fitted),
        tuple(judge(row, machine) for row in told),
        prior,
    )


def judge(row: FittingRow, hardware: Hardware, left_out: float | None = None) -> RowResult:
    """A row beside its prediction on a machine as it is."""
    estimate = row.predict(hardware)
    predicted, measured = row.speeds(estimate)
    return RowResult(row.name, row.source, measured, predicted, left_out, estimate)


def _machine(hardware: Hardware, point: Floats) -> Hardware:
    return with_shares(hardware, {each.name: float(value) for each, value in zip(PARAMETERS, point, strict=True)})


def _errors_of(rows: Sequence[FittingRow], hardware: Hardware, prior: Prior | None) -> Callable[[Floats], Floats]:
    """Of a point: the rows' log errors, and behind them its distances from the prior."""

    def errors(point: Floats) -> Floats:
        machine = _machine(hardware, point)
        speeds = (row.speeds(row.predict(machine)) for row in rows)
        found = np.array([np.log(predicted / measured) for predicted, measured in speeds])
        return found if prior is None else np.concatenate([found, prior.errors(point)])

    return errors
