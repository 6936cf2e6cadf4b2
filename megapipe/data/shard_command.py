"""The command line of megapipe data."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megapipe.config.command_line import OneLineParser, ProseFormatter, exit_status, natural
from megapipe.data.errors import DataError

EXAMPLES = """\
examples:
  megapipe data inspect data/corpus_text_document --samples 3
  megapipe data verify data/corpus_text_document
  megapipe data merge data/a_text_document data/b_text_document --output-prefix data/all_text_document
  megapipe data split data/all_text_document --shares 98,1,1 --output-prefix data/held_out
  megapipe data stalls --config gpt_tiny
"""


class Subcommand(NamedTuple):
    """A command of a room that this one does not know."""

    help: str
    main: Callable[[Sequence[str]], int]
    """Of the words behind the command's name; returns the exit status."""


NO_OTHERS: Mapping[str, Subcommand] = {}


def main(argv: Sequence[str], others: Mapping[str, Subcommand] = NO_OTHERS) -> int:
    """Runs the command. Exit status: 0, 1 where `verify` finds damage or nothing, 2 for a wrong command line or
    shards that cannot be used, 130 for Ctrl-C."""
    if argv and argv[0] in others:
        return others[argv[0]].main(argv[1:])
    arguments = build_parser(others).parse_args(list(argv))
    return exit_status(lambda: _run(arguments), lambda error: isinstance(error, DataError), "no shard was written")


def build_parser(others: Mapping[str, Subcommand] = NO_OTHERS) -> argparse.ArgumentParser:
    """Return the parser of `megapipe data`. others: commands that parse their own options, listed in the help."""
    parser = OneLineParser(
        prog="megapipe data",
        description="Inspects, checks, merges and splits .bin/.idx shards, and measures how runs read them.",
        epilog=EXAMPLES,
        formatter_class=ProseFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    inspect = commands.add_parser("inspect", help="show counts, document lengths and decoded samples")
    inspect.add_argument("prefix", help="path of the shard without .bin or .idx")
    inspect.add_argument("--samples", type=natural, default=3, metavar="N", help="documents to decode (3)")
    inspect.add_argument("--tokenizer", metavar="NAME", help="tokenizer of the samples (the manifest's)")
    inspect.add_argument("--histogram", metavar="FILE", help="draw the lengths of documents: .png, .svg or .pdf")

    verify = commands.add_parser("verify", help="read every byte and check it against header, index and manifest")
    verify.add_argument("prefix", nargs="+", help="paths of shards without .bin or .idx")

    merge = commands.add_parser("merge", help="merge several shards into one, in the order given")
    merge.add_argument("prefix", nargs="+", help="paths of shards without .bin or .idx")
    merge.add_argument("--output-prefix", required=True, metavar="PREFIX")
    merge.add_argument(
        "--float-tokens",
        choices=["float32", "float64"],
        help="token type of shards of dtype code 6 or 7, whose meaning differs between writers; the output has "
        "integers",
    )

    split = commands.add_parser("split", help="split one shard into several, between documents")
    split.add_argument("prefix", help="path of the shard without .bin or .idx")
    split.add_argument("--shares", required=True, metavar="A,B,...", help="sizes of the outputs, in any unit")
    split.add_argument("--output-prefix", required=True, metavar="PREFIX", help="outputs are PREFIX_0, PREFIX_1, ...")

    for name, other in others.items():
        commands.add_parser(name, help=other.help)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    # Late, so that --help does not wait for numpy.
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
    """Tells of every shard; exit status 1 where one is damaged or not there."""
    from megapipe.data import shard_tools

    status = 0
    for prefix in prefixes:
        try:
            print(f"{prefix}: {shard_tools.verify(prefix)}", flush=True)
        except DataError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    return status
