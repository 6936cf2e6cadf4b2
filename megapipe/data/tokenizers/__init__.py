"""Tokenizers with one protocol, opened by a name, or learned from texts."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megapipe.data import DataError
from megapipe.data.tokenizers.hugging_face import (
    BERT_SPECIAL_TOKENS,
    END_OF_DOCUMENT,
    open_bert_vocabulary,
    open_gpt2_files,
    open_tokenizer_json,
    train_byte_level_bpe,
    train_word_piece,
)
from megapipe.data.tokenizers.model_files import (
    ENCODINGS,
    OPENERS,
    ByteTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    encoding_of,
    train_sentence_piece,
)

__all__ = ["Tokenizer", "open_tokenizer"]

FILES_IN_FOLDERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files that open the tokenizer of a folder; the first one that exists is used."""
_LOWERCASE_OF_KIND = {"bert-uncased": True, "bert-cased": False}

FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files of a Hugging Face folder that belong to its tokenizer or to generation."""


class Definition(NamedTuple):
    """Files that define a tokenizer.

    kind: the part of the name before the path, or empty. name: name of the file to open; empty for a folder. files:
    all files that define the tokenizer; none for `bytes`.
    """

    kind: str
    name: str
    files: tuple[Path, ...]


def definition_of(spec: str) -> Definition:
    """Return the files of the tokenizer that `open_tokenizer(spec)` opens."""
    if spec == "bytes":
        return Definition("", "", ())
    kind, path = kind_and_path(spec)
    if path.is_dir():
        return Definition(kind, "", tuple(path / name for name in FOLDER_FILES if (path / name).is_file()))
    if path.name.endswith(("vocab.json", "merges.txt")):
        return Definition(kind, path.name, _gpt2_pair(path))
    config = path.with_name("tokenizer_config.json")
    has_config = path.suffix in (".json", ".txt") and config.is_file()
    return Definition(kind, path.name, (path, config) if has_config else (path,))


def open_tokenizer(spec: str, end_of_document: str | None = None) -> Tokenizer:
    """Open the tokenizer that `spec` names:

    - `bytes`
    - a tokenizer.json of Hugging Face (any other name that ends in .json)
    - a SentencePiece model (any name that ends in .model)
    - GPT-2's vocab.json or merges.txt, with the other file in the same folder (or gpt2-vocab.json, gpt2-merges.txt)
    - BERT's WordPiece vocabulary, `bert-uncased:PATH` or `bert-cased:PATH`; or only the path (.txt) if a
      tokenizer_config.json in its folder specifies the case
    - a .tiktoken file by its published name, cl100k_base.tiktoken, or with that name in front, `cl100k_base:PATH`
    - a folder with one of these files under its usual name, like the folders of Hugging Face models

    end_of_document: name of the token that ends documents, if the tokenizer does not define it. Raises DataError.
    """
    if spec == "bytes":
        if end_of_document is not None:
            raise DataError(f"the byte tokenizer always ends documents with 256; remove {end_of_document!r}")
        return ByteTokenizer()
    kind, path = kind_and_path(spec)
    if path.is_dir():
        path = next((path / name for name in FILES_IN_FOLDERS if (path / name).is_file()), path)
    if not path.is_file():
        raise DataError(
            f"no tokenizer {spec!r}: write bytes, or the path of a tokenizer.json, a "
            "SentencePiece .model, a vocab.json with merges.txt, a .tiktoken file, "
            "bert-uncased: or bert-cased: and a vocab.txt, or a folder with one of "
            f"{', '.join(FILES_IN_FOLDERS)}"
        )
    if kind in ENCODINGS or path.suffix == ".tiktoken":
        return TiktokenTokenizer(path, spec, kind or encoding_of(path), end_of_document)
    if path.name.endswith(("vocab.json", "merges.txt")):
        return open_gpt2_files(*_gpt2_pair(path), end_of_document)
    if kind in _LOWERCASE_OF_KIND or path.name.endswith("vocab.txt"):
        return open_bert_vocabulary(path, spec if kind else str(path), _LOWERCASE_OF_KIND.get(kind), end_of_document)
    return OPENERS.get(path.suffix, open_tokenizer_json)(path, end_of_document)


def kind_and_path(spec: str) -> tuple[str, Path]:
    """Split the name of a tokenizer into the kind before its path, which may be empty, and the path."""
    kind, _, name = spec.partition(":")
    return (kind, Path(name)) if kind in _LOWERCASE_OF_KIND or kind in ENCODINGS else ("", Path(spec))


def _gpt2_pair(path: Path) -> tuple[Path, Path]:
    stem = path.name.removesuffix("vocab.json").removesuffix("merges.txt")
    return path.with_name(f"{stem}vocab.json"), path.with_name(f"{stem}merges.txt")


Trainer = Callable[[Iterable[str], int, Sequence[str]], bytes]

TRAINERS: dict[str, tuple[str, Trainer]] = {
    "sentencepiece-bpe": (".model", partial(train_sentence_piece, model_type="bpe")),
    "sentencepiece-unigram": (".model", partial(train_sentence_piece, model_type="unigram")),
    "byte-level-bpe": (".json", train_byte_level_bpe),
    "wordpiece-uncased": (".json", partial(train_word_piece, lowercase=True)),
    "wordpiece-cased": (".json", partial(train_word_piece, lowercase=False)),
}
"""For each kind of tokenizer: the suffix of its file, and the function that trains it and returns the content."""

RESERVED_TOKENS = (END_OF_DOCUMENT, *BERT_SPECIAL_TOKENS, "<unk>", "</s>")
