"""The arguments of megapipe preprocess."""

import argparse
import os

from megapipe.config.command_line import positive, tool_parser
from megapipe.data.preprocess.sampled_texts import SAMPLE_BYTES
from megapipe.data.tokenizers.training import TRAINERS

TRAIN_TOKENIZER = "train-tokenizer"

DESCRIPTION = """\
Converts text, JSON lines, Parquet, Arrow and datasets to .bin/.idx shards that megapipe and Megatron-LM train on.

A .jsonl, .ndjson or .json file has one JSON object per line, and each is a document. Each row of a .parquet or .arrow
file or of a dataset is a document, and so is any other file. JSON lines and text may be compressed (.gz, .zst).
The output is <prefix>_<key>_document.bin, .idx and .manifest.json, with the same bytes for any number of workers.
After an interruption, the same command continues where it stopped.

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
Learns a tokenizer's vocabulary from any input that preprocessing reads. The same input gives the same tokenizer.

sentencepiece-bpe and sentencepiece-unigram write a .model; byte-level-bpe (GPT-2's kind) and wordpiece-uncased and
wordpiece-cased (BERT's) write a tokenizer.json of Hugging Face.
"""
TRAINING_EXAMPLES = """\
example:
  megapipe preprocess train-tokenizer --input python-stdlib --type sentencepiece-bpe --vocabulary-size 8192 \\
      --output data/python.model
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `megapipe preprocess`, with which texts become shards."""
    parser = tool_parser("megapipe preprocess", DESCRIPTION, EXAMPLES)
    add_input_arguments(parser)
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="bytes, or the path of a tokenizer.json, a SentencePiece .model, a vocab.json (with its merges.txt), a "
        ".tiktoken file (cl100k_base:PATH where its name does not say), bert-uncased:PATH or bert-cased:PATH of a "
        "vocab.txt, or a folder with one of them",
    )
    parser.add_argument(
        "--end-of-document", metavar="TOKEN", help="token that ends documents, if not known from files"
    )
    parser.add_argument(
        "--special-tokens-in-text",
        choices=["text", "token", "error"],
        default="text",
        help="how to read the name of a special token in a document: as text, as that token, or as an error (text)",
    )
    parser.add_argument(
        "--tokenizer-core",
        choices=["auto", "library"],
        default="auto",
        help="auto takes a faster core for byte-level BPE if it gives the library's ids on a sample (auto)",
    )
    parser.add_argument(
        "--join-keys", metavar="TEXT", help="join all --json-keys to one document, with TEXT between them"
    )
    parser.add_argument(
        "--split-sentences", action="store_true", help="one sequence per sentence, <prefix>_<key>_sentence, for BERT"
    )
    parser.add_argument(
        "--language", default="en", metavar="CODE", help="language of the sentences, such as en, de, fr (en)"
    )
    parser.add_argument(
        "--drop-duplicates", action="store_true", help="leave out documents that equal an earlier one in all fields"
    )
    parser.add_argument("--append-eod", action="store_true", help="end every document with that token; GPT needs it")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="start of the output's paths")
    parser.add_argument("--workers", type=positive, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    return parser


def build_training_parser() -> argparse.ArgumentParser:
    """Return the parser of the command that learns a tokenizer from texts."""
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
        help=f"train on about N bytes, in documents chosen evenly from a larger input ({SAMPLE_BYTES})",
    )
    return parser


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the input, which preprocessing and training a tokenizer share."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, glob patterns, dataset:NAME[:CONFIGURATION][@SPLIT] (NAME may be a folder), or "
        "python-stdlib: the sources of Python's standard library",
    )
    parser.add_argument(
        "--dataset-revision", metavar="REVISION", help="branch, tag or commit of datasets on the hub (its default)"
    )
    parser.add_argument(
        "--dataset-streaming", action="store_true", help="read datasets of the hub over the network; keep no copy"
    )
    parser.add_argument(
        "--include", nargs="+", default=[], metavar="PATTERN", help="names to read in folders, such as '*.py'"
    )
    parser.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN", help="names and folders to leave out")
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields of JSON lines, columns of tables (text)",
    )
    parser.add_argument(
        "--on-error", choices=["stop", "skip"], default="stop", help="what to do about unreadable documents (stop)"
    )
