"""Small tokenizers of every kind that --tokenizer names, trained in a moment."""

import base64
import json
import string
from pathlib import Path

from megapipe.conversion.tokenizer_files import LETTERS
from megapipe.data.tokenizers import TRAINERS

CORPUS = [
    "def add(one, other):\n    return one + other\n\n\nclass Sum:\n\tpass  # tabs\n",
    "The <quick> brown fox| jumps [over] </the> lazy dog, end of text. 0123456789 Grüße, naïve café, 東京.\n",
    string.printable,
] * 8
SIZES = {"sentencepiece-bpe": 420, "sentencepiece-unigram": 370, "byte-level-bpe": 300, "wordpiece-uncased": 160}


def train(kind: str, first: tuple[str, ...] = ()) -> bytes:
    """Return the file of a trained tokenizer. first: special tokens with the lowest ids."""
    return TRAINERS[kind][1](CORPUS, SIZES[kind], first)


def write_tiktoken(path: Path, vocabulary: dict[str, int]) -> dict[bytes, int]:
    """Write the tokens of a byte-level BPE, except the end of documents; return their ranks."""
    byte_of = {letter: byte for byte, letter in LETTERS.items()}
    names = sorted(vocabulary.keys() - {"<|endoftext|>"}, key=vocabulary.__getitem__)
    ranks = {bytes(byte_of[letter] for letter in name): rank for rank, name in enumerate(names)}
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()))
    return ranks


def make(kind: str, folder: Path, first: tuple[str, ...] = ()) -> str:
    """Make a small tokenizer of a kind; return its name for --tokenizer."""
    if kind == "bytes":
        return "bytes"
    if kind in SIZES:
        path = folder / f"t{TRAINERS[kind][0]}"
        path.write_bytes(train(kind, first))
        return str(path)
    model = json.loads(train("byte-level-bpe"))["model"]
    if kind == "gpt2 files":
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])))
        return str(folder / "vocab.json")
    write_tiktoken(folder / "t.tiktoken", model["vocab"])
    return f"cl100k_base:{folder / 't.tiktoken'}"
