"""A faster way to the same ids for byte-level BPE: gigatoken, tried against the tokenizers library before its use."""

import json
import os
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import numpy as np

from megapipe.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megapipe.data.tokenizers.protocol import Tokenizer

CHECKED_BYTES = 1_000_000
"""Of the input's own texts; the library needs about 0.3 s for them."""
_RENEWED_AFTER = 64_000_000
"""Bytes of text after which the core starts afresh, because it remembers every word that it has met."""
_CHARACTERS_AT_ONCE = 500


class FastCore:
    """Ids of a text by gigatoken, in memory that does not grow with the corpus."""

    def __init__(self, definition: str) -> None:
        """`definition`: content of a tokenizer.json. Raises what the library raises for one that it does not know."""
        self._definition = definition.encode()
        self._left = 0
        self._core: Any = None
        self._renew()

    def __call__(self, text: str) -> np.ndarray:
        if self._left <= 0:
            self._renew()
        self._left -= len(text)
        ids: np.ndarray = self._core.encode(text)
        return ids

    def _renew(self) -> None:
        # One thread: the workers are the parallelism.
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        import gigatoken

        self._core = None  # what it remembers goes before the next one comes
        self._core = gigatoken.Tokenizer.from_json(self._definition).backend
        self._left = _RENEWED_AFTER


def use_fast_core(tokenizer: Tokenizer) -> None:
    """Lets `encode_array` use the fast core, which `why_no_fast_core` had nothing against."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.fast_core = FastCore(tokenizer.definition())


def why_no_fast_core(tokenizer: HuggingFaceTokenizer, texts: Iterable[str]) -> str | None:
    """The reason not to use the fast core; None when it gives the library's ids.

    Tried are every character of Unicode that stands alone in word splitting (ideographs and Hangul by examples), the
    special tokens inside text, and about CHECKED_BYTES of `texts`.
    """
    try:
        core = FastCore(tokenizer.definition())
    except Exception as error:  # the library raises what it finds
        return f"it does not know this tokenizer ({error})"
    for text in (*_tricky_texts(tokenizer), *_limited(texts)):
        if core(text).tolist() != tokenizer.encode(text):
            return f"its ids differ from those of the tokenizers library for {_shortened(text)}"
    return None


def is_byte_level_bpe(tokenizer: Tokenizer) -> TypeGuard[HuggingFaceTokenizer]:
    """Whether a tokenizer is a byte-level BPE of the tokenizers library, the only kind that the fast core encodes."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    content = json.loads(tokenizer.definition())
    return content["model"]["type"] == "BPE" and '"ByteLevel"' in json.dumps(content["pre_tokenizer"])


def _tricky_texts(tokenizer: HuggingFaceTokenizer) -> Iterator[str]:
    for name in tokenizer.special_tokens:
        yield f"before{name}after {name} {name}\n{name}{name}"
    for space in (" ", "\n", "\t", "\r\n", "\u00a0", " \n "):
        yield f"x{space * 1000}y{space * 7}"
    yield from ("", "\x00", "it's I'M we'Ll don't 'tis 1234567 a1b2", "x" * 10_000)
    characters = [chr(code) for code in (*range(0x32400), *range(0xE0000, 0xE0200)) if _is_tried(code)]
    for start in range(0, len(characters), _CHARACTERS_AT_ONCE):
        chunk = characters[start : start + _CHARACTERS_AT_ONCE]
        yield "".join(f"a{character}1 {character}{character}\n{character}b" for character in chunk)


def _is_tried(code: int) -> bool:
    category = unicodedata.category(chr(code))
    many = 0x3400 <= code < 0xD7A4 or 0x17000 <= code < 0x18D00 or 0x20000 <= code < 0x32400
    return category not in ("Cn", "Co", "Cs") and (not many or code % 97 == 0)


def _limited(texts: Iterable[str]) -> Iterator[str]:
    left = CHECKED_BYTES
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
