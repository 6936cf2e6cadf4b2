"""One part of the input to one shard per output: what a worker does."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from megapipe.data.errors import DataError
from megapipe.data.index_writer import ShardWriter
from megapipe.data.preprocess.documents import Document, read_documents
from megapipe.data.preprocess.parts import Part
from megapipe.data.preprocess.seen_documents import digest_of
from megapipe.data.preprocess.sentences import split_sentences
from megapipe.data.shard_format import token_dtype
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.data.tokenizers.fast_core import use_fast_core


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings:
    """Settings that determine the output, together with the input."""

    tokenizer: str
    """Name for open_tokenizer."""
    end_of_document: str | None = None
    """Name of the token that ends documents, None where the tokenizer knows it."""
    append_end_of_document: bool = False
    """End every non-empty document with that token."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of JSON lines and columns of tables; each becomes a shard of its own."""
    join_keys: str | None = None
    """Text between the fields, where they become one document of one shard; None keeps them apart."""
    split_sentences: bool = False
    """One sequence per sentence instead of one per document."""
    language: str = "en"
    """Of the sentences, ISO 639-1."""
    drop_duplicates: bool = False
    """Leave out documents whose fields all equal those of an earlier one."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a document that cannot be read does: end the run, or be left out of every shard and counted."""
    special_tokens_in_text: Literal["text", "token", "error"] = "text"
    """How the name of a special token in a document is read: as text, as that token, or as an error."""
    fast_core: bool = False
    """Encode with the fast core, which was found to give the same ids."""

    def open(self) -> Tokenizer:
        """Raises DataError for an unknown tokenizer, and when it has no token to append."""
        tokenizer = open_tokenizer(self.tokenizer, self.end_of_document)
        if self.append_end_of_document and tokenizer.end_of_document is None:
            raise DataError(
                f"{self.tokenizer} does not say which token ends a document: name it with --end-of-document"
            )
        tokenizer.read_special_tokens(self.special_tokens_in_text == "token")
        if self.fast_core:
            use_fast_core(tokenizer)
        return tokenizer

    def output_names(self) -> list[str]:
        """Of the shards, behind the prefix, as Megatron-LM names them."""
        level = "sentence" if self.split_sentences else "document"
        keys = self.json_keys if self.join_keys is None else ["_".join(self.json_keys)]
        return [f"{key}_{level}" for key in keys]


class TokenizedPart(NamedTuple):
    prefixes: tuple[str, ...]
    """One shard per output."""
    input_bytes: int
    skipped: tuple[str, ...]
    """Why each left-out document was left out."""
    digests: bytes
    """One per document, where duplicates are to be found; else empty."""
    num_special_tokens: int
    """Number of names of special tokens in the texts."""


def tokenize_part(part: Part, prefix: str, settings: TokenizeSettings) -> TokenizedPart:
    """Writes the shards `<prefix>_<number of the output>`. Raises DataError for a broken document not skipped."""
    tokenizer = _opened(settings)
    dtype = token_dtype(tokenizer.vocabulary_size)
    # Not durable: what a killed run leaves is thrown away.
    writers = [ShardWriter(f"{prefix}_{n}", dtype, durable=False) for n in range(len(settings.output_names()))]
    skipped: list[str] = []
    digests = bytearray()
    names = _names_of_special_tokens(tokenizer)
    num_special_tokens = 0
    try:
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
            except DataError as error:  # the rest of a file that is cut off or cannot be opened
                if settings.on_error == "stop":
                    raise
                skipped.append(str(error))
        for writer in writers:
            writer.commit()
    finally:
        for writer in writers:
            writer.close()
    prefixes = tuple(writer.prefix for writer in writers)
    return TokenizedPart(prefixes, part.size, tuple(skipped), bytes(digests), num_special_tokens)


def _names_of_special_tokens(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern of the names of special tokens, the longest first; None if there are none."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def _count_special_tokens(
    document: Document, texts: Sequence[str], names: re.Pattern[str] | None, settings: TokenizeSettings
) -> int:
    """Count the names of special tokens in a document. Raises DataError for one if the settings refuse them."""
    if names is None:
        return 0
    occurrences = [name for text in texts for name in names.findall(text)]
    if occurrences and settings.special_tokens_in_text == "error":
        raise DataError(
            f"{document.place()}: the text contains {occurrences[0]!r}, the name of a special token; choose "
            "--special-tokens-in-text text or token, or skip such documents with --on-error skip"
        )
    return len(occurrences)


def _sequences(document: Document, text: str, tokenizer: Tokenizer, settings: TokenizeSettings) -> list[np.ndarray]:
    """Token ids of a document: one sequence, or one per sentence, none of them empty."""
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
def _opened(settings: TokenizeSettings) -> Tokenizer:
    """A worker tokenizes many parts with one tokenizer."""
    return settings.open()
