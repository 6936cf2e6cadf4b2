"""The command line of megapipe preprocess, which makes shards and tokenizers from text."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

from megapipe.config.command_line import ProgressBar, exit_status, not_empty, positive, tool_parser, with_hyphens
from megapipe.config.files import write_whole
from megapipe.data import DataError
from megapipe.data.preprocess.documents import SAMPLE_BYTES, SampledTexts
from megapipe.data.preprocess.inputs import InputFile, find_inputs, idle_workers
from megapipe.data.preprocess.run import Journal, preprocess
from megapipe.data.preprocess.tokenize_part import TokenizedPart, TokenizeSettings
from megapipe.data.tokenizers import RESERVED_TOKENS, TRAINERS, open_tokenizer
from megapipe.data.tokenizers.hugging_face import CHECKED_BYTES, is_byte_level_bpe, why_no_fast_core

TRAIN_TOKENIZER = "train-tokenizer"

DESCRIPTION = """\
Converts text, JSON lines, Parquet, Arrow and datasets to .bin/.idx shards that megapipe and
Megatron-LM train on.

A .jsonl, .ndjson or .json file has one JSON object per line, and each is a document. Each row
of a .parquet or .arrow file or of a dataset is a document, and so is any other file. JSON
lines and text may be compressed (.gz, .zst). The output is <prefix>_<key>_document.bin, .idx
and .manifest.json, with the same bytes for any number of workers. After an interruption, the
same command continues where it stopped.

`megapipe preprocess train-tokenizer --help` explains how to learn a vocabulary first.
"""
EXAMPLES = """\
examples:
  megapipe preprocess --input python-stdlib --output-prefix data/python --tokenizer bytes --append-eod
  megapipe preprocess --input corpus/*.jsonl --json-keys text --output-prefix data/corpus \\
      --tokenizer tokenizer.json --append-eod --workers 8
  megapipe preprocess --input src docs --include '*.py' '*.md' --exclude tests --output-prefix data/code \\
      --tokenizer bytes --append-eod
  megapipe preprocess --input dataset:wikitext:wikitext-103-raw-v1@train --output-prefix data/wiki \\
      --tokenizer bert-uncased:vocab.txt --split-sentences
"""

TRAINING_DESCRIPTION = """\
Learns a tokenizer's vocabulary from any input that preprocessing reads. The same input gives
the same tokenizer.

sentencepiece-bpe and sentencepiece-unigram write a .model; byte-level-bpe (GPT-2's kind) and
wordpiece-uncased and wordpiece-cased (BERT's) write a tokenizer.json of Hugging Face.
"""
TRAINING_EXAMPLES = """\
example:
  megapipe preprocess train-tokenizer --input python-stdlib --type sentencepiece-bpe --vocabulary-size 8192 \\
      --output data/python.model
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `megapipe preprocess`."""
    parser = tool_parser("megapipe preprocess", DESCRIPTION, EXAMPLES)
    add_input_arguments(parser)
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="bytes, or the path of a tokenizer.json, a SentencePiece .model, a vocab.json (with its merges.txt), a "
        ".tiktoken file (cl100k_base:PATH if the encoding is not its name), bert-uncased:PATH "
        "or bert-cased:PATH of a vocab.txt, or a folder with one of them",
    )
    parser.add_argument(
        "--end-of-document", metavar="TOKEN", help="token that ends documents, if the tokenizer does not define it"
    )
    for flag, choices, about in (
        ("--special-tokens-in-text", ["text", "token", "error"], "how to read names of special tokens in a text"),
        ("--tokenizer-core", ["auto", "library"], "auto uses a faster core for BPE if it agrees on a sample"),
    ):
        first = choices[0]
        parser.add_argument(flag, choices=choices, default=first, help=f"{about} ({first})")
    parser.add_argument("--join-keys", metavar="TEXT", help="join all --json-keys to one document, with TEXT between")
    parser.add_argument(
        "--split-sentences", action="store_true", help="one sequence per sentence, <prefix>_<key>_sentence, for BERT"
    )
    parser.add_argument("--language", default="en", metavar="CODE", help="language, such as en, de, fr (en)")
    parser.add_argument("--drop-duplicates", action="store_true", help="omit documents that equal an earlier one")
    parser.add_argument(
        "--append-eod",
        dest="append_end_of_document",
        action="store_true",
        help="end every document with the end-of-document token, as GPT needs",
    )
    parser.add_argument(
        "--output-prefix", type=not_empty, required=True, metavar="PREFIX", help="start of the output's paths"
    )
    parser.add_argument("--workers", type=positive, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    return parser


def build_training_parser() -> argparse.ArgumentParser:
    """Return the parser of the command that trains a tokenizer on texts."""
    parser = tool_parser(f"megapipe preprocess {TRAIN_TOKENIZER}", TRAINING_DESCRIPTION, TRAINING_EXAMPLES)
    add_input_arguments(parser)
    parser.add_argument("--type", choices=list(TRAINERS), required=True, help="kind of tokenizer")
    parser.add_argument("--vocabulary-size", type=positive, required=True, metavar="N", help="exact number of tokens")
    parser.add_argument("--special-tokens", nargs="+", default=[], metavar="TOKEN", help="additional special tokens")
    parser.add_argument("--output", required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--sample-bytes",
        type=positive,
        default=SAMPLE_BYTES,
        metavar="N",
        help=f"train on about N bytes, chosen evenly from a larger input ({SAMPLE_BYTES})",
    )
    return parser


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the input, which are the same for preprocessing and for training a tokenizer."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, glob patterns, dataset:NAME[:CONFIGURATION][@SPLIT] (NAME may be a folder), or "
        "python-stdlib: the sources of Python's standard library",
    )
    parser.add_argument("--dataset-revision", metavar="REVISION", help="branch, tag or commit of datasets on the hub")
    parser.add_argument("--dataset-streaming", action="store_true", help="stream datasets of the hub, without a copy")
    for flag, default, metavar, about in (
        ("--include", [], "PATTERN", "names to read in folders, such as '*.py'"),
        ("--exclude", [], "PATTERN", "names and folders to omit"),
        ("--json-keys", ["text"], "KEY", "fields of JSON lines, columns of tables (text)"),
    ):
        parser.add_argument(flag, nargs="+", default=default, metavar=metavar, help=about)
    parser.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="on unreadable documents (stop)")


SHOWN_SKIPS = 10


class ProgressLine:
    """Prints a progress bar over the input, lines about skipped documents, and a last line with the speed."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = self._skipped = 0
        self._start = time.monotonic()
        self._bar: ProgressBar | None = None

    def start(self, journal: Journal) -> None:
        """Print how much an earlier run of the same command processed, and start the bar."""
        self._skipped = journal.num_skipped
        if journal.next_part:
            print(f"continuing a run that stopped after {journal.done_bytes / 1e6:,.1f} MB", file=sys.stderr)
        self._bar = ProgressBar("preprocessing", max(1, self._total - journal.done_bytes) / 1e6, "MB", log=True)

    def show(self, part: TokenizedPart) -> None:
        """Count a finished part, and print skipped documents, at most SHOWN_SKIPS in total."""
        for reason in part.skipped[: max(0, SHOWN_SKIPS - self._skipped)]:
            print(f"skipped: {reason}", file=sys.stderr)
        self._skipped += len(part.skipped)
        self._done += part.input_bytes
        if self._bar is not None:
            self._bar.update(self._done / 1e6)

    def finish(self) -> None:
        """Print the megabytes, the speed and the number of skipped documents."""
        elapsed = time.monotonic() - self._start
        skipped = f", {self._skipped:,} documents skipped" if self._skipped else ""
        done = self._done / 1e6
        print(f"{done:,.1f} MB in {elapsed:.1f} s, {done / max(elapsed, 1e-9):.1f} MB/s{skipped}", file=sys.stderr)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.close()


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 0, 2 for a wrong command line or unusable input, 130 for Ctrl-C."""
    words = with_hyphens(argv)
    trains = bool(words) and words[0].replace("_", "-") == TRAIN_TOKENIZER

    def work() -> int:
        if trains:
            train_tokenizer(build_training_parser().parse_args(words[1:]))
        else:
            run(build_parser().parse_args(words))
        return 0

    state_after_interrupt = "nothing was written" if trains else "the same command continues where it stopped"
    return exit_status(work, state_after_interrupt)


def run(arguments: argparse.Namespace) -> None:
    """Convert texts to shards with a progress bar, and print the counts of each shard.

    Raises DataError for inputs, a tokenizer or options that cannot be used.
    """
    files = _inputs(arguments)
    arguments.json_keys = tuple(dict.fromkeys(arguments.json_keys))
    names = {each.name for each in fields(TokenizeSettings)}
    settings = TokenizeSettings(**{name: value for name, value in vars(arguments).items() if name in names})
    if arguments.tokenizer_core == "auto":
        settings = with_fast_core(settings, files)
    idle = idle_workers(files, arguments.workers, settings.part_bytes)
    if idle is not None:
        print(f"note: {idle}", file=sys.stderr)
    progress = ProgressLine(total_bytes=sum(file.size for file in files))
    with closing(progress):
        manifests = preprocess(
            files,
            arguments.output_prefix,
            settings,
            workers=arguments.workers,
            on_start=progress.start,
            on_part=progress.show,
        )
    progress.finish()
    for name, manifest in zip(settings.output_names(), manifests, strict=True):
        duplicates = f", {manifest.num_duplicates:,} duplicates omitted" if manifest.num_duplicates is not None else ""
        if manifest.num_special_tokens_in_text:
            became = "text" if manifest.special_tokens_in_text == "text" else "the special tokens"
            times = (
                "once"
                if manifest.num_special_tokens_in_text == 1
                else f"{manifest.num_special_tokens_in_text:,} times"
            )
            print(
                f"note: names of special tokens occur {times} in the input; "
                f"they became {became} (--special-tokens-in-text)",
                file=sys.stderr,
            )
        sentences = f"{manifest.num_sequences:,} sentences, " if manifest.sentences is not None else ""
        print(
            f"{arguments.output_prefix}_{name}: {manifest.num_documents:,} documents, {sentences}"
            f"{manifest.num_tokens:,} tokens ({manifest.dtype}), vocabulary {manifest.vocabulary_size:,}{duplicates}"
        )


def _inputs(arguments: argparse.Namespace) -> list[InputFile]:
    return find_inputs(
        arguments.input,
        arguments.include,
        arguments.exclude,
        arguments.dataset_revision,
        arguments.dataset_streaming,
    )


def with_fast_core(settings: TokenizeSettings, files: Sequence[InputFile]) -> TokenizeSettings:
    """Return the settings with the fast core if it can be used. For a byte-level BPE that it cannot encode, print the
    reason."""
    tokenizer = settings.open()
    if not is_byte_level_bpe(tokenizer):
        return settings
    texts = SampledTexts(files, settings.json_keys, None, CHECKED_BYTES)
    reason = why_no_fast_core(tokenizer, texts)
    if reason is not None:
        print(f"encoding with the tokenizers library, not with the fast core: {reason}", file=sys.stderr)
        return settings
    return replace(settings, fast_core=True)


def train_tokenizer(arguments: argparse.Namespace) -> None:
    """Train a tokenizer on texts, write it to a file and print its size.

    Raises DataError for a file name with a suffix of another type, and for invalid special tokens.
    """
    suffix, train = TRAINERS[arguments.type]
    output = Path(arguments.output)
    # A vocab.json is GPT-2's, and `open_tokenizer` opens it as such.
    if output.suffix != suffix or output.name.endswith("vocab.json"):
        raise DataError(
            f"--output {output}: a {arguments.type} tokenizer is a {suffix} file, but not a vocab.json, which belongs "
            f"to a merges.txt: name it {output.with_name(f'tokenizer{suffix}')}"
        )
    files = _inputs(arguments)
    texts = SampledTexts(files, arguments.json_keys, arguments.on_error, arguments.sample_bytes, "learning from")
    check_special_tokens(arguments.special_tokens)
    write_whole(output, train(texts, arguments.vocabulary_size, arguments.special_tokens))
    tokenizer = open_tokenizer(str(output))
    print(
        f"{output}: {arguments.type}, vocabulary {tokenizer.vocabulary_size:,}, end of "
        f"document {tokenizer.end_of_document}, learned from {texts}"
    )


def check_special_tokens(names: Sequence[str]) -> None:
    """Raise DataError for a special token that is blank, repeated or reserved."""
    for name in names:
        if not name.strip() or names.count(name) > 1 or name in RESERVED_TOKENS:
            raise DataError(
                f"--special-tokens {name!r}: name each special token once; it must not be "
                f"blank or one of {', '.join(RESERVED_TOKENS)}, which are always included"
            )
