"""The tables of docs/cost_model.md."""

from collections.abc import Iterator
from functools import cache, partial

from megapipe.layout.hardware.description import Hardware, load_hardware
from megapipe.planner.fitting import (
    LINKS,
    MEMORY,
    PARAMETERS,
    TABLES,
    FitResult,
    PublishedRun,
    Rate,
    fit_table,
    judge,
    prior_of,
)
from tests.docs.figures import head, table
from tests.planner.fitting.findings import findings_lines
from tests.planner.fitting.vocabularies import vocabulary_lines

PAGE = "docs/cost_model.md"


def rows_lines(name: str) -> Iterator[str]:
    """Yield published rows with the predictions by their preset, and the mean and worst error of the fitted rows."""
    published = TABLES[name]
    hardware = load_hardware(published.hardware)
    efficiency = hardware.groups[0].device.efficiency
    values = ", ".join(f"`{each.name}` {getattr(efficiency, each.name):.3f}" for each in PARAMETERS)
    yield f"`{published.hardware}`: {values}"
    yield ""
    yield from head("row", "published TFLOP/s", "model", "error", "micro-batch, chunks", "")
    errors = []
    for run in published.rows:
        line, error = _row(run, hardware, "fitted")
        errors.append(abs(error))
        yield line
    for run in published.unfitted:
        yield _row(run, hardware, "not fitted")[0]
    yield ""
    yield f"Fitted rows: mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}."


def left_out_line(result: FitResult) -> str:
    """Return the errors of rows that were predicted from the other ones."""
    rows = ", ".join(f"{row.name} {row.left_out or 0.0:+.1%}" for row in result.fitted)
    errors = result.left_out_errors
    return f"Left out: {rows}; mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}."


@table(PAGE, "published rates")
def prior_lines() -> Iterator[str]:
    """Yield the published rates that the fractions start from, and their means."""
    yield from head("fraction", "preset", "published rate of", "reached", "source")
    for name in MEMORY:
        beliefs = prior_of(name).beliefs
        products = beliefs["ceiling"]
        yield f"| `ceiling` | `{name}` | an infinitely large product | **{products.mean:.3f}** | {products.origin} |"
        for share, rates in (("memory", MEMORY[name]), ("links", LINKS[name])):
            yield from (_rate(share, name, rate) for rate in rates)
            yield f"| `{share}` | `{name}` | geometric mean | **{beliefs[share].mean:.3f}** | |"


def _rate(share: str, name: str, rate: Rate) -> str:
    return f"| `{share}` | `{name}` | {rate.what} | {rate.share:.3f} | {rate.source} |"


def _row(run: PublishedRun, hardware: Hardware, remark: str) -> tuple[str, float]:
    judged = judge(run, hardware)
    config = judged.estimate.config
    assumed = f"{config.batch.micro_size}, {config.schedule.chunks or 1}"
    line = (
        f"| {run.name} | {judged.measured:g} | {judged.predicted:.1f} | {judged.error:+.1%} | {assumed} | {remark} |"
    )
    return line, judged.error


@cache
def fitted(name: str) -> FitResult:
    """Return the fit to a published table, with each row left out once."""
    return fit_table(name)


for _name in TABLES:
    table(PAGE, f"published rows {_name}")(partial(rows_lines, _name))
    table(PAGE, f"rows of {_name} left out", "exhaustive")(lambda name=_name: [left_out_line(fitted(name))])
table(PAGE, "other findings")(findings_lines)
table(PAGE, "vocabularies of 4B models", "slow")(vocabulary_lines)
