"""The tables of docs/cost_model.md."""

from collections.abc import Iterator

from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.reader import load_hardware
from megapipe.planner.fitting.fit import PARAMETERS, FitResult, judge
from megapipe.planner.fitting.priors import LINKS, MEMORY, Rate, prior_of
from megapipe.planner.fitting.published import TABLES, PublishedRun


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


def left_out_line(result: FitResult) -> str:
    """The errors of rows that the others told."""
    rows = ", ".join(f"{row.name} {row.left_out or 0.0:+.1%}" for row in result.fitted)
    errors = result.left_out_errors
    return f"Left out: {rows}; mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}."


def prior_lines() -> Iterator[str]:
    """The published rates that shares start from, and their means."""
    yield "| share | preset | published rate of | reached | source |"
    yield "|---|---|---|---|---|"
    for name in MEMORY:
        beliefs = prior_of(name).beliefs
        products = beliefs["ceiling"]
        yield f"| `ceiling` | `{name}` | an endless product | **{products.mean:.3f}** | {products.origin} |"
        for share, rates in (("memory", MEMORY[name]), ("links", LINKS[name])):
            yield from (_rate(share, name, rate) for rate in rates)
            yield f"| `{share}` | `{name}` | geometric mean | **{beliefs[share].mean:.3f}** | |"


def _rate(share: str, name: str, rate: Rate) -> str:
    return f"| `{share}` | `{name}` | {rate.what} | {rate.share:.3f} | {rate.source} |"


def _row(run: PublishedRun, hardware: Hardware, remark: str) -> tuple[str, float]:
    found = judge(run, hardware)
    config = found.estimate.config
    assumed = f"{config.batch.micro_size}, {config.schedule.chunks or 1}"
    line = f"| {run.name} | {found.measured:g} | {found.predicted:.1f} | {found.error:+.1%} | {assumed} | {remark} |"
    return line, found.error
