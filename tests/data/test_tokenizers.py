"""Tokenizers give the ids of the libraries they stand for, and text comes back whole."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megapipe.data.errors import DataError
from megapipe.data.tokenizers import open_tokenizer

CORPUS = ["def main(argv):\n    return 0\n", "  the loss   falls, the loss fell\n\n", "naïve café — 東京\t\x00"] * 30
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def library_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with everything switched on that must not reach a pretraining corpus."""
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|stop|>"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(max_length=5)
    tokenizer.enable_padding(length=50)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@settings(max_examples=100, deadline=None)
@given(text=any_text)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, 256]) == text
    assert all(0 <= token < 256 for token in ids)


@settings(max_examples=100, deadline=None)
@given(text=any_text)
def test_tokenizer_json_gives_the_ids_of_transformers(library_tokenizer: Path, text: str) -> None:
    tokenizer = open_tokenizer(str(library_tokenizer))
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(library_tokenizer))
    ids = tokenizer.encode(text)
    assert ids == oracle(text, add_special_tokens=False, truncation=False, padding=False).input_ids
    if "<" not in text:
        assert tokenizer.decode(ids) == text


def test_long_texts_are_neither_cut_nor_framed(library_tokenizer: Path) -> None:
    tokenizer = open_tokenizer(str(library_tokenizer))
    text = "".join(CORPUS)
    ids = tokenizer.encode(text)
    assert len(ids) > 100
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocabulary_size == LibraryTokenizer.from_file(str(library_tokenizer)).get_vocab_size()


def test_the_end_of_a_document_is_found(library_tokenizer: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(library_tokenizer.read_bytes())
    assert open_tokenizer(str(copy)).end_of_document == 1  # </s> by its name
    assert open_tokenizer(str(tmp_path), "<|stop|>").end_of_document == 2
    for token in ("<|stop|>", {"content": "<|stop|>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert open_tokenizer(str(copy)).end_of_document == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert open_tokenizer(str(copy)).end_of_document == 1
    with pytest.raises(DataError, match="no token '<nope>'"):
        open_tokenizer(str(copy), "<nope>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not readable"):
        open_tokenizer(str(copy))


def test_a_vocabulary_with_gaps_counts_to_its_largest_id(tmp_path: Path) -> None:
    LibraryTokenizer(models.WordLevel({"a": 0, "b": 900}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.vocabulary_size == 901
    assert tokenizer.end_of_document is None


def test_fingerprints_tell_tokenizers_apart(library_tokenizer: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(library_tokenizer.read_bytes())
    same = open_tokenizer(str(copy)).fingerprint()
    assert same == open_tokenizer(str(library_tokenizer)).fingerprint()
    content = json.loads(copy.read_text())
    content["added_tokens"][2]["content"] = "<|halt|>"
    copy.write_text(json.dumps(content))
    fingerprints = {same, open_tokenizer(str(copy)).fingerprint(), open_tokenizer("bytes").fingerprint()}
    assert len(fingerprints) == 3


def test_bytes_have_their_own_end() -> None:
    with pytest.raises(DataError, match="256"):
        open_tokenizer("bytes", "</s>")
