"""One token per UTF-8 byte: needs no training and no file, and loses nothing."""

import hashlib
from collections.abc import Sequence

import numpy as np

_END_OF_DOCUMENT = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a document."""

    spec = "bytes"
    vocabulary_size = 257
    end_of_document: int | None = _END_OF_DOCUMENT

    def __init__(self) -> None:
        self.special_tokens: dict[str, int] = {}

    def read_special_tokens(self, as_tokens: bool) -> None:
        """Do nothing, since no special token has a name."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != _END_OF_DOCUMENT).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        return f"sha256:{hashlib.sha256(b'bytes, 256 ends a document').hexdigest()}"
