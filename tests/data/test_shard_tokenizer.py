"""The tokenizer that is kept with a shard: it opens from any folder, after a move, and without the original."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from megapipe.config.bert import BertDataConfig
from megapipe.data import shard_tokenizer
from megapipe.data.bert_samples import BertSamples
from megapipe.data.errors import DataError
from megapipe.data.manifest import manifest_path, read_manifest
from megapipe.data.preprocess.command import main
from megapipe.data.shard_tokenizer import store_tokenizer, tokenizer_of_shard
from megapipe.data.shard_tools import merge, split
from megapipe.data.tokenizers import open_tokenizer
from tests.data.preprocess_runs import write_json_lines
from tests.data.test_special_tokens_in_text import KINDS, make


def preprocessed(folder: Path, spec: str, *options: str) -> Path:
    """The prefix of a shard made with a tokenizer."""
    write_json_lines(folder / "in.jsonl", [{"text": f"the dog {number}. the fox."} for number in range(40)])
    command = [
        "--input",
        str(folder / "in.jsonl"),
        "--tokenizer",
        spec,
        "--workers",
        "1",
        "--tokenizer-core",
        "library",
    ]
    assert main([*command, *options, "--output-prefix", str(folder / "data/out")]) == 0
    return folder / "data/out_text_sentence" if options else folder / "data/out_text_document"


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_shard_opens_its_own_tokenizer(kind: str, tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    spec = make(kind, tmp_path / "original")
    fingerprint = open_tokenizer(spec).fingerprint()
    prefix = preprocessed(tmp_path, spec)
    shutil.rmtree(tmp_path / "original")
    moved = (tmp_path / "data").rename(tmp_path / "elsewhere") / prefix.name
    joined = str(tmp_path / "joined")
    merge([str(moved), str(moved)], joined)
    list(split(joined, "1,1", str(tmp_path / "half")))
    for each in (moved, joined, tmp_path / "half_0", tmp_path / "half_1"):
        manifest = read_manifest(each)
        assert manifest is not None
        assert open_tokenizer(tokenizer_of_shard(each, manifest)).fingerprint() == fingerprint


def test_a_bert_shard_opens_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest has the path as it was typed, seen from where preprocessing ran."""
    make("wordpiece-uncased", tmp_path)
    monkeypatch.chdir(tmp_path)
    prefix = preprocessed(tmp_path, "t.json", "--split-sentences")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    data = BertDataConfig(prefix=str(prefix), sequence_length=16, pairs="none", split="1")
    samples = BertSamples(data, split="train", seed=0, vocabulary_size=160)
    assert samples.vocabulary.size == 150


def test_a_changed_copy_is_refused_and_a_removed_one_is_not_needed(tmp_path: Path) -> None:
    spec = make("byte-level-bpe", tmp_path)
    prefix = preprocessed(tmp_path, spec)
    manifest = read_manifest(prefix)
    assert manifest is not None
    copy = Path(tokenizer_of_shard(prefix, manifest))
    assert copy.parent == Path(f"{prefix}.tokenizer")
    copy.write_text(copy.read_text() + "\n")
    with pytest.raises(
        DataError, match=r"t\.json was changed since it was written: copy .*out_text_document\.tokenizer"
    ):
        tokenizer_of_shard(prefix, manifest)
    shutil.rmtree(copy.parent)
    assert tokenizer_of_shard(prefix, manifest) == spec


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
                patch.setattr(shard_tokenizer, "write_whole", Mock(side_effect=OSError))
            with pytest.raises(OSError) if crashes else nullcontext():
                store_tokenizer(prefix, stored)
        assert before.items() <= {file.name: file.read_bytes() for file in Path(stored).parent.iterdir()}.items()
    assert sorted(before) == sorted(file.name for file in Path(stored).parent.iterdir())


def test_shards_whose_copy_was_removed_can_be_merged_and_split(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    spec = make("byte-level-bpe", tmp_path / "original")
    prefix = preprocessed(tmp_path, spec)
    shutil.rmtree(tmp_path / "original")
    shutil.rmtree(f"{prefix}.tokenizer")
    joined = str(tmp_path / "joined")
    merge([str(prefix), str(prefix)], joined)
    list(split(joined, "1,1", str(tmp_path / "half")))
    for each in (joined, tmp_path / "half_0"):
        manifest = read_manifest(each)
        assert manifest is not None
        assert manifest.tokenizer_copy is None
        assert tokenizer_of_shard(each, manifest) == spec


def test_a_tokenizer_with_a_colon_in_its_name_opens(tmp_path: Path) -> None:
    spec = Path(make("byte-level-bpe", tmp_path)).rename(tmp_path / "a:b.json")
    prefix = preprocessed(tmp_path, str(spec))
    manifest = read_manifest(prefix)
    assert manifest is not None
    assert open_tokenizer(tokenizer_of_shard(prefix, manifest)).vocabulary_size


def test_a_manifest_without_a_copy_names_the_path_as_typed(tmp_path: Path) -> None:
    prefix = preprocessed(tmp_path, make("byte-level-bpe", tmp_path))
    content = manifest_path(prefix).read_text("utf-8").splitlines(keepends=True)
    new = ("tokenizer_copy", "tokenizer_files", 't.json": "xxh', "special_tokens_in_text")
    kept = [line for line in content if not any(name in line for name in new)]
    text = "".join(kept).replace('  },\n  "bin_checksum"', '  "bin_checksum"')
    manifest_path(prefix).write_text(text)
    manifest = read_manifest(prefix)
    assert manifest is not None
    assert tokenizer_of_shard(prefix, manifest) == str(tmp_path / "t.json")
