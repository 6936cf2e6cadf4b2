"""The command line of tools/preprocess.py."""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence

from megapipe.data.errors import DataError
from megapipe.data.index_writer import ShardWriter
from megapipe.data.preprocess.inputs import find_inputs
from megapipe.data.preprocess.run import output_prefix, preprocess
from megapipe.data.preprocess.tokenize_part import TokenizedPart, TokenizeSettings

DESCRIPTION = """\
Turns text and JSON lines into .bin/.idx shards that megapipe and Megatron-LM train on.

A name that ends in .jsonl, .ndjson or .json holds one JSON object per line, each one document; any other file is one
document. The output is <prefix>_<key>_document.bin, .idx and .manifest.json, the same bytes for any number of workers.
"""
EXAMPLES = """\
examples:
  tools/preprocess.py --input python-stdlib --output-prefix data/python --tokenizer bytes --append-eod
  tools/preprocess.py --input corpus/*.jsonl --json-keys text --output-prefix data/corpus \\
      --tokenizer tokenizer.json --append-eod --workers 8
  tools/preprocess.py --input src docs --include '*.py' '*.md' --exclude tests --output-prefix data/code \\
      --tokenizer bytes --append-eod
"""
SHOWN_SKIPS = 10


def main(argv: Sequence[str]) -> int:
    """Runs the command. Exit status: 0, 1 for unusable input, 2 for a wrong command line, 130 for Ctrl-C."""
    arguments = build_parser().parse_args(with_hyphens(argv))
    try:
        run(arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # Writing to a full disk fails without a file name.
        print(f"error: {error.filename or arguments.output_prefix}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preprocess.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, glob patterns, or python-stdlib: the sources of Python's standard library",
    )
    parser.add_argument("--include", nargs="+", default=[], metavar="PATTERN", help="names to keep in folders: '*.py'")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN", help="names and folders to leave out")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields of JSON lines (text)")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="bytes, or the path of a tokenizer.json")
    parser.add_argument(
        "--end-of-document", metavar="TOKEN", help="token that ends documents, if not known from files"
    )
    parser.add_argument("--append-eod", action="store_true", help="end every document with that token; GPT needs it")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path that the output's names begin with"
    )
    parser.add_argument("--workers", type=_positive, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    parser.add_argument(
        "--on-error", choices=["stop", "skip"], default="stop", help="at a document that cannot be read (stop)"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def run(arguments: argparse.Namespace) -> None:
    files = find_inputs(arguments.input, arguments.include, arguments.exclude)
    settings = TokenizeSettings(
        tokenizer=arguments.tokenizer,
        end_of_document=arguments.end_of_document,
        append_end_of_document=arguments.append_eod,
        json_keys=tuple(dict.fromkeys(arguments.json_keys)),
        on_error=arguments.on_error,
    )
    progress = Progress(total_bytes=sum(file.size for file in files))
    manifests = preprocess(files, arguments.output_prefix, settings, workers=arguments.workers, on_part=progress.show)
    progress.finish()
    for key, manifest in zip(settings.json_keys, manifests, strict=True):
        print(
            f"{output_prefix(arguments.output_prefix, key)}: {manifest.num_documents:,} documents, "
            f"{manifest.num_tokens:,} tokens ({manifest.dtype}), vocabulary {manifest.vocabulary_size:,}"
        )


def with_hyphens(argv: Sequence[str]) -> list[str]:
    """--json_keys means --json-keys."""
    return [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), argument) for argument in argv]


class Progress:
    """One line on stderr: redrawn in a terminal, else a new one every ten seconds."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = self._skipped = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = 0.0 if self._terminal else 10.0

    def show(self, part: TokenizedPart, writer: ShardWriter) -> None:
        for reason in part.skipped[: max(0, SHOWN_SKIPS - self._skipped)]:
            print(f"skipped: {reason}", file=sys.stderr)
        self._skipped += len(part.skipped)
        self._done += part.input_bytes
        elapsed = time.monotonic() - self._start
        if elapsed >= self._next:
            self._next = elapsed + (0.1 if self._terminal else 10.0)
            rate = self._done / max(elapsed, 1e-9)
            line = (
                f"{self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, {writer.num_documents:,} documents, "
                f"{rate / 1e6:.1f} MB/s, {(self._total - self._done) / max(rate, 1e-9):.0f} s left"
            )
            print(f"\r\033[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)

    def finish(self) -> None:
        elapsed = time.monotonic() - self._start
        skipped = f", {self._skipped:,} documents skipped" if self._skipped else ""
        line = (
            f"{self._done / 1e6:,.1f} MB in {elapsed:.1f} s, {self._done / 1e6 / max(elapsed, 1e-9):.1f} MB/s{skipped}"
        )
        print(f"\r\033[K{line}" if self._terminal else line, file=sys.stderr)
