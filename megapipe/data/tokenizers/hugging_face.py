"""Tokenizers of the Hugging Face library: tokenizer.json, and GPT-2's vocab.json with merges.txt."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.data.errors import DataError
from megapipe.data.tokenizers.protocol import fingerprint_of_files

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofdoc|>")
"""Tokens taken for the end of a document, in this order, where nothing names one."""


class HuggingFaceTokenizer:
    """A tokenizer of the tokenizers library. Its template (beginning and end tokens), truncation and padding are not
    applied."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", spec: str, fingerprint: str, end: str | None) -> None:
        """`end` names the token that ends documents; None takes the first of END_OF_DOCUMENT_NAMES, if any.

        Raises DataError for a name that the vocabulary does not have.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self.spec = spec
        # Not the number of entries: ids may have gaps.
        self.vocabulary_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_of_document = self._find_end(end)

    def encode(self, text: str) -> list[int]:
        # The batch call leaves out character offsets, which cost a third of the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        kept = [int(token) for token in ids if token != self.end_of_document]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
        return text

    def fingerprint(self) -> str:
        return self._fingerprint

    def _find_end(self, name: str | None) -> int | None:
        candidates = [name] if name is not None else END_OF_DOCUMENT_NAMES
        found: list[int] = [
            token for candidate in candidates if (token := self._tokenizer.token_to_id(candidate)) is not None
        ]
        if name is not None and not found:
            raise DataError(f"{self.spec} has no token {name!r} to end documents with; name one that it has")
        return found[0] if found else None


def open_tokenizer_json(path: Path, end: str | None) -> HuggingFaceTokenizer:
    """Reads a tokenizer.json. The end of a document is `end`, else the eos_token of a tokenizer_config.json beside it.

    Raises DataError for a file that the library cannot read.
    """
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer.json that can be read: {error}") from error
    end = end if end is not None else _eos_token(path.with_name("tokenizer_config.json"))
    return HuggingFaceTokenizer(tokenizer, str(path), fingerprint_of_files(path), end)


def open_gpt2_files(vocabulary: Path, merges: Path, end: str | None) -> HuggingFaceTokenizer:
    """Byte-level BPE from the two files that GPT-2 was published with.

    Raises DataError for files that do not fit each other.
    """
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{vocabulary} and {merges} are not a vocabulary and its merges: {error}") from error
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # The end is an ordinary entry of vocab.json; without this, its name in a text would be taken apart.
    tokenizer.add_special_tokens([name for name in END_OF_DOCUMENT_NAMES if tokenizer.token_to_id(name) is not None])
    return HuggingFaceTokenizer(tokenizer, str(vocabulary), fingerprint_of_files(vocabulary, merges), end)


def _eos_token(config: Path) -> str | None:
    """The eos_token of a tokenizer_config.json, which writes it as a string or as an object."""
    if not config.is_file():
        return None
    try:
        token = json.loads(config.read_text("utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{config} is not readable JSON: {error}; repair or remove it") from error
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
