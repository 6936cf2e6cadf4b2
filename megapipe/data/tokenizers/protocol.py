"""What the rest of the project knows of a tokenizer."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to token ids and back. Neither direction adds or interprets a beginning or end of its own."""

    spec: str
    """The name it was opened by: `bytes` or a path."""
    vocabulary_size: int
    """Every id is below this: rows of the embedding that a model needs."""
    end_of_document: int | None
    """Id that marks the end of a document, None when the vocabulary has no such token."""

    special_tokens: dict[str, int]
    """Names and ids of the tokens that stand for no text, for example [MASK]."""

    def read_special_tokens(self, as_tokens: bool) -> None:
        """Set whether the name of a special token in a text becomes that token, or is tokenized like any other text.

        By default, names are tokens for tokenizers of Hugging Face, and text for all others. Raises DataError if the
        tokenizer cannot do it.
        """

    def encode(self, text: str) -> list[int]:
        """Ids of a text, which must hold no lone surrogates."""

    def encode_array(self, text: str) -> np.ndarray:
        """The same ids, an integer array [number of tokens]; where there is a fast core, from that."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; the end of document leaves no trace, bytes that are not UTF-8 become U+FFFD."""

    def fingerprint(self) -> str:
        """`sha256:<hex>` of the definition. Equal fingerprints give equal ids."""


def fingerprint_of_files(*paths: Path, extra: str = "") -> str:
    """Return `sha256:<hex>` of the files' bytes, one after the other, after the text `extra`."""
    digest = hashlib.sha256(extra.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()}"
