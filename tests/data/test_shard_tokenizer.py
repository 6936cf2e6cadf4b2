"""Tokenizers of shards: names of special tokens in documents, and the copy that is stored with a shard."""

import base64
import json
import shutil
import string
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from megapipe.config.bert import BertDataConfig
from megapipe.conversion.tokenizer_files import LETTERS
from megapipe.data import DataError
from megapipe.data.bert_samples import BertSamples
from megapipe.data.manifest import manifest_path, read_manifest, store_tokenizer, tokenizer_of_shard
from megapipe.data.preprocess.command import main
from megapipe.data.shard_tools import merge, split
from megapipe.data.shards import IndexedDataset
from megapipe.data.tokenizers import TRAINERS, Tokenizer, open_tokenizer
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
    """Make a small tokenizer of a kind; return its name for --tokenizer."""
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
def test_documents_contain_one_end_and_their_text(
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
        decoded = tokenizer.decode(tokens)
        assert "".join(decoded.split()) == "".join(text.lower().split() if "wordpiece" in kind else text.split())
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


def preprocessed(folder: Path, spec: str, *options: str) -> Path:
    """Make a shard with a tokenizer, and return its prefix."""
    write_json_lines(folder / "in.jsonl", [{"text": f"the dog {number}. the fox."} for number in range(40)])
    command = [f"--input={folder / 'in.jsonl'}", f"--tokenizer={spec}", "--workers=1", "--tokenizer-core=library"]
    assert main([*command, *options, "--output-prefix", str(folder / "data/out")]) == 0
    return folder / "data/out_text_sentence" if options else folder / "data/out_text_document"


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_shard_opens_its_own_tokenizer(kind: str, tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    spec = make(kind, tmp_path / "original")
    fingerprint = open_tokenizer(spec).fingerprint
    prefix = preprocessed(tmp_path, spec)
    shutil.rmtree(tmp_path / "original")
    moved = (tmp_path / "data").rename(tmp_path / "elsewhere") / prefix.name
    joined = str(tmp_path / "joined")
    merge([str(moved), str(moved)], joined)
    list(split(joined, "1,1", str(tmp_path / "half")))
    for each in (moved, joined, tmp_path / "half_0", tmp_path / "half_1"):
        manifest = read_manifest(each)
        assert manifest is not None
        assert open_tokenizer(tokenizer_of_shard(each, manifest)).fingerprint == fingerprint


def test_a_bert_shard_opens_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("wordpiece-uncased", tmp_path)
    monkeypatch.chdir(tmp_path)
    prefix = preprocessed(tmp_path, "t.json", "--split-sentences")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    data = BertDataConfig(prefix=str(prefix), sequence_length=16, pairs="none", split="1")
    samples = BertSamples(data, split="train", seed=0, vocabulary_size=160)
    assert samples.vocabulary.size == 150


def test_changed_copies_are_refused_and_removed_ones_ignored(tmp_path: Path) -> None:
    spec = str(Path(make("byte-level-bpe", tmp_path)).rename(tmp_path / "a:t.json"))
    prefix = preprocessed(tmp_path, spec)
    manifest = read_manifest(prefix)
    assert manifest is not None
    copy = Path(tokenizer_of_shard(prefix, manifest))
    assert copy.parent == Path(f"{prefix}.tokenizer")
    copy.write_text(copy.read_text() + "\n")
    with pytest.raises(
        DataError, match=r"a:t\.json was changed since it was written: copy .*out_text_document\.tokenizer"
    ):
        tokenizer_of_shard(prefix, manifest)
    shutil.rmtree(copy.parent)
    assert tokenizer_of_shard(prefix, manifest) == spec
    Path(spec).unlink()
    joined = str(tmp_path / "joined")
    merge([str(prefix), str(prefix)], joined)
    list(split(joined, "1,1", str(tmp_path / "half")))
    for each in (joined, tmp_path / "half_0"):
        stored = read_manifest(each)
        assert stored is not None
        assert stored.tokenizer_copy is None
        assert tokenizer_of_shard(each, stored) == spec
    # Older manifests have no entries for a copy.
    document = json.loads(manifest_path(prefix).read_text("utf-8"))
    new = ("tokenizer_copy", "tokenizer_files", "special_tokens_in_text", "num_special_tokens_in_text")
    old = {name: value for name, value in document.items() if name not in new}
    manifest_path(prefix).write_text(json.dumps(old))
    stored = read_manifest(prefix)
    assert stored is not None
    assert tokenizer_of_shard(prefix, stored) == spec


def test_a_copy_stored_over_itself_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = preprocessed(tmp_path, make("byte-level-bpe", tmp_path))
    manifest = read_manifest(prefix)
    assert manifest is not None
    stored = tokenizer_of_shard(prefix, manifest)
    before = {file.name: file.read_bytes() for file in Path(stored).parent.iterdir()}
    (Path(stored).parent / "left over").touch()
    for crashes in (True, False):
        with monkeypatch.context() as patch:
            if crashes:
                patch.setattr("megapipe.data.manifest.write_whole", Mock(side_effect=OSError))
            with pytest.raises(OSError) if crashes else nullcontext():
                store_tokenizer(prefix, stored)
        assert before.items() <= {file.name: file.read_bytes() for file in Path(stored).parent.iterdir()}.items()
    assert sorted(before) == sorted(file.name for file in Path(stored).parent.iterdir())
