"""The command line of megapipe preprocess: shards from text, and tokenizers from text."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megapipe.config.command_line import exit_status, with_hyphens
from megapipe.data.durable import write_whole
from megapipe.data.errors import DataError
from megapipe.data.preprocess.arguments import TRAIN_TOKENIZER, build_parser, build_training_parser
from megapipe.data.preprocess.inputs import InputFile, find_inputs
from megapipe.data.preprocess.parts import idle_workers
from megapipe.data.preprocess.progress import ProgressLine
from megapipe.data.preprocess.run import preprocess
from megapipe.data.preprocess.sampled_texts import SampledTexts
from megapipe.data.preprocess.tokenize_part import TokenizeSettings
from megapipe.data.tokenizers import open_tokenizer
from megapipe.data.tokenizers.fast_core import CHECKED_BYTES, is_byte_level_bpe, why_no_fast_core
from megapipe.data.tokenizers.training import RESERVED_TOKENS, TRAINERS


def main(argv: Sequence[str]) -> int:
    """Runs the command. Exit status: 0, 2 for a wrong command line or unusable input, 130 for Ctrl-C."""
    words = with_hyphens(argv)
    trains = bool(words) and words[0].replace("_", "-") == TRAIN_TOKENIZER

    def work() -> int:
        if trains:
            train_tokenizer(build_training_parser().parse_args(words[1:]))
        else:
            run(build_parser().parse_args(words))
        return 0

    left = "nothing was written" if trains else "the same command continues where it stopped"
    return exit_status(work, lambda error: isinstance(error, DataError), left)


def run(arguments: argparse.Namespace) -> None:
    """Turn texts into shards, with a line of progress, and print what each shard holds.

    Raises DataError for inputs, a tokenizer or options that cannot be used.
    """
    files = _inputs(arguments)
    settings = TokenizeSettings(
        tokenizer=arguments.tokenizer,
        end_of_document=arguments.end_of_document,
        append_end_of_document=arguments.append_eod,
        json_keys=tuple(dict.fromkeys(arguments.json_keys)),
        join_keys=arguments.join_keys,
        split_sentences=arguments.split_sentences,
        language=arguments.language,
        drop_duplicates=arguments.drop_duplicates,
        on_error=arguments.on_error,
        special_tokens_in_text=arguments.special_tokens_in_text,
    )
    if arguments.tokenizer_core == "auto":
        settings = with_fast_core(settings, files)
    idle = idle_workers(files, arguments.workers)
    if idle is not None:
        print(f"note: {idle}", file=sys.stderr)
    progress = ProgressLine(total_bytes=sum(file.size for file in files))
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
        duplicates = (
            f", {manifest.num_duplicates:,} duplicates left out" if manifest.num_duplicates is not None else ""
        )
        if manifest.num_special_tokens_in_text:
            became = "text" if manifest.special_tokens_in_text == "text" else "the special tokens"
            print(
                f"note: names of special tokens occur {manifest.num_special_tokens_in_text:,} times in the input; "
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
    """The settings with the fast core if it can be used; says so if byte-level BPE has to do without."""
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
    """Learn a tokenizer from texts, write it to a file and print its size.

    Raises DataError for a file name that does not end as files of this type do, and for wrong special tokens.
    """
    suffix, train = TRAINERS[arguments.type]
    output = Path(arguments.output)
    if output.suffix != suffix:
        raise DataError(f"a {arguments.type} tokenizer is a {suffix} file: name it {output.with_suffix(suffix)}")
    files = _inputs(arguments)
    texts = SampledTexts(files, arguments.json_keys, arguments.on_error, arguments.sample_bytes)
    check_special_tokens(arguments.special_tokens)
    content = train(texts, arguments.vocabulary_size, arguments.special_tokens)
    write_whole(output, content)
    tokenizer = open_tokenizer(str(output))
    print(
        f"{output}: {arguments.type}, vocabulary {tokenizer.vocabulary_size:,}, end of document "
        f"{tokenizer.end_of_document}, learned from {texts.num_texts:,} texts of {texts.num_bytes / 1e6:,.1f} MB"
    )


def check_special_tokens(names: Sequence[str]) -> None:
    """Raise DataError for a special token that is blank, repeated or reserved."""
    for name in names:
        if not name.strip() or names.count(name) > 1 or name in RESERVED_TOKENS:
            raise DataError(
                f"--special-tokens {name!r}: name each special token once; it must not be blank or one of "
                f"{', '.join(RESERVED_TOKENS)}, which are always included"
            )
