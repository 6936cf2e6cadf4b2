"""Names of special tokens in documents: text unless asked otherwise, for every kind of tokenizer."""

import base64
import json
import string
from pathlib import Path

import pytest

from megapipe.conversion.tiktoken_file import LETTERS
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.manifest import read_manifest
from megapipe.data.preprocess.command import main
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.data.tokenizers.training import TRAINERS
from tests.data.preprocess_runs import write_json_lines

CORPUS = [
    "The <quick> brown fox| jumps [over] </the> lazy dog, end of text. ",
    "def add(one, other):\n    return one + other\n\n\nclass Sum:\n\tpass  # tabs\n",
    string.printable,
] * 8
SIZES = {"sentencepiece-bpe": 400, "sentencepiece-unigram": 365, "byte-level-bpe": 300, "wordpiece-uncased": 150}
NAME = {"wordpiece-uncased": "[SEP]", "sentencepiece-bpe": "</s>", "sentencepiece-unigram": "</s>", "bytes": "</s>"}
"""The token that ends documents, where it is not <|endoftext|>."""
KINDS = [*SIZES, "gpt2 files", "tiktoken", "bytes"]


def make(kind: str, folder: Path) -> str:
    """A small tokenizer of a kind, by its name for --tokenizer."""
    if kind == "bytes":
        return "bytes"
    if kind not in SIZES:
        model = json.loads(TRAINERS["byte-level-bpe"][1](CORPUS, 300, ()))["model"]
        if kind == "gpt2 files":
            (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
            (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])))
            return str(folder / "vocab.json")
        bytes_of = {letter: byte for byte, letter in LETTERS.items()}
        names = sorted((each for each in model["vocab"] if each != "<|endoftext|>"), key=model["vocab"].__getitem__)
        lines = [base64.b64encode(bytes(bytes_of[letter] for letter in name)) for name in names]
        (folder / "t.tiktoken").write_bytes(b"".join(b"%s %d\n" % (line, rank) for rank, line in enumerate(lines)))
        return f"cl100k_base:{folder / 't.tiktoken'}"
    suffix, train = TRAINERS[kind]
    path = folder / f"t{suffix}"
    path.write_bytes(train(CORPUS, SIZES[kind], ()))
    return str(path)


def run(tmp_path: Path, tokenizer: str, *options: str) -> int:
    command = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer", tokenizer, "--append-eod", "--workers", "1"]
    core = [] if "--tokenizer-core" in options else ["--tokenizer-core", "library"]
    return main([*command, *core, "--output-prefix", str(tmp_path / "out"), *options])


@pytest.mark.parametrize(
    ("kind", "core"),
    [*((kind, "library") for kind in KINDS), pytest.param("byte-level-bpe", "auto", marks=pytest.mark.slow)],
)
def test_documents_hold_one_end_and_their_text(
    kind: str, core: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, name = make(kind, tmp_path), NAME.get(kind, "<|endoftext|>")
    texts = [f"the fox{name}the dog", f"{name} {name}", "no names"]
    write_json_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    assert run(tmp_path, spec, "--tokenizer-core", core) == 0
    assert "not with the fast core" not in capsys.readouterr().err
    shard, manifest = IndexedDataset(tmp_path / "out_text_document"), read_manifest(tmp_path / "out_text_document")
    assert manifest is not None
    tokenizer: Tokenizer = open_tokenizer(spec)
    for number, text in enumerate(texts):
        tokens = shard.document(number).tolist()
        assert tokens.count(tokenizer.end_of_document) == 1
        found = tokenizer.decode(tokens)
        assert "".join(found.split()) == "".join(text.lower().split() if "wordpiece" in kind else text.split())
    assert manifest.num_special_tokens_in_text == (0 if kind == "bytes" else 3)
    assert manifest.special_tokens_in_text == "text"


@pytest.mark.parametrize("kind", ["byte-level-bpe", "wordpiece-uncased", "tiktoken", "sentencepiece-bpe"])
def test_names_become_tokens_or_errors_when_asked(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, name = make(kind, tmp_path), NAME.get(kind, "<|endoftext|>")
    write_json_lines(tmp_path / "in.jsonl", [{"text": "the dog"}, {"text": f"the fox{name}the dog"}])
    if kind == "sentencepiece-bpe":
        assert run(tmp_path, spec, "--special-tokens-in-text", "token") == 2
        assert "reads the names of special tokens as text" in capsys.readouterr().err
    else:
        assert run(tmp_path, spec, "--special-tokens-in-text", "token") == 0
        tokens = IndexedDataset(tmp_path / "out_text_document").document(1).tolist()
        assert tokens.count(open_tokenizer(spec).end_of_document) == 2
        assert "note: names of special tokens occur 1 times" in capsys.readouterr().err
    assert run(tmp_path, spec, "--special-tokens-in-text", "error") == 2
    assert f"in.jsonl, line 2: the text contains '{name}'" in capsys.readouterr().err
    assert run(tmp_path, spec, "--special-tokens-in-text", "error", "--on-error", "skip") == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 1
