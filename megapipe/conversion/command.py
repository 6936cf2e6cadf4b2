"""The command line of megapipe convert."""

import argparse
import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.config import ConfigError
from megapipe.config.command_line import exit_status, finite, positive, tool_parser, with_hyphens
from megapipe.conversion.formats import FORMATS, SHARD_BYTES, TargetOptions, format_of

if TYPE_CHECKING:
    from megapipe.conversion.formats import Contents, Source


DESCRIPTION = """\
Converts checkpoints between formats, and inspects, verifies, compares and averages them.

Tensors are converted one at a time, so that a model of any size needs a few times the memory
of its largest tensor. No code in a folder is run. The output is complete or absent, and an
existing folder is never changed.
"""
EXAMPLES = """\
examples:
  megapipe convert convert runs/quickstart --to hf exported
  megapipe convert convert --from hf Qwen2-0.5B --to megapipe weights/qwen2 --precision bf16
  megapipe convert inspect runs/quickstart --json
  megapipe convert verify runs/quickstart/checkpoints/step-00000400
  megapipe convert diff runs/quickstart exported
  megapipe convert average runs/a/checkpoints/step-* --output weights/averaged

docs/conversion.md explains what each format keeps.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, which reports wrong values and exits with status 2."""
    parser = tool_parser("megapipe convert", DESCRIPTION, EXAMPLES)
    add = parser.add_subparsers(dest="command", required=True).add_parser

    convert = add("convert", help="write a checkpoint in another format or precision")
    about = "folder of a checkpoint, or of a run (its newest complete checkpoint)"
    convert.add_argument("sources", metavar="PATH", nargs=1, help=about)
    convert.add_argument("target", metavar="TARGET", help="folder to write, which must not exist")
    _add_reading(convert, _write)
    _add_writing(convert)
    convert.add_argument("--to", choices=list(FORMATS), required=True, help=_formats())
    convert.add_argument(
        "--weights-only", action="store_true", help="omit moments and earlier weights, as most formats always do"
    )

    inspect = add("inspect", help="show model, step, tensors, types and sizes without reading a tensor")
    inspect.add_argument("source", metavar="PATH")
    _add_reading(inspect, _inspect)
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    verify = add("verify", help="read every byte; list bad files and exit with status 1 if any")
    verify.add_argument("sources", metavar="PATH", nargs="+", help="folders; a run's folder means all its checkpoints")
    _add_reading(verify, _verify)

    diff = add("diff", help="show how two checkpoints differ; exit status 1 if they do")
    diff.add_argument("source", metavar="PATH")
    diff.add_argument("other", metavar="OTHER")
    _add_reading(diff, _diff)
    diff.add_argument("--weights-only", action="store_true", help="ignore moments and earlier weights")
    diff.add_argument("--tolerance", type=finite, default=0.0, metavar="X", help="ignore differences of at most X (0)")

    average = add("average", help="average the weights of several checkpoints in float64")
    average.add_argument("sources", metavar="PATH", nargs="+")
    about = "folder to write, which must not exist"
    average.add_argument("--output", dest="target", required=True, metavar="TARGET", help=about)
    average.set_defaults(weights_only=True)
    _add_reading(average, _write)
    _add_writing(average)
    average.add_argument("--to", choices=list(FORMATS), default="megapipe", help=_formats() + " (megapipe)")
    return parser


def _add_reading(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.set_defaults(run=run)
    parser.add_argument(
        "--from",
        dest="format",
        choices=list(FORMATS),
        help="format of the input, if its files do not identify it",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read formats that store pickles, which can carry code: megatron, megatron-dist, dcp, and hf folders "
        "of .bin files. A confined process reads them and accepts only listed classes; no code in them runs",
    )


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="type of written weights (unchanged)")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="hf, megapipe: bytes, the path of the model's tokenizer, or none (the tokenizer of the training shard)",
    )
    parser.add_argument(
        "--max-shard-bytes",
        type=positive,
        default=SHARD_BYTES,
        metavar="N",
        help=f"hf: largest file of weights ({SHARD_BYTES:,})",
    )
    megatron = parser.add_argument_group("megatron: the ranks that the checkpoint is written for")
    for flag, about in (
        ("--tensor", "tensor-parallel ranks (1)"),
        ("--pipeline", "pipeline stages (1)"),
        ("--chunks", "model chunks on each stage, its virtual stages (1)"),
    ):
        megatron.add_argument(flag, type=positive, default=1, metavar="N", help=about)
    megatron.add_argument(
        "--layer-names",
        choices=["local", "transformer_engine"],
        default="local",
        help="names of a layer's norms and experts, by Megatron-LM's --transformer-impl (local)",
    )


def _formats() -> str:
    return "; ".join(f"{name}: {entry.title}" for name, entry in FORMATS.items())


_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Make the C library return blocks above a megabyte to the system when they are freed.

    By default, glibc raises that bound to the largest block freed so far. Tensors are then allocated from a heap that
    becomes fragmented, and a conversion to several files took additional memory of half the model's size (measured).
    Other C libraries have neither this call nor this rule.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _BYTES)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status.

    The status is 0 on success, 1 if `verify` finds damage or `diff` finds differences, 2 for a wrong command line or
    unusable input, and 130 for Ctrl-C.
    """
    arguments = build_parser().parse_args(with_hyphens(argv))
    return_large_blocks()
    return exit_status(lambda: arguments.run(arguments), "nothing was written")


def _open(path: str, arguments: argparse.Namespace) -> "Source":
    source_format = format_of(Path(path), arguments.format)
    source = source_format.open_source(Path(path), arguments.allow_pickle)
    for note in source.contents.notes:
        print(f"note: {note}", file=sys.stderr)
    return source


def _options(arguments: argparse.Namespace) -> TargetOptions:
    """Return the options of a target. Raises ConfigError for one that the format of --to does not have."""
    for name in dict.fromkeys(option for entry in FORMATS.values() for option in entry.options):
        default = getattr(TargetOptions, name, None)
        if getattr(arguments, name) != default and name not in FORMATS[arguments.to].options:
            owners = " and ".join(each for each, entry in FORMATS.items() if name in entry.options)
            raise ConfigError(
                f"--{name.replace('_', '-')} is an option of --to {owners}, not of {arguments.to}; leave it out"
            )
    return TargetOptions(**{each.name: getattr(arguments, each.name) for each in fields(TargetOptions)})


def _write(arguments: argparse.Namespace) -> int:
    """Convert one checkpoint, or average the weights of several."""
    from megapipe.checkpoint.directory import check_new
    from megapipe.conversion.operations import average, contents_for, transfer

    options, target, path = _options(arguments), FORMATS[arguments.to], Path(arguments.target)
    check_new(path)
    sources = [_open(each, arguments) for each in arguments.sources]
    given = sources[-1].contents
    contents = contents_for(given, target, arguments.precision, arguments.weights_only)
    contents = _with_tokenizer(contents, arguments.tokenizer)
    mean, left_out = "", []
    if arguments.command == "average":
        notes = average(sources, contents, lambda: target.open_target(path, contents, options))
        mean = f"mean of {len(sources)} checkpoints, "
    else:
        notes = transfer(sources[0], contents, target.open_target(path, contents, options))
        left_out = [kind for kind in given.kinds if kind not in contents.kinds]
    print(f"{arguments.target}: {target.title}, {mean}{_counted(len(contents.tensors))}")
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    for note in notes:
        print(note)
    return 0


def _with_tokenizer(contents: "Contents", name: str | None) -> "Contents":
    """Return the contents with the tokenizer of --tokenizer. Raises DataError if it cannot be opened."""
    from megapipe.conversion.tokenizer_files import NONE
    from megapipe.data.tokenizers import open_tokenizer

    if name is None:
        return contents
    if name != NONE:
        open_tokenizer(name)
    return replace(contents, tokenizer=name)


def _inspect(arguments: argparse.Namespace) -> int:
    from megapipe.conversion.operations import as_json, as_text

    source_format = format_of(Path(arguments.source), arguments.format)
    contents = _open(arguments.source, arguments).contents
    print(as_json(source_format, contents) if arguments.json else as_text(source_format, contents))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from megapipe.checkpoint.storage import CheckpointError
    from megapipe.conversion.operations import checkpoints_of, problems_of

    damaged = False
    for path in (path for folder in arguments.sources for path in checkpoints_of(Path(folder))):
        try:
            source = _open(str(path), arguments)
            problems = problems_of(source)
            source.close()
        except CheckpointError as error:
            problems = [str(error)]
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        damaged |= bool(problems)
        if not problems:
            print(f"{path}: intact, {_counted(len(source.contents.tensors))}")
    return int(damaged)


def _diff(arguments: argparse.Namespace) -> int:
    from megapipe.conversion.operations import compare

    first, second = _open(arguments.source, arguments), _open(arguments.other, arguments)
    # If the format of one folder stores only weights, only weights are compared.
    formats = [format_of(Path(path), arguments.format) for path in (arguments.source, arguments.other)]
    weights_only = arguments.weights_only or not all(each.keeps_run for each in formats)
    differences, compared = compare(first, second, arguments.tolerance, weights_only)
    for line in differences:
        print(line)
    if not differences:
        print(f"equal: {_counted(compared)}" + (" of weights" if weights_only else ""))
    return 1 if differences else 0


def _counted(tensors: int) -> str:
    return f"{tensors} tensor{'' if tensors == 1 else 's'}"
