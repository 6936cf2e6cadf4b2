"""The protocol of tokenizers, and its simplest implementation: one token per byte."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Converts text to token ids and back. Neither direction adds or interprets tokens for the beginning or end of a
    text."""

    spec: str
    """A name with which `open_tokenizer` opens the tokenizer: `bytes`, a path, or a path with a kind before it."""
    vocabulary_size: int
    """Every id is below this number, which is the number of embedding rows that a model needs."""
    end_of_document: int | None
    """Id of the token that ends a document; None if the vocabulary has no such token."""

    special_tokens: dict[str, int]
    """Names and ids of tokens that do not represent text, for example [MASK]."""
    fingerprint: str
    """`sha256:<hex>` of the definition. Equal fingerprints give equal ids."""

    def read_special_tokens(self, as_tokens: bool) -> None:
        """Set whether the name of a special token in a text becomes that token, or is tokenized like any other text.

        By default, tokenizers of Hugging Face read names as tokens, and all others read them as text. Raises DataError
        if the tokenizer does not support the setting.
        """

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, which must not contain lone surrogates."""

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a text as an integer array [number of tokens]. This uses the fast core if there is one."""
        return np.array(self.encode(text), dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without the end of a document. Bytes that are not UTF-8 become U+FFFD."""


def fingerprint_of_files(*paths: Path, extra: str = "") -> str:
    """Return `sha256:<hex>` of the text `extra` followed by the files' bytes."""
    digest = hashlib.sha256(extra.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()}"


_END_OF_DOCUMENT = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes; 256 ends a document."""

    spec = "bytes"
    vocabulary_size = 257
    end_of_document: int | None = _END_OF_DOCUMENT
    fingerprint = f"sha256:{hashlib.sha256(b'bytes, 256 ends a document').hexdigest()}"

    def __init__(self) -> None:
        self.special_tokens: dict[str, int] = {}

    def read_special_tokens(self, as_tokens: bool) -> None:
        """Do nothing, because no special token has a name."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != _END_OF_DOCUMENT).decode("utf-8", errors="replace")
