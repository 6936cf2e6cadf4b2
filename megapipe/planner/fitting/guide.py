"""The tables of docs/cost_model.md."""

from collections.abc import Iterator

from megapipe.planner.fitting.fit import PARAMETERS, judge
from megapipe.planner.fitting.published import TABLES, PublishedRun
from megapipe.planner.hardware.description import Hardware
from megapipe.planner.hardware.reader import load_hardware


def rows_lines(name: str) -> Iterator[str]:
    """A table of published rows beside what its preset tells, with the mean and worst error of those fitted to."""
    table = TABLES[name]
    hardware = load_hardware(table.hardware)
    efficiency = hardware.groups[0].device.efficiency
    values = ", ".join(f"`{each.name}` {getattr(efficiency, each.name):.3f}" for each in PARAMETERS)
    yield f"`{table.hardware}`: {values}"
    yield ""
    yield "| row | published TFLOP/s | model | error | micro-batch, chunks | |"
    yield "|---|---|---|---|---|---|"
    errors = []
    for run in table.runs():
        line, error = _row(run, hardware, "fitted")
        errors.append(abs(error))
        yield line
    for run in table.told_runs():
        yield _row(run, hardware, "not fitted")[0]
    yield ""
    yield f"Fitted rows: mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}."


def _row(run: PublishedRun, hardware: Hardware, remark: str) -> tuple[str, float]:
    found = judge(run, hardware)
    config = found.estimate.config
    assumed = f"{config.batch.micro_size}, {config.schedule.chunks or 1}"
    line = f"| {run.name} | {found.measured:g} | {found.predicted:.1f} | {found.error:+.1%} | {assumed} | {remark} |"
    return line, found.error
