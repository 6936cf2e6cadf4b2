"""What a fit found, in words."""

from collections.abc import Iterator
from math import isfinite

from megapipe.config.errors import ConfigError, nearest
from megapipe.layout.hardware.reader import load_hardware
from megapipe.planner.fitting.fit import PARAMETERS, FitResult, RowResult, fit
from megapipe.planner.fitting.priors import ROW_ERROR, prior_of
from megapipe.planner.fitting.published import TABLES, PublishedTable


def fit_table(name: str, *, leave_one_out: bool = True) -> FitResult:
    """Fit a table of published rows, from what is published of its machine. Raises ConfigError for an unknown name."""
    table = find_table(name)
    return fit(
        table.runs(),
        load_hardware(table.hardware),
        table.told_runs(),
        prior=prior_of(table.hardware),
        leave_one_out=leave_one_out,
    )


def find_table(name: str) -> PublishedTable:
    """A table of published rows by its name; ConfigError for an unknown one."""
    if name not in TABLES:
        raise ConfigError(f"unknown rows {name!r}{nearest(name, TABLES)} (known: {', '.join(TABLES)})")
    return TABLES[name]


def report_lines(result: FitResult, unit: str) -> Iterator[str]:
    """A fit's parameters, before and after, its rows and their errors; unit: of their speeds."""
    values = ", ".join(f"{each.name} {getattr(result.efficiency, each.name):.3f}" for each in PARAMETERS)
    yield f"{len(PARAMETERS)} free parameters of {result.hardware.name}: {values}"
    yield from parameter_lines(result)
    yield f"{'row':<10}{unit:>10}{'predicted':>11}{'error':>9}{'left out':>10}  assumed"
    for row in result.fitted:
        yield _row_line(row)
    yield f"mean error {result.mean_error:.1%}, worst {result.worst_error:.1%}"
    left_out = result.left_out_errors
    if left_out:
        yield f"left out: mean error {sum(left_out) / len(left_out):.1%}, worst {max(left_out):.1%}"
    if result.told:
        yield "not fitted, foretold:"
    for row in result.told:
        yield f"{_row_line(row)}; {row.source}"


def parameter_lines(result: FitResult) -> Iterator[str]:
    """Each parameter before and after, with one standard deviation in percent."""
    yield f"{'share':<10}{'before':>16}{'fitted':>17}  +-: one standard deviation, a row's being {ROW_ERROR:.0%}"
    for each, spread in zip(PARAMETERS, result.spreads, strict=True):
        share = getattr(result.efficiency, each.name)
        after = f"{share:.3f} +-{spread / share:4.0%}" if isfinite(spread) else f"{share:.3f}, not told"
        before, origin = "unknown", ""
        if result.prior is not None:
            belief = result.prior.beliefs[each.name]
            before, origin = f"{belief.mean:.3f} +-{result.prior.width:4.0%}", f"  before: {belief.origin}"
        yield f"{each.name:<10}{before:>16}{after:>17}{origin}"


def _row_line(row: RowResult) -> str:
    config = row.estimate.config
    left_out = "" if row.left_out is None else f"{row.left_out:+.1%}"
    assumed = f"micro-batch {config.batch.micro_size}"
    if config.schedule.chunks is not None:
        assumed += f", {config.schedule.chunks} chunks"
    return f"{row.name:<10}{row.measured:>10.4g}{row.predicted:>11.4g}{row.error:>+9.1%}{left_out:>10}  {assumed}"
