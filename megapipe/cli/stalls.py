"""The command line of megapipe data stalls."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.config.command_line import OneLineParser, ProseFormatter
from megapipe.config.errors import ConfigError
from megapipe.data.errors import DataError

if TYPE_CHECKING:
    from megapipe.config.run import PretrainConfig

HELP = "measure whether a training run waits for its data, and what would help"
DESCRIPTION = """\
Measure whether a training run waits for its data, with three runs over the same steps: on a batch in memory, with the
shards in memory, and with the shards on storage (they are removed from the page cache, which does not need root). The
second run minus the first is the time for preparation, the third minus the second the time for fetching (Mohan et al.,
arXiv 2007.06775). The command takes the files and fields of megapipe train, and saves nothing.
With --ingestion-tokens-per-second no model runs; a pause replaces it, so that the data loading of a run on GPUs, or of
a model that is too large for this machine, can be measured.
"""
EXAMPLES = """\
examples:
  megapipe data stalls --config gpt_tiny
  megapipe data stalls --config run.yaml --parallel.data 64 --ingestion-tokens-per-second 25e6 --json stalls.json
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit status: 0, 2 for a wrong command line, configuration or shard, 130 for Ctrl-C."""
    arguments, fields = build_parser().parse_known_args(list(argv))
    try:
        return _run(arguments, fields)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace, fields: Sequence[str]) -> int:
    # Importing torch takes a second, which --help need not wait for.
    from megapipe.calibration.recompute_choice import with_recompute
    from megapipe.parallel.errors import LaunchError
    from megapipe.planner.command.launch import check_folders
    from megapipe.training.stall_measurement import measure_stalls

    try:
        check_folders(None if arguments.json is None else Path(arguments.json))
        report = measure_stalls(
            read_config(arguments.kind, [*_config_flag(arguments.config), *fields]),
            ingestion=arguments.ingestion_tokens_per_second,
            num_steps=arguments.steps,
            warm_up=arguments.warm_up,
            say=lambda line: print(line, file=sys.stderr, flush=True),
            choose_recompute=with_recompute,
        )
        if arguments.json is not None:
            with open(arguments.json, "w", encoding="utf-8") as file:
                file.write(json.dumps(report.to_json(), indent=2) + "\n")
    except (ConfigError, DataError, LaunchError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'writing the output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    for line in report.lines():
        print(line)
    return 0


def build_parser() -> OneLineParser:
    """Return the parser of `megapipe data stalls`; the options of a run are parsed apart from its own."""
    parser = OneLineParser(
        prog="megapipe data stalls",
        usage="megapipe data stalls --config FILE [options] [--group.field VALUE ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=ProseFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file, as for megapipe train")
    parser.add_argument(
        "--kind",
        choices=["gpt", "bert"],
        help="kind of run (default: bert if a field that only BERT runs have is set, otherwise gpt)",
    )
    parser.add_argument(
        "--steps", type=_at_least(1), default=20, metavar="N", help="steps to measure in each run (default 20)"
    )
    parser.add_argument(
        "--warm-up",
        type=_at_least(0),
        default=3,
        metavar="N",
        help="steps before these, which are not measured (default 3)",
    )
    parser.add_argument(
        "--ingestion-tokens-per-second",
        type=_rate,
        metavar="X",
        help="speed of all replicas together, as a run's log prints it; the model is then not run here",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    return parser


def read_config(kind: str | None, fields: Sequence[str]) -> "PretrainConfig":
    """Return the configuration, of the given kind or of the kind that has its fields. Raises ConfigError."""
    from megapipe.config.kinds import KINDS, kind_of
    from megapipe.config.load import parse_as

    return parse_as(kind_of(fields) if kind is None else KINDS[kind], fields)


def _config_flag(path: str | None) -> list[str]:
    return [] if path is None else ["--config", path]


def _at_least(least: int) -> Callable[[str], int]:
    def natural(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"is {value}, but must be at least {least}")
        return value

    return natural


def _rate(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"is {text}, but must be a number of tokens above 0")
    return value
