"""Tokenizers of the Hugging Face library: tokenizer.json, GPT-2's vocab.json with merges.txt, BERT's vocab.txt."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megapipe.config.untrusted import read_json
from megapipe.data.errors import DataError
from megapipe.data.tokenizers.protocol import fingerprint_of_files

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofdoc|>", "[SEP]")
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
        self.special_tokens: dict[str, int] = {
            token.content: number
            for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
            if token.special
        }
        self.fast_core: Callable[[str], np.ndarray] | None = None
        """Gives the ids of `encode`, faster; see fast_core.py."""

    def read_special_tokens(self, as_tokens: bool) -> None:
        self._tokenizer.encode_special_tokens = not as_tokens

    def encode(self, text: str) -> list[int]:
        # The batch call leaves out character offsets, which cost a third of the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        if self.fast_core is not None:
            return self.fast_core(text)
        return np.array(self.encode(text), dtype=np.int64)

    def definition(self) -> str:
        """Return the tokenizer.json without unused parts, and without special tokens if their names are text."""
        content = json.loads(self._tokenizer.to_str())
        if self._tokenizer.encode_special_tokens:
            content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
        return json.dumps({**content, "post_processor": None, "truncation": None, "padding": None})

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
    """Reads a tokenizer.json. The end of a document is `end`, else the eos_token of the tokenizer_config.json
    in its folder.

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


BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def open_bert_vocabulary(path: Path, spec: str, lowercase: bool | None, end: str | None) -> HuggingFaceTokenizer:
    """WordPiece from the vocab.txt that BERT was published with, one token a line.

    `lowercase` also strips accents; None takes do_lower_case from a tokenizer_config.json in its folder. Raises
    DataError when that does not say, and for a vocabulary without one of BERT_SPECIAL_TOKENS.
    """
    import tokenizers

    told = _configuration(path.with_name("tokenizer_config.json")).get("do_lower_case")
    lowercase = told if lowercase is None and isinstance(told, bool) else lowercase
    if lowercase is None:
        raise DataError(
            f"{path} does not say whether its text is lower case; give it as bert-uncased:{path} or bert-cased:{path}"
        )
    try:
        vocabulary = tokenizers.models.WordPiece.read_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a vocabulary of one token a line: {error}") from error
    if missing := [name for name in BERT_SPECIAL_TOKENS if name not in vocabulary]:
        raise DataError(f"{path} has no token {missing[0]}; a BERT vocabulary has {', '.join(BERT_SPECIAL_TOKENS)}")
    tokenizer = word_piece(vocabulary, BERT_SPECIAL_TOKENS, lowercase)
    fingerprint = fingerprint_of_files(path, extra=f"lowercase {lowercase}")
    return HuggingFaceTokenizer(tokenizer, spec, fingerprint, end)


def word_piece(vocabulary: dict[str, int], special_tokens: Sequence[str], lowercase: bool) -> "tokenizers.Tokenizer":
    """BERT's way from text to tokens. `special_tokens` are in the vocabulary."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def _eos_token(config: Path) -> str | None:
    """The eos_token of a tokenizer_config.json, which writes it as a string or as an object."""
    token = _configuration(config).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _configuration(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    content = read_json(path, DataError)
    if not isinstance(content, dict):
        raise DataError(f"{path} does not contain a JSON object; repair or remove it")
    return content
