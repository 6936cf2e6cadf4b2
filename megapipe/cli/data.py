"""`megapipe data`: commands for shards, and `stalls`, which trains to measure waits for data."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.config.command_line import (
    OneLineParser,
    check_folders,
    exit_status,
    natural,
    not_empty,
    positive,
    tool_parser,
)
from megapipe.config.field_types import real_number
from megapipe.data import DataError

if TYPE_CHECKING:
    from megapipe.config.run import PretrainConfig


STALLS_HELP = "measure whether a training run waits for its data, and what would help"
STALLS_DESCRIPTION = """\
Measure whether a training run waits for its data, with three runs over the same steps: on a
batch in memory, with the shards in memory, and with the shards on storage (they are removed
from the page cache, which does not need root). The second run minus the first is the time for
preparation, the third minus the second the time for fetching (Mohan et al., arXiv 2007.06775).
The command takes the files and fields of megapipe train, and saves nothing. With
--ingestion-tokens-per-second no model runs; a pause replaces it, so that the data loading of a
run on GPUs, or of a model that is too large for this machine, can be measured.
"""
STALLS_EXAMPLES = """\
examples:
  megapipe data stalls --config gpt_tiny
  megapipe data stalls --config run.yaml --parallel.data 64 --ingestion-tokens-per-second 25e6 --json stalls.json
"""


def stalls(argv: Sequence[str]) -> int:
    """Run the command and return its exit status.

    It is 0, 2 for a wrong command line, configuration or shard, and 130 for Ctrl-C.
    """
    arguments, fields = stalls_parser().parse_known_args(list(argv))
    return exit_status(lambda: _run_stalls(arguments, fields))


def _run_stalls(arguments: argparse.Namespace, fields: Sequence[str]) -> int:
    # Imported here because torch takes a second, and --help should not wait for it.
    from megapipe.calibration.stalls import measure_stalls

    check_folders(arguments.json)
    report = measure_stalls(
        read_config(arguments.kind, [*([] if arguments.config is None else ["--config", arguments.config]), *fields]),
        ingestion=arguments.ingestion_tokens_per_second,
        num_steps=arguments.steps,
        warm_up=arguments.warm_up,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    for line in report.lines():
        print(line)
    return 0


def stalls_parser() -> OneLineParser:
    """Return the parser of `megapipe data stalls`; options of the training run are parsed separately."""
    from megapipe.cli.train import add_kind  # the other commands do not need its imports

    parser = tool_parser("megapipe data stalls", STALLS_DESCRIPTION, STALLS_EXAMPLES)
    parser.usage = "megapipe data stalls --config FILE [options] [--group.field VALUE ...]"
    parser.add_argument("--config", metavar="FILE", help="YAML file, as for megapipe train")
    add_kind(parser)
    for flag, kind, default, about in (
        ("--steps", positive, 20, "steps to measure in each run (default 20)"),
        ("--warm-up", natural, 3, "first steps of each run, which are not measured (default 3)"),
    ):
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=about)
    parser.add_argument(
        "--ingestion-tokens-per-second",
        type=_rate,
        metavar="X",
        help="speed of all replicas together, as logs print it; no model runs then",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures to a file")
    return parser


def read_config(kind: str | None, fields: Sequence[str]) -> "PretrainConfig":
    """Return the configuration, of the given kind or else of the kind that has its fields. Raises ConfigError."""
    from megapipe.config.load import KINDS, kind_of, parse_as
    from megapipe.spec.model_folder import with_model_folders

    fields = with_model_folders(fields)
    return parse_as(kind_of(fields) if kind is None else KINDS[kind], fields)


def _rate(text: str) -> float:
    value = real_number(text)
    if not 1 <= value < math.inf:  # a pause has at most as many seconds as a step has tokens
        raise argparse.ArgumentTypeError(f"is {text}, but must be a finite number of tokens of at least 1")
    return value


EXAMPLES = """\
examples:
  megapipe data inspect data/corpus_text_document --samples 3
  megapipe data verify data/corpus_text_document
  megapipe data merge data/a_text_document data/b_text_document --output-prefix data/all_text_document
  megapipe data split data/all_text_document --shares 98,1,1 --output-prefix data/held_out
  megapipe data stalls --config gpt_tiny
"""


def main(argv: Sequence[str]) -> int:
    """Run a command line and return its exit status.

    It is 0, 1 if `verify` finds a damaged shard, 2 for a wrong command line or shards that do not exist or cannot be
    used, and 130 for Ctrl-C. `stalls` parses its own options.
    """
    if argv and argv[0] == "stalls":
        return stalls(argv[1:])
    arguments = build_parser().parse_args(list(argv))
    return exit_status(lambda: _run(arguments), "every shard is complete or absent")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `megapipe data`, which lists `stalls` in its help."""
    description = "Inspect, check, merge and split shards, and measure how runs read them."
    parser = tool_parser("megapipe data", description, EXAMPLES)
    add = parser.add_subparsers(dest="command", required=True).add_parser

    inspect = add("inspect", help="show counts, document lengths and decoded samples")
    inspect.add_argument("prefix", help="path of the shard without .bin or .idx")
    inspect.add_argument("--samples", type=natural, default=3, metavar="N", help="documents to decode (default 3)")
    inspect.add_argument("--tokenizer", metavar="NAME", help="tokenizer of the samples (default: from the manifest)")
    inspect.add_argument("--histogram", metavar="FILE", help="draw the lengths of documents: .png, .svg or .pdf")

    verify = add("verify", help="read every byte and check it against header, index and manifest")
    verify.add_argument("prefix", nargs="+", help="paths of shards without .bin or .idx")

    merge = add("merge", help="merge several shards into one, in the order given")
    merge.add_argument("prefix", nargs="+", help="paths of shards without .bin or .idx")
    merge.add_argument("--output-prefix", type=not_empty, required=True, metavar="PREFIX")
    merge.add_argument(
        "--float-tokens",
        choices=["float32", "float64"],
        help="token type of shards with dtype code 6 or 7, whose meaning differs between writers; the output has "
        "integer tokens",
    )

    split = add("split", help="split one shard into several, between documents")
    split.add_argument("prefix", help="path of the shard without .bin or .idx")
    split.add_argument("--shares", required=True, metavar="A,B,...", help="sizes of the outputs, in any unit")
    split.add_argument(
        "--output-prefix", type=not_empty, required=True, metavar="PREFIX", help="outputs are PREFIX_0, PREFIX_1, ..."
    )

    add("stalls", help=STALLS_HELP)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    # Imported here, so that --help does not wait for numpy.
    from megapipe.data import shard_tools

    if arguments.command == "inspect":
        shard_tools.inspect(arguments.prefix, arguments.samples, arguments.tokenizer, arguments.histogram)
    elif arguments.command == "verify":
        return _verify(arguments.prefix)
    elif arguments.command == "merge":
        merged = shard_tools.merge(arguments.prefix, arguments.output_prefix, arguments.float_tokens)
        print(f"{arguments.output_prefix}: {merged}")
    else:
        for line in shard_tools.split(arguments.prefix, arguments.shares, arguments.output_prefix):
            print(line)
    return 0


def _verify(prefixes: Sequence[str]) -> int:
    """Print the result for every shard; return 1 if one is damaged. Raises DataError first if one does not exist."""
    from megapipe.data import shard_tools
    from megapipe.data.shards import check_exists

    for prefix in prefixes:
        check_exists(prefix)
    status = 0
    for prefix in prefixes:
        try:
            print(f"{prefix}: {shard_tools.verify(prefix)}", flush=True)
        except DataError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    return status
