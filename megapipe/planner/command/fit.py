"""`fit`: fit a machine's efficiency to measured runs, and print the errors of predictions with it."""

import json

from megapipe.config.errors import ConfigError
from megapipe.layout.hardware.description import written
from megapipe.planner.command.main import Request
from megapipe.planner.command.planning import check_folders, write_text
from megapipe.planner.fitting.fit import FitResult, find_table, fit_rows, fit_table, report_lines


def run_fit(request: Request) -> None:
    """Fit a machine, print every row with its prediction, and write the machine to --output."""
    flags = request.flags
    check_folders(flags["output"])
    result, title, unit = _fit(request)
    if flags["output"] is not None:
        write_text(flags["output"], written(result.hardware, f"Efficiency fitted by megapipe plan fit: {title}."))
    if flags["json"]:
        print(json.dumps(result.as_json(), indent=2))
        return
    print(title, *report_lines(result, unit), sep="\n")
    if flags["output"] is not None:
        print(f"wrote {flags['output']}; use it with --hardware {flags['output']}")


def _fit(request: Request) -> tuple[FitResult, str, str]:
    """Return the result, its title, and the unit of its speeds."""
    flags = request.flags
    if (flags["published"] is None) == (flags["rows"] is None):
        raise ConfigError("pass either --published, a table of published rows, or --rows, a file with your own rows")
    if flags["rows"] is not None:
        return fit_rows(flags["rows"], request.hardware()), f"rows of {flags['rows']}", "tokens/s"
    if flags["hardware"] is not None:
        raise ConfigError(
            f"--hardware {flags['hardware']} can only be used with --rows, because the published rows were measured "
            f"on {find_table(flags['published']).hardware}; leave it out"
        )
    return fit_table(flags["published"]), find_table(flags["published"]).title, "TFLOP/s"
