"""Tokenizers of OpenAI's tiktoken, from a local .tiktoken file: one token in base64 and its rank a line."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megapipe.data.errors import DataError
from megapipe.data.tokenizers.protocol import fingerprint_of_files

END_OF_DOCUMENT = "<|endoftext|>"


class Encoding(NamedTuple):
    """What a .tiktoken file does not hold: how text is cut before merging, and the special tokens."""

    pattern: str
    special_tokens: dict[str, int]


_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_FILL_IN_THE_MIDDLE = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")

ENCODINGS = {
    "r50k_base": Encoding(_GPT2, {END_OF_DOCUMENT: 50256}),
    "p50k_base": Encoding(_GPT2, {END_OF_DOCUMENT: 50256}),
    "cl100k_base": Encoding(
        _CL100K,
        {END_OF_DOCUMENT: 100257, "<|endofprompt|>": 100276}
        | {name: 100258 + number for number, name in enumerate(_FILL_IN_THE_MIDDLE)},
    ),
    "o200k_base": Encoding(_O200K, {END_OF_DOCUMENT: 199999, "<|endofprompt|>": 200018}),
}
"""By the names under which OpenAI publishes the files."""


class TiktokenTokenizer:
    """A .tiktoken file.

    pattern: how text is cut before merging. ranks: token -> id, special ones aside.

    Raises DataError for a file that is not one, and for an `end` that is no special token.
    """

    def __init__(self, path: Path, spec: str, encoding: str, end: str | None = None) -> None:
        import tiktoken

        pattern, special_tokens = ENCODINGS[encoding]
        ranks = _read_ranks(path)
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise DataError(
                f"{path} has no token for byte {missing[0]}: it is incomplete, or not a byte-level vocabulary"
            )
        clash = set(ranks.values()) & set(special_tokens.values())
        if clash:
            raise DataError(f"{path} gives a token the id {min(clash)}, which a special token has in {encoding}")
        self.pattern = pattern
        self.ranks = ranks
        self._encoding = tiktoken.Encoding(
            encoding, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
        )
        self._fingerprint = fingerprint_of_files(path, extra=encoding)
        self.spec = spec
        self._allowed: set[str] = set()
        self.special_tokens = dict(special_tokens)
        self.vocabulary_size = self._encoding.n_vocab
        name = END_OF_DOCUMENT if end is None else end
        if name not in special_tokens:
            raise DataError(f"{spec} has no special token {name!r}; it has {', '.join(special_tokens)}")
        self.end_of_document: int | None = special_tokens[name]

    def read_special_tokens(self, as_tokens: bool) -> None:
        self._allowed = set(self.special_tokens) if as_tokens else set()

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special=self._allowed, disallowed_special=())

    def encode_array(self, text: str) -> np.ndarray:
        array: np.ndarray = self._encoding.encode_to_numpy(text, allowed_special=self._allowed, disallowed_special=())
        return array

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(token) for token in ids if token != self.end_of_document])

    def fingerprint(self) -> str:
        return self._fingerprint


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Not by the library's own loader, which keeps a copy by the path and so misses that a file has changed."""
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise DataError(f"{path} is not a .tiktoken file (a token in base64 and its rank a line): {error}") from error


def encoding_of(path: Path) -> str:
    """The encoding that a file is by its name. Raises DataError where the name is none."""
    if path.stem not in ENCODINGS:
        raise DataError(
            f"{path} does not say how text is split before merging: put the name of its encoding in front, for "
            f"example cl100k_base:{path}; supported are {', '.join(ENCODINGS)}"
        )
    return path.stem
