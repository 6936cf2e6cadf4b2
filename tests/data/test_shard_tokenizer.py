"""Tokenizers of shards: names of special tokens in documents, and the copy that is stored with a shard."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from megapipe.config.bert import BertDataConfig
from megapipe.data import DataError
from megapipe.data.bert_samples import BertSamples
from megapipe.data.manifest import manifest_path, store_tokenizer, tokenizer_of_shard
from megapipe.data.preprocess.command import main
from megapipe.data.shard_tools import merge, split
from megapipe.data.shards import IndexedDataset
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from tests.data.commands import manifest_of, run_command, write_json_lines
from tests.data.small_tokenizers import SIZES, make

NAME = {"wordpiece-uncased": "[SEP]", "sentencepiece-bpe": "</s>", "sentencepiece-unigram": "</s>", "bytes": "</s>"}
"""The token that ends documents, where it is not <|endoftext|>."""
KINDS = [*SIZES, "gpt2 files", "tiktoken", "bytes"]


def run(tmp_path: Path, tokenizer: str, *options: str, status: int = 0) -> str:
    """Make a shard; return the messages."""
    command = ["--input", tmp_path / "in.jsonl", "--tokenizer", tokenizer, "--append-eod", "--workers", 1]
    core = [] if "--tokenizer-core" in options else ["--tokenizer-core", "library"]
    return run_command(main, *command, *core, "--output-prefix", tmp_path / "out", *options, status=status).err


@pytest.mark.parametrize(
    ("kind", "core"),
    [*((kind, "library") for kind in KINDS), pytest.param("byte-level-bpe", "auto", marks=pytest.mark.slow)],
)
def test_documents_contain_one_end_and_their_text(kind: str, core: str, tmp_path: Path) -> None:
    spec, name = make(kind, tmp_path), NAME.get(kind, "<|endoftext|>")
    texts = [f"the fox{name}the dog", f"{name} {name}", "no names"]
    write_json_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    assert "not with the fast core" not in run(tmp_path, spec, "--tokenizer-core", core)
    shard, manifest = IndexedDataset(tmp_path / "out_text_document"), manifest_of(tmp_path / "out_text_document")
    tokenizer: Tokenizer = open_tokenizer(spec)
    for number, text in enumerate(texts):
        tokens = shard.document(number).tolist()
        assert (tokens.count(tokenizer.end_of_document), tokens[-1]) == (1, tokenizer.end_of_document)
        decoded = tokenizer.decode(tokens)
        assert "".join(decoded.split()) == "".join(text.lower().split() if "wordpiece" in kind else text.split())
    assert manifest.num_special_tokens_in_text == (0 if kind == "bytes" else 3)
    assert manifest.special_tokens_in_text == "text"
    assert manifest.vocabulary_size == tokenizer.vocabulary_size
    manifest.check_tokenizer(tokenizer.spec, tokenizer.fingerprint)


@pytest.mark.parametrize("kind", ["byte-level-bpe", "wordpiece-uncased", "tiktoken", "sentencepiece-bpe"])
def test_names_become_tokens_or_errors_when_asked(kind: str, tmp_path: Path) -> None:
    spec, name = make(kind, tmp_path), NAME.get(kind, "<|endoftext|>")
    write_json_lines(tmp_path / "in.jsonl", [{"text": "the dog"}, {"text": f"the fox{name}the dog"}])
    ask = "--special-tokens-in-text"
    if kind == "sentencepiece-bpe":
        assert "reads the names of special tokens as text" in run(tmp_path, spec, ask, "token", status=2)
    else:
        assert "note: names of special tokens occur once in the input" in run(tmp_path, spec, ask, "token")
        tokens = IndexedDataset(tmp_path / "out_text_document").document(1).tolist()
        assert tokens.count(open_tokenizer(spec).end_of_document) == 2
    assert f"in.jsonl, line 2: the text contains '{name}'" in run(tmp_path, spec, ask, "error", status=2)
    run(tmp_path, spec, ask, "error", "--on-error", "skip")
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 1


def preprocessed(folder: Path, spec: str, *options: str) -> Path:
    """Make a shard with a tokenizer, and return its prefix."""
    write_json_lines(folder / "in.jsonl", [{"text": f"the dog {number}. the fox."} for number in range(40)])
    run(folder, spec, *options, "--output-prefix", str(folder / "data/out"))
    return folder / "data/out_text_sentence" if options else folder / "data/out_text_document"


def joined_and_split(prefix: Path) -> list[Path]:
    """Join a shard with itself, and split the result in two; return the prefixes."""
    joined, half = prefix.with_name("joined"), prefix.with_name("half")
    merge([str(prefix), str(prefix)], str(joined))
    list(split(str(joined), "1,1", str(half)))
    return [joined, prefix.with_name("half_0"), prefix.with_name("half_1")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_shard_opens_its_own_tokenizer(kind: str, tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    spec = make(kind, tmp_path / "original")
    fingerprint = open_tokenizer(spec).fingerprint
    prefix = preprocessed(tmp_path, spec)
    shutil.rmtree(tmp_path / "original")
    moved = (tmp_path / "data").rename(tmp_path / "elsewhere") / prefix.name
    for each in (moved, *joined_and_split(moved)):
        assert open_tokenizer(tokenizer_of_shard(each, manifest_of(each))).fingerprint == fingerprint


def test_a_bert_shard_opens_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("wordpiece-uncased", tmp_path)
    monkeypatch.chdir(tmp_path)
    prefix = preprocessed(tmp_path, "t.json", "--split-sentences")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    data = BertDataConfig(prefix=str(prefix), sequence_length=16, pairs="none", split="1")
    samples = BertSamples(data, split="train", seed=0, vocabulary_size=160)
    assert samples.vocabulary.size == SIZES["wordpiece-uncased"]


def test_changed_copies_are_refused_and_removed_ones_ignored(tmp_path: Path) -> None:
    spec = str(Path(make("byte-level-bpe", tmp_path)).rename(tmp_path / "a:t.json"))
    prefix = preprocessed(tmp_path, spec)
    manifest = manifest_of(prefix)
    copy = Path(tokenizer_of_shard(prefix, manifest))
    assert copy.parent == Path(f"{prefix}.tokenizer")
    copy.write_text(copy.read_text() + "\n")
    message = r"a:t\.json was changed since it was written: copy .*out_text_document\.tokenizer"
    with pytest.raises(DataError, match=message):
        tokenizer_of_shard(prefix, manifest)
    shutil.rmtree(copy.parent)
    assert tokenizer_of_shard(prefix, manifest) == spec
    Path(spec).unlink()
    for each in joined_and_split(prefix):
        stored = manifest_of(each)
        assert stored.tokenizer_copy is None
        assert tokenizer_of_shard(each, stored) == spec
    # Older manifests have no entries for a copy.
    document = json.loads(manifest_path(prefix).read_text("utf-8"))
    for name in ("tokenizer_copy", "tokenizer_files", "special_tokens_in_text", "num_special_tokens_in_text"):
        del document[name]
    manifest_path(prefix).write_text(json.dumps(document))
    assert tokenizer_of_shard(prefix, manifest_of(prefix)) == spec


def test_a_copy_stored_over_itself_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = preprocessed(tmp_path, make("byte-level-bpe", tmp_path))
    stored = tokenizer_of_shard(prefix, manifest_of(prefix))
    folder = Path(stored).parent
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "left over").touch()
    with monkeypatch.context() as patch:
        patch.setattr("megapipe.data.manifest.write_whole", Mock(side_effect=OSError))
        with pytest.raises(OSError):
            store_tokenizer(prefix, stored)
    assert before.items() <= {file.name: file.read_bytes() for file in folder.iterdir()}.items()
    store_tokenizer(prefix, stored)
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}
