"""Sentence shards with a vocabulary, for tests of BERT."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megapipe.config.bert import BertDataConfig
from tests.data.shards import write_shard

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUING = 0.3
"""Share of the pieces that continue a word."""


def write_vocabulary(folder: Path, size: int) -> Path:
    """A vocab.txt of `size` pieces: the special ones, words, and continuations at the end."""
    words = size - len(SPECIAL) - int(CONTINUING * size)
    pieces = [*SPECIAL, *(f"word{index}" for index in range(words))]
    pieces += [f"##piece{index}" for index in range(size - len(pieces))]
    path = folder / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in pieces))
    return path


def random_documents(
    generator: np.random.Generator, documents: int, vocabulary: int, sentences: int = 6, longest: int = 12
) -> list[list[list[int]]]:
    """Documents of one to `sentences` sentences of one to `longest` tokens; small ids are the more frequent ones."""
    usable = vocabulary - len(SPECIAL)

    def sentence() -> list[int]:
        length = int(generator.integers(1, longest + 1))
        return (len(SPECIAL) + (generator.beta(1, 3, size=length) * usable).astype(int)).tolist()

    return [[sentence() for _ in range(int(generator.integers(1, sentences + 1)))] for _ in range(documents)]


def write_sentences(
    folder: Path, documents: Sequence[Sequence[Sequence[int]]], vocabulary: int, **fields: object
) -> BertDataConfig:
    """A shard of these documents with its vocabulary, and the data configuration that reads it."""
    prefix = write_shard(folder / "sentences", documents)
    tokenizer = write_vocabulary(folder, vocabulary)
    return BertDataConfig(prefix=str(prefix), tokenizer=str(tokenizer), **{"split": "1", **fields})  # type: ignore[arg-type]
