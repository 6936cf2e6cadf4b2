"""One part of the input to one shard per field: what a worker does."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from megapipe.data.errors import DataError
from megapipe.data.index_writer import ShardWriter
from megapipe.data.preprocess.documents import RawDocument, read_documents
from megapipe.data.preprocess.parts import Part
from megapipe.data.shard_format import token_dtype
from megapipe.data.tokenizers import Tokenizer, open_tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings:
    """What decides the output, beside the input."""

    tokenizer: str
    """Name for open_tokenizer."""
    end_of_document: str | None = None
    """Name of the token that ends documents, None where the tokenizer knows it."""
    append_end_of_document: bool = False
    """End every non-empty document with that token."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of JSON lines; each becomes a shard of its own."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a document that cannot be read does: end the run, or be left out of every shard and counted."""

    def open(self) -> Tokenizer:
        """Raises DataError for an unknown tokenizer, and when it has no token to append."""
        tokenizer = open_tokenizer(self.tokenizer, self.end_of_document)
        if self.append_end_of_document and tokenizer.end_of_document is None:
            raise DataError(
                f"{self.tokenizer} does not say which token ends a document: name it with --end-of-document"
            )
        return tokenizer


class TokenizedPart(NamedTuple):
    prefixes: tuple[str, ...]
    """One shard per field, in the order of the fields."""
    input_bytes: int
    skipped: tuple[str, ...]
    """Why each left-out document was left out."""


def tokenize_part(part: Part, prefix: str, settings: TokenizeSettings) -> TokenizedPart:
    """Writes the shards `<prefix>_<number of the field>`. Raises DataError for a broken document not skipped."""
    tokenizer = _opened(settings)
    dtype = token_dtype(tokenizer.vocabulary_size)
    writers = [ShardWriter(f"{prefix}_{index}", dtype) for index in range(len(settings.json_keys))]
    skipped = []
    try:
        for piece in part.pieces:
            for document in read_documents(piece):
                try:
                    tokenized = _tokenize(document, tokenizer, settings)
                except DataError as error:
                    if settings.on_error == "stop":
                        raise
                    skipped.append(str(error))
                    continue
                for writer, tokens in zip(writers, tokenized, strict=True):
                    writer.add_document([tokens])
        for writer in writers:
            writer.commit()
    finally:
        for writer in writers:
            writer.close()
    return TokenizedPart(tuple(writer.prefix for writer in writers), part.size, tuple(skipped))


def _tokenize(document: RawDocument, tokenizer: Tokenizer, settings: TokenizeSettings) -> list[list[int]]:
    """Token ids of each field."""
    tokenized = []
    for text in document.texts(settings.json_keys):
        tokens = tokenizer.encode(text)
        # As in Megatron-LM, an empty document stays empty.
        if tokens and settings.append_end_of_document and tokenizer.end_of_document is not None:
            tokens.append(tokenizer.end_of_document)
        tokenized.append(tokens)
    return tokenized


@lru_cache(maxsize=1)
def _opened(settings: TokenizeSettings) -> Tokenizer:
    """A worker tokenizes many parts with one tokenizer."""
    return settings.open()
