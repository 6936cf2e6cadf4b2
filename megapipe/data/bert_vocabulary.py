"""What BERT samples need of a WordPiece vocabulary: its special tokens, and which pieces continue a word."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapipe.config.untrusted import DECODING_ERRORS, read_bytes, read_json
from megapipe.data.errors import DataError

VOCABULARY, TOKENIZER = "vocab.txt", "tokenizer.json"
CONTINUATION = "##"
"""What pieces begin with that do not begin a word (Wu et al. 2016, arXiv 1609.08144, as BERT writes them)."""
LARGEST_GAP = 1_000_000
"""Largest number of unused ids in a vocabulary: memory is allocated for each of them."""
_KINDS = ("bert-uncased:", "bert-cased:")
"""What may stand ahead of a path, as preprocessing takes it; samples do not care."""
_SPECIAL = {"padding": "[PAD]", "classification": "[CLS]", "separator": "[SEP]", "mask": "[MASK]"}


@dataclass(frozen=True)
class BertVocabulary:
    """Ids below `size`. padding, classification, separator, mask: of [PAD], [CLS], [SEP], [MASK].

    continues: bool [size], pieces inside of a word.
    """

    size: int
    padding: int
    classification: int
    separator: int
    mask: int
    continues: np.ndarray

    def same(self, other: "BertVocabulary") -> bool:
        """Whether two vocabularies hide the same tokens in the same way; not whether their pieces are the same."""
        ids = [(each.size, each.padding, each.classification, each.separator, each.mask) for each in (self, other)]
        return ids[0] == ids[1] and np.array_equal(self.continues, other.continues)

    @classmethod
    def of(cls, ids: dict[str, int], source: str, continuation: str = CONTINUATION) -> "BertVocabulary":
        """From every piece's id. Raises DataError, naming `source`, where a special token is missing."""
        missing = [token for token in _SPECIAL.values() if token not in ids]
        if missing:
            raise DataError(
                f"{source} has no {', '.join(missing)}; BERT samples need {', '.join(_SPECIAL.values())}: train one "
                "with megapipe preprocess train-tokenizer --type wordpiece-uncased, or use that of a published BERT"
            )
        size = max(ids.values()) + 1
        continues = np.zeros(size, dtype=bool)
        continues[[number for piece, number in ids.items() if piece.startswith(continuation)]] = True
        return cls(size, **{name: ids[token] for name, token in _SPECIAL.items()}, continues=continues)

    @classmethod
    def read(cls, path: str | Path) -> "BertVocabulary":
        """From a vocab.txt (a piece a line), a WordPiece tokenizer.json, or a folder with one of them.

        Raises DataError for anything else.
        """
        name = str(path)
        for kind in _KINDS:
            name = name.removeprefix(kind)
        file = Path(name)
        if file.is_dir():
            file = next((file / name for name in (TOKENIZER, VOCABULARY) if (file / name).is_file()), file)
        if not file.is_file():
            raise DataError(f"no vocabulary {str(path)!r}: give a {VOCABULARY}, a {TOKENIZER}, or a folder with one")
        if file.suffix == ".json":
            return cls._of_json(file)
        try:
            text = read_bytes(file, DataError).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is neither a {VOCABULARY} nor a {TOKENIZER}: it is not UTF-8 text") from error
        return cls.of({line: number for number, line in enumerate(text.splitlines())}, str(file))

    @classmethod
    def _of_json(cls, file: Path) -> "BertVocabulary":
        content = read_json(file, DataError)
        try:
            model = content["model"]
            kind, ids = model.get("type", "WordPiece"), dict(model["vocab"])
            added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
            continuation = model.get("continuing_subword_prefix", CONTINUATION)
            if not all(isinstance(text, str) for text in (continuation, *added)):
                raise ValueError("an added token or continuing_subword_prefix is not text")
            limit = 2 * (len(ids) + len(added)) + LARGEST_GAP
            if not all(type(number) is int and 0 <= number < limit for number in (ids | added).values()):
                raise ValueError(f"an id is not a whole number from 0 to {limit - 1}")
        except DECODING_ERRORS as error:
            raise DataError(f"{file} is not a {TOKENIZER} that can be read ({error!r})") from error
        if kind != "WordPiece":
            raise DataError(
                f"{file} is a {kind} tokenizer; BERT samples need a WordPiece vocabulary, which marks whole words"
            )
        return cls.of(ids | added, str(file), continuation)
