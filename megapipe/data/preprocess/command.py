"""The command line of tools/preprocess.py: shards from text, and tokenizers from text."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.data.durable import write_whole
from megapipe.data.errors import DataError
from megapipe.data.preprocess.arguments import TRAIN_TOKENIZER, build_parser, build_training_parser, with_hyphens
from megapipe.data.preprocess.inputs import find_inputs
from megapipe.data.preprocess.progress import Progress
from megapipe.data.preprocess.run import output_prefix, preprocess
from megapipe.data.preprocess.sampled_texts import SampledTexts
from megapipe.data.preprocess.tokenize_part import TokenizeSettings
from megapipe.data.tokenizers import open_tokenizer
from megapipe.data.tokenizers.training import TRAINERS


def main(argv: Sequence[str]) -> int:
    """Runs the command. Exit status: 0, 1 for unusable input, 2 for a wrong command line, 130 for Ctrl-C."""
    words = with_hyphens(argv)
    try:
        if words and words[0].replace("_", "-") == TRAIN_TOKENIZER:
            train_tokenizer(build_training_parser().parse_args(words[1:]))
        else:
            run(build_parser().parse_args(words))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # Writing to a full disk fails without a file name.
        print(f"error: {error.filename or 'writing the output'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


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


def train_tokenizer(arguments: argparse.Namespace) -> None:
    suffix, train = TRAINERS[arguments.type]
    output = Path(arguments.output)
    if output.suffix != suffix:
        raise DataError(f"a {arguments.type} tokenizer is a {suffix} file: name it {output.with_suffix(suffix)}")
    files = find_inputs(arguments.input, arguments.include, arguments.exclude)
    texts = SampledTexts(files, arguments.json_keys, arguments.on_error, arguments.sample_bytes)
    content = train(texts, arguments.vocabulary_size)
    write_whole(output, content)
    tokenizer = open_tokenizer(str(output))
    print(
        f"{output}: {arguments.type}, vocabulary {tokenizer.vocabulary_size:,}, end of document "
        f"{tokenizer.end_of_document}, learned from {texts.num_texts:,} texts of {texts.num_bytes / 1e6:,.1f} MB"
    )
