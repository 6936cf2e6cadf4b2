"""Exported tokenizers: transformers gives the ids that the model was trained on, or none is written."""

import base64
import json
import string
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.checkpoint import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.tiktoken_file import LETTERS
from megapipe.conversion.tokenizer_files import exported_tokenizer
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.data.tokenizers.tiktoken_files import ENCODINGS
from megapipe.data.tokenizers.training import TRAINERS

CORPUS = [
    "def add(one, other):\n    return one + other\n\n\nclass Sum:\n\tpass  # tabs\n",
    "The quick brown fox jumps over the lazy dog; 0123456789 times. Grüße, naïve café, 東京.\n",
    string.printable,
] * 8
SIZES = {"sentencepiece-bpe": 420, "sentencepiece-unigram": 370, "byte-level-bpe": 300, "wordpiece-uncased": 160}


@pytest.fixture(scope="module", params=[*SIZES, "bytes"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, transformers.PreTrainedTokenizerBase]:
    """Ours, and what transformers loads of its export."""
    folder = tmp_path_factory.mktemp("tokenizer")
    spec = "bytes"
    if request.param != "bytes":
        suffix, train = TRAINERS[request.param]
        spec = str(folder / f"ours{suffix}")
        first = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if "wordpiece" in request.param else ()
        Path(spec).write_bytes(train(CORPUS, SIZES[request.param], first))
    model = BertModelConfig(vocabulary_size=512) if "wordpiece" in request.param else ModelConfig(vocabulary_size=512)
    found = exported_tokenizer(spec, model)
    assert not found.note
    for name, content in found.files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **found.ids}))
    return open_tokenizer(spec), transformers.AutoTokenizer.from_pretrained(folder)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁\0"), max_size=60))
def test_the_same_ids_for_any_text(pair: tuple[Tokenizer, transformers.PreTrainedTokenizerBase], text: str) -> None:
    ours, theirs = pair
    assume(not any(name in text for name in theirs.all_special_tokens))
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)


def test_the_same_text_for_ids(pair: tuple[Tokenizer, transformers.PreTrainedTokenizerBase]) -> None:
    ours, theirs = pair
    for text in CORPUS[:3]:
        ids = ours.encode(text)
        assert theirs.decode(ids) == ours.decode(ids)


def test_special_tokens_are_named(pair: tuple[Tokenizer, transformers.PreTrainedTokenizerBase]) -> None:
    ours, theirs = pair
    if theirs.mask_token is not None:
        assert theirs("the dog", "a fox").input_ids == [
            theirs.cls_token_id,
            *ours.encode("the dog"),
            theirs.sep_token_id,
            *ours.encode("a fox"),
            theirs.sep_token_id,
        ]
    else:
        assert theirs.eos_token_id == ours.end_of_document


@pytest.mark.parametrize("kind", ["byte-level-bpe", "wordpiece-uncased"])
def test_files_of_older_kinds(kind: str, tmp_path: Path) -> None:
    """GPT-2's vocab.json with merges.txt, and BERT's vocab.txt."""
    _, train = TRAINERS[kind]
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if kind == "wordpiece-uncased" else ()
    model = tokenizers.Tokenizer.from_str(train(CORPUS, SIZES[kind], special).decode()).model
    model.save(str(tmp_path))
    spec = f"bert-uncased:{tmp_path / 'vocab.txt'}" if special else str(tmp_path / "vocab.json")
    config = BertModelConfig(vocabulary_size=512) if special else ModelConfig(vocabulary_size=512)
    found = exported_tokenizer(spec, config)
    assert not found.note
    for name, content in found.files.items():
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_bytes(content)
    ours, theirs = open_tokenizer(spec), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in CORPUS[:3]:
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)


@pytest.fixture(scope="module")
def tiktoken_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """Encoding -> ours and the export, of one small vocabulary."""
    vocabulary = json.loads(TRAINERS["byte-level-bpe"][1](CORPUS, 400, ()))["model"]["vocab"]
    bytes_of = {letter: byte for byte, letter in LETTERS.items()}
    names = sorted((name for name in vocabulary if name != "<|endoftext|>"), key=vocabulary.__getitem__)
    tokens = [bytes(bytes_of[letter] for letter in name) for name in names]
    path = tmp_path_factory.mktemp("tiktoken") / "any.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    found = {}
    for encoding in ENCODINGS:
        spec = f"{encoding}:{path}"
        exported = exported_tokenizer(spec, ModelConfig(vocabulary_size=200_100))
        assert not exported.note
        theirs = tokenizers.Tokenizer.from_str(exported.files["tokenizer.json"].decode())
        found[encoding] = open_tokenizer(spec), theirs
    return found


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("aesSLVTd' 1234\n\r\t.,!é東ſ\u00a0") | st.characters(codec="utf-8"), max_size=40))
def test_tiktoken_files(tiktoken_pair: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]], text: str) -> None:
    assume("<|" not in text)  # names of special tokens, which are text to ours
    for encoding, (ours, theirs) in tiktoken_pair.items():
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == ours.encode(text), encoding
        assert theirs.decode(ids) == text
        assert theirs.token_to_id("<|endoftext|>") == ours.end_of_document


def test_a_folder_of_hugging_face_is_copied_file_by_file(tmp_path: Path) -> None:
    _, train = TRAINERS["byte-level-bpe"]
    content = train(CORPUS, 300, ())
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    (tmp_path / "config.json").write_text('{"bos_token_id": 5, "eos_token_id": 4000, "pad_token_id": "x"}')
    found = exported_tokenizer(str(tmp_path), ModelConfig(vocabulary_size=300))
    assert found.files == {"tokenizer.json": content, "tokenizer_config.json": b'{"model_max_length": 77}'}
    assert found.ids["bos_token_id"] == 5
    assert found.ids["eos_token_id"] != 4000  # the model has no such row
    assert found.ids["pad_token_id"] is None


def test_more_ids_than_the_model_has_rows_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has 257 ids but the model knows 256"):
        exported_tokenizer("bytes", ModelConfig(vocabulary_size=256))


def test_none_is_written_where_nothing_names_it_or_it_is_gone(tmp_path: Path) -> None:
    assert "--tokenizer" in exported_tokenizer(None, ModelConfig()).note
    gone = exported_tokenizer(str(tmp_path / "gone.model"), ModelConfig())
    assert not gone.files
    assert "gone.model" in gone.note
