"""The command line of megapipe convert."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.config.command_line import exit_status, with_hyphens
from megapipe.conversion.arguments import build_parser
from megapipe.conversion.formats import FORMATS, format_of
from megapipe.conversion.heap import return_large_blocks
from megapipe.conversion.source import SourceOptions
from megapipe.conversion.target import TargetOptions

if TYPE_CHECKING:
    from megapipe.conversion.contents import Contents
    from megapipe.conversion.source import Source


def main(argv: Sequence[str]) -> int:
    """Runs the command. Exit status: 0; 1 where `verify` finds damage or `diff` differences; 2 for a wrong command
    line or unusable input; 130 for Ctrl-C."""
    arguments = build_parser().parse_args(with_hyphens(argv))
    return_large_blocks()
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "convert": _convert,
        "inspect": _inspect,
        "verify": _verify,
        "diff": _diff,
        "average": _average,
    }
    return exit_status(lambda: commands[arguments.command](arguments), _is_told, "nothing was written")


def _is_told(error: ValueError) -> bool:
    from megapipe.checkpoint.errors import CheckpointError
    from megapipe.config.errors import ConfigError
    from megapipe.conversion.formats import UnknownFormatError
    from megapipe.data.errors import DataError

    return isinstance(error, (CheckpointError, ConfigError, DataError, UnknownFormatError))


def _open(path: str, arguments: argparse.Namespace) -> "Source":
    known = format_of(Path(path), arguments.format)
    source = known.open_source(Path(path), SourceOptions(allow_pickle=arguments.allow_pickle))
    for note in source.contents.notes:
        print(f"note: {note}", file=sys.stderr)
    return source


def _options(arguments: argparse.Namespace) -> TargetOptions:
    return TargetOptions(
        max_shard_bytes=arguments.max_shard_bytes,
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        chunks=arguments.chunks,
        layer_names=arguments.layer_names,
    )


def _convert(arguments: argparse.Namespace) -> int:
    from megapipe.conversion.transfer import contents_for, transfer

    source, target = _open(arguments.source, arguments), FORMATS[arguments.to]
    contents = contents_for(source.contents, target, arguments.precision, arguments.weights_only)
    contents = _with_tokenizer(contents, arguments.tokenizer)
    made = target.open_target(Path(arguments.target), contents, _options(arguments))
    notes = transfer(source, contents, made)
    left_out = [kind for kind in source.contents.kinds if kind not in contents.kinds]
    print(f"{arguments.target}: {target.title}, {_counted(len(contents.tensors))}")
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    for note in notes:
        print(note)
    return 0


def _with_tokenizer(contents: "Contents", name: str | None) -> "Contents":
    """The contents with the tokenizer that --tokenizer names. Raises DataError for one that cannot be opened."""
    from megapipe.conversion.tokenizer_files import NONE
    from megapipe.data.tokenizers import open_tokenizer

    if name is None:
        return contents
    if name != NONE:
        open_tokenizer(name)
    return replace(contents, tokenizer=name)


def _inspect(arguments: argparse.Namespace) -> int:
    from megapipe.conversion import report

    known = format_of(Path(arguments.source), arguments.format)
    contents = _open(arguments.source, arguments).contents
    print(report.as_json(known, contents) if arguments.json else report.as_text(known, contents))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from megapipe.checkpoint.errors import CheckpointError
    from megapipe.conversion.verification import checkpoints_of, problems_of

    damaged = False
    for path in (each for named in arguments.sources for each in checkpoints_of(Path(named))):
        try:
            source = _open(str(path), arguments)
            problems = problems_of(source)
            source.close()
        except CheckpointError as error:
            problems = [str(error)]
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        if problems:
            damaged = True
        else:
            print(f"{path}: whole, {_counted(len(source.contents.tensors))}")
    return 1 if damaged else 0


def _diff(arguments: argparse.Namespace) -> int:
    from megapipe.conversion.comparison import compare

    ours, theirs = _open(arguments.source, arguments), _open(arguments.other, arguments)
    # A folder of weights alone is compared by what it can hold.
    formats = [format_of(Path(path), arguments.format) for path in (arguments.source, arguments.other)]
    weights_only = arguments.weights_only or not all(known.keeps_run for known in formats)
    differences, compared = compare(ours, theirs, arguments.tolerance, weights_only)
    for line in differences:
        print(line)
    if not differences:
        print(f"equal: {_counted(compared)}" + (" of weights" if weights_only else ""))
    return 1 if differences else 0


def _average(arguments: argparse.Namespace) -> int:
    from megapipe.conversion.averaging import average
    from megapipe.conversion.transfer import contents_for

    sources = [_open(path, arguments) for path in arguments.sources]
    target = FORMATS[arguments.to]
    contents = contents_for(sources[-1].contents, target, arguments.precision, weights_only=True)
    contents = _with_tokenizer(contents, arguments.tokenizer)
    notes = average(
        sources, contents, lambda: target.open_target(Path(arguments.output), contents, _options(arguments))
    )
    print(f"{arguments.output}: {target.title}, the mean of {len(sources)}, {_counted(len(contents.tensors))}")
    for note in notes:
        print(note)
    return 0


def _counted(tensors: int) -> str:
    return f"{tensors} tensor{'' if tensors == 1 else 's'}"
