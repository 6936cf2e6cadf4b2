"""Tokenization of a part of the input into one shard per output. This is the task of a worker."""

import importlib.metadata
import re
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from megapipe.data import DataError
from megapipe.data.preprocess.documents import Document, read_documents
from megapipe.data.preprocess.inputs import PART_BYTES, Part
from megapipe.data.shard_writer import ShardWriter
from megapipe.data.shards import token_dtype
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.data.tokenizers.hugging_face import use_fast_core

_SPACES = {code: " " for code in range(0x80, 0x3001) if chr(code).isspace()}


def sentence_splitter_name(language: str) -> str:
    """Return the splitter's name for manifests, with its version, because other versions may split differently."""
    return f"sentencex {importlib.metadata.version('sentencex')}, {language}"


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Return the sentences in order, with the white space around them. Their concatenation is the text.

    A blank line ends a sentence, but a line end does not. Pieces that are only white space belong to the previous
    sentence.
    """
    sentences: list[str] = []
    for paragraph in _paragraphs(text):
        for sentence in _split_paragraph(paragraph, language):
            if sentences and not sentence.strip():
                sentences[-1] += sentence
            else:
                sentences.append(sentence)
    return sentences


def _paragraphs(text: str) -> list[str]:
    """Split a text into paragraphs, each of which ends with a blank line."""
    paragraphs: list[str] = []
    begin = position = 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        if not line.strip():
            paragraphs.append(text[begin:position])
            begin = position
    return [*paragraphs, text[begin:]] if begin < len(text) else paragraphs


def _split_paragraph(paragraph: str, language: str) -> list[str]:
    import sentencex

    # The library fails on white space of several bytes, so it gets plain spaces. Only the lengths of pieces are used.
    plain = paragraph.translate(_SPACES)
    pieces = sentencex.segment(language, plain)
    if "".join(pieces) != plain:
        return [paragraph]
    sentences, position = [], 0
    for piece in pieces:
        sentences.append(paragraph[position : position + len(piece)])
        position += len(piece)
    return sentences


DIGEST_BYTES = 16
_CACHE_KIB = 65_536


def digest_of(texts: Sequence[str]) -> bytes:
    """Return a 16-byte hash (XXH3) of a document's fields. For 10^9 documents, a collision has probability 10^-21."""
    digest = xxhash.xxh3_128()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


class SeenDocuments:
    """Stores the digests of all documents so far in an SQLite file. A crash loses the changes since the last flush."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        for setting in ("journal_mode = WAL", "synchronous = FULL", f"cache_size = -{_CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE IF NOT EXISTS seen (digest BLOB PRIMARY KEY, part INTEGER) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def forget_from(self, part: int) -> None:
        """Remove the documents of this part and later ones."""
        self._database.execute("DELETE FROM seen WHERE part >= ?", (part,))
        self.flush()

    def are_new(self, digests: bytes, part: int) -> np.ndarray:
        """Add digests, and return whether each of them is new: bool [number of digests]."""
        insert = self._database.cursor()
        statement = "INSERT OR IGNORE INTO seen VALUES (?, ?)"
        new = [
            insert.execute(statement, (digests[start : start + DIGEST_BYTES], part)).rowcount == 1
            for start in range(0, len(digests), DIGEST_BYTES)
        ]
        return np.array(new, dtype=bool)

    def flush(self) -> None:
        self._database.execute("COMMIT")
        self._database.execute("BEGIN")

    def close(self) -> None:
        self._database.close()


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings:
    """Settings that, together with the input, determine the output."""

    tokenizer: str
    """Name for open_tokenizer."""
    end_of_document: str | None = None
    """Name of the token that ends documents; None if the tokenizer defines it."""
    append_end_of_document: bool = False
    """End every non-empty document with that token."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of JSON lines and columns of tables; each becomes a separate shard."""
    join_keys: str | None = None
    """Text between the fields if they are joined to one document of one shard; None writes separate shards."""
    split_sentences: bool = False
    """One sequence per sentence instead of one per document."""
    language: str = "en"
    """Language of the sentences, ISO 639-1."""
    drop_duplicates: bool = False
    """Omit documents whose fields are all equal to the fields of an earlier document."""
    on_error: Literal["stop", "skip"] = "stop"
    """Effect of a document that cannot be read: end the run, or omit the document from every shard and count it."""
    special_tokens_in_text: Literal["text", "token", "error"] = "text"
    """How to read the name of a special token in a document: as text, as that token, or as an error."""
    fast_core: bool = False
    """Encode with the fast core, which has been checked to give the same ids."""

    def open(self) -> Tokenizer:
        """Open the tokenizer. Raises DataError if it is unknown, or has no token to append."""
        tokenizer = open_tokenizer(self.tokenizer, self.end_of_document)
        if self.append_end_of_document and tokenizer.end_of_document is None:
            raise DataError(f"{self.tokenizer} has no token that ends a document: name it with --end-of-document")
        tokenizer.read_special_tokens(self.special_tokens_in_text == "token")
        if self.fast_core:
            use_fast_core(tokenizer)
        return tokenizer

    @property
    def part_bytes(self) -> int:
        """Approximate bytes of a part, a few seconds of work. Splitting sentences is several times slower than
        tokenizing."""
        return PART_BYTES // 8 if self.split_sentences else PART_BYTES

    def output_names(self) -> list[str]:
        """Return the suffixes that the names of the shards have after the prefix, as in Megatron-LM."""
        level = "sentence" if self.split_sentences else "document"
        keys = self.json_keys if self.join_keys is None else ["_".join(self.json_keys)]
        return [f"{key}_{level}" for key in keys]


class TokenizedPart(NamedTuple):
    prefixes: tuple[str, ...]
    """Prefix of one shard for each output."""
    input_bytes: int
    skipped: tuple[str, ...]
    """The reason for each document that was skipped."""
    digests: bytes
    """One digest per document if duplicates are to be dropped; else empty."""
    num_special_tokens: int
    """Number of names of special tokens in the texts."""


def tokenize_part(part: Part, prefix: str, settings: TokenizeSettings) -> TokenizedPart:
    """Write the shards `<prefix>_<number of the output>`. Raises DataError for a broken document that is not
    skipped."""
    tokenizer = _open_tokenizer(settings)
    dtype = token_dtype(tokenizer.vocabulary_size)
    skipped: list[str] = []
    digests = bytearray()
    longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
    names = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
    num_special_tokens = 0
    with ExitStack() as stack:
        # The files need not be durable, because the parts of a killed run are removed.
        writers = [
            stack.enter_context(ShardWriter(f"{prefix}_{number}", dtype, durable=False))
            for number in range(len(settings.output_names()))
        ]
        for piece in part.pieces:
            try:
                for document in read_documents(piece, settings.json_keys):
                    try:
                        texts = document.texts(settings.json_keys)
                        count = _count_special_tokens(document, texts, names, settings)
                        joined = texts if settings.join_keys is None else [settings.join_keys.join(texts)]
                        documents = [_sequences(document, text, tokenizer, settings) for text in joined]
                    except DataError as error:
                        if settings.on_error == "stop":
                            raise
                        skipped.append(str(error))
                        continue
                    num_special_tokens += count
                    if settings.drop_duplicates:
                        digests += digest_of(texts)
                    for writer, sequences in zip(writers, documents, strict=True):
                        writer.add_document(sequences)
            except DataError as error:  # a file is cut off or cannot be opened
                if settings.on_error == "stop":
                    raise
                skipped.append(str(error))
        for writer in writers:
            writer.commit()
    prefixes = tuple(writer.prefix for writer in writers)
    return TokenizedPart(prefixes, part.size, tuple(skipped), bytes(digests), num_special_tokens)


def _count_special_tokens(
    document: Document, texts: Sequence[str], names: re.Pattern[str] | None, settings: TokenizeSettings
) -> int:
    """Count the names of special tokens in a document. Raises DataError for a name if the settings refuse them."""
    if names is None:
        return 0
    occurrences = [name for text in texts for name in names.findall(text)]
    if occurrences and settings.special_tokens_in_text == "error":
        raise DataError(
            f"{document.place()}: the text contains {occurrences[0]!r}, the name of a special "
            "token; choose --special-tokens-in-text text or token, or --on-error skip"
        )
    return len(occurrences)


def _sequences(document: Document, text: str, tokenizer: Tokenizer, settings: TokenizeSettings) -> list[np.ndarray]:
    """Return the token ids of a document: one sequence, or one per sentence, without empty sequences."""
    texts = split_sentences(text, settings.language) if settings.split_sentences else [text]
    sequences = [ids for ids in map(tokenizer.encode_array, texts) if len(ids)]
    end = tokenizer.end_of_document
    if settings.special_tokens_in_text == "text" and any((ids == end).any() for ids in sequences):
        raise DataError(
            f"{document.place()}: the text contains the token that ends documents ({end}), which this tokenizer "
            "does not distinguish from text; choose --special-tokens-in-text token, or another --end-of-document"
        )
    # As in Megatron-LM, an empty document stays empty.
    if sequences and settings.append_end_of_document and end is not None:
        sequences[-1] = np.append(sequences[-1].astype(np.int64, copy=False), end)
    return sequences


@lru_cache(maxsize=1)
def _open_tokenizer(settings: TokenizeSettings) -> Tokenizer:
    """Open the tokenizer, which a worker keeps for its later parts."""
    return settings.open()
