"""Fitting a machine's efficiency to rows of training speed, and how well it then tells them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megapipe.config.errors import ConfigError
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.fitting.least_squares import Floats, Parameter, fit_parameters
from megapipe.planner.hardware.description import Efficiency, Hardware

PARAMETERS = (
    Parameter("ceiling", 0.05, 1.0, 0.7, 0.02),
    Parameter("memory", 0.05, 1.0, 0.7, 0.05),
    Parameter("links", 0.05, 1.0, 0.7, 0.05),
)
"""All that is free: shares of the nominal figures that matrix products, memory and links reach. See `Efficiency`."""


class Row(Protocol):
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
    """Parameters and how rows come out with them. fitted: rows that they were fitted to; told: others."""

    hardware: Hardware
    efficiency: Efficiency
    fitted: tuple[RowResult, ...]
    told: tuple[RowResult, ...]

    @property
    def mean_error(self) -> float:
        """Of the fitted rows, without sign."""
        return float(np.mean([abs(row.error) for row in self.fitted]))

    @property
    def worst_error(self) -> float:
        """Of the fitted rows, without sign."""
        return max(abs(row.error) for row in self.fitted)

    def as_json(self) -> dict[str, Any]:
        """Everything, machine-readable."""
        return {
            "hardware": self.hardware.name,
            "parameters": {each.name: getattr(self.efficiency, each.name) for each in PARAMETERS},
            "mean_error": self.mean_error,
            "worst_error": self.worst_error,
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


def fit(rows: Sequence[Row], hardware: Hardware, told: Sequence[Row] = (), *, leave_one_out: bool = True) -> FitResult:
    """The efficiency under which predictions come nearest to the rows, by least squares of log speed.

    Its half_size and launch stay what they are. leave_one_out: fit once more without
    each row, to see how well the others foretell it.

    Raises:
        ConfigError: fewer rows than parameters, or with leave_one_out not one more; nothing of a row fits.
    """
    needed = len(PARAMETERS) + leave_one_out
    if len(rows) < needed:
        raise ConfigError(
            f"{len(rows)} rows given: {len(PARAMETERS)} parameters ({', '.join(each.name for each in PARAMETERS)}) "
            f"need {needed} or more; measure more layouts"
        )
    machine = _machine(hardware, fit_parameters(_errors_of(rows, hardware), PARAMETERS))
    left_out: list[float | None] = [None] * len(rows)
    if leave_one_out:
        for index, row in enumerate(rows):
            others = [*rows[:index], *rows[index + 1 :]]
            without = fit_parameters(_errors_of(others, hardware), PARAMETERS)
            left_out[index] = judge(row, _machine(hardware, without)).error
    fitted = (judge(row, machine, left) for row, left in zip(rows, left_out, strict=True))
    best = machine.groups[0].device.efficiency
    return FitResult(machine, best, tuple(fitted), tuple(judge(row, machine) for row in told))


def judge(row: Row, hardware: Hardware, left_out: float | None = None) -> RowResult:
    """A row beside its prediction on a machine as it is."""
    estimate = row.predict(hardware)
    predicted, measured = row.speeds(estimate)
    return RowResult(row.name, row.source, measured, predicted, left_out, estimate)


def _machine(hardware: Hardware, point: Floats) -> Hardware:
    return with_shares(hardware, {each.name: float(value) for each, value in zip(PARAMETERS, point, strict=True)})


def _errors_of(rows: Sequence[Row], hardware: Hardware) -> Callable[[Floats], Floats]:
    def errors(point: Floats) -> Floats:
        machine = _machine(hardware, point)
        speeds = (row.speeds(row.predict(machine)) for row in rows)
        return np.array([np.log(predicted / measured) for predicted, measured in speeds])

    return errors
