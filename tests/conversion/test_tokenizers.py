"""Exported tokenizers: transformers gives the ids of training, or no tokenizer is written."""

import io
import json
import shutil
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.checkpoint import CheckpointError
from megapipe.checkpoint.manifest import TOKENIZER
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.tokenizer_files import ExportedTokenizer, exported_tokenizer
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.data.tokenizers.model_files import ENCODINGS, SentencePieceTokenizer
from megapipe.inference.trained_model import read_trained
from tests.conversion.test_command import convert
from tests.data.small_tokenizers import CORPUS, SIZES, make, train, write_tiktoken

TEXTS = st.text(st.sampled_from("   \n\t▁ae01") | st.characters(codec="utf-8", exclude_characters="\0"), max_size=60)
LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}
BERT_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GPT, BERT = ModelConfig(vocabulary_size=512), BertModelConfig(vocabulary_size=512)
Pair = tuple[Tokenizer, transformers.PreTrainedTokenizerBase]
"""Our tokenizer, and the one that transformers loads from its export."""


@pytest.fixture(scope="module", params=[*SIZES, "bytes"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder, is_bert = tmp_path_factory.mktemp("tokenizer"), "wordpiece" in request.param
    spec = make(request.param, folder, BERT_WORDS if is_bert else ())
    exported = exported_tokenizer(spec, BERT if is_bert else GPT)
    assert bool(exported.note) == ("unigram" in request.param)
    return open_tokenizer(spec), loaded(exported, folder / "out")


def loaded(exported: ExportedTokenizer, folder: Path) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer that transformers loads from exported files."""
    folder.mkdir()
    for name, content in exported.files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **exported.ids}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def same(ours: Tokenizer, ids: list[int], text: str) -> bool:
    """Return whether ids are those of a text, or have the same score in a unigram model."""
    expected = ours.encode(text)
    return ids == expected or (isinstance(ours, SentencePieceTokenizer) and ours.scores_equal(ids, expected))


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_the_same_ids_for_any_text(pair: Pair, text: str) -> None:
    ours, theirs = pair
    assume(not any(name in text for name in theirs.all_special_tokens))
    assert same(ours, theirs(text, add_special_tokens=False).input_ids, text)


def test_texts_and_special_tokens_are_equal(pair: Pair) -> None:
    ours, theirs = pair
    for text in CORPUS[:3]:
        ids = ours.encode(text)
        assert theirs.decode(ids) == ours.decode(ids)
    if theirs.mask_token is None:
        assert theirs.eos_token_id == ours.end_of_document
        return
    first, second = ours.encode("the dog"), ours.encode("a fox")
    cls, sep = theirs.cls_token_id, theirs.sep_token_id
    pair_of = theirs("the dog", "a fox")
    assert type(theirs) is transformers.BertTokenizerFast
    assert pair_of.input_ids == [cls, *first, sep, *second, sep]
    assert pair_of.token_type_ids == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert theirs("the dog").token_type_ids == [0] * (len(first) + 2)


def trained(path: Path, **options: object) -> Path:
    """Train a SentencePiece model like other projects."""
    model = io.BytesIO()
    lines = [line for text in CORPUS for line in text.split("\n") if line]
    options = {"model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options)
    path.write_bytes(model.getvalue())
    return path


PREFIXED: dict[str, dict[str, object]] = {
    "like llama": LLAMA,
    "without extra spaces": {"normalization_rule_name": "identity"},
    "without bytes": {**LLAMA, "byte_fallback": False, "vocab_size": 180},
    "user-defined": {**LLAMA, "user_defined_symbols": ["\n", "0"]},
    "unigram": {**LLAMA, "model_type": "unigram", "vocab_size": 370},
    "default": {},
    "default unigram": {"model_type": "unigram", "byte_fallback": False, "vocab_size": 115},
}


@pytest.fixture(scope="module", params=PREFIXED)
def prefixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Models that put a space before every text, as SentencePiece does by default."""
    folder = tmp_path_factory.mktemp("prefixed")
    path = trained(folder / "ours.model", **PREFIXED[request.param])
    exported = exported_tokenizer(str(path), GPT)
    assert exported.files["tokenizer.model"] == path.read_bytes()
    return open_tokenizer(str(path)), loaded(exported, folder / "out")


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_models_that_add_a_space_give_the_same_ids(prefixed: Pair, text: str) -> None:
    ours, theirs = prefixed
    assume(not any(name in text for name in theirs.all_special_tokens))
    if isinstance(ours, SentencePieceTokenizer) and ours.normalizes:
        assume(not any(unicodedata.category(letter)[0] == "M" or letter in "ﾞﾟ" for letter in text))
    ids = theirs(text, add_special_tokens=False).input_ids
    assert same(ours, ids, text)
    if not isinstance(ours, SentencePieceTokenizer) or ours.unknown not in ids:
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**LLAMA, "treat_whitespace_as_suffix": True}, "end of words"),
        ({**LLAMA, "user_defined_symbols": ["<sep>"]}, "user-defined symbols"),
    ],
)
def test_a_model_without_an_exact_counterpart_is_refused(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = trained(tmp_path / "ours.model", **options)
    with pytest.raises(CheckpointError, match=f"ours.model has no exact counterpart .*{message}.*--tokenizer none"):
        exported_tokenizer(str(path), GPT)


def test_absent_and_too_large_tokenizers_are_reported(tmp_path: Path) -> None:
    assert not exported_tokenizer("none", GPT).note
    assert "--tokenizer" in exported_tokenizer(None, GPT).note
    gone = exported_tokenizer(str(tmp_path / "gone.model"), GPT)
    assert not gone.files
    assert "gone.model" in gone.note
    with pytest.raises(CheckpointError, match="has 257 ids, but the model's vocabulary has 256"):
        exported_tokenizer("bytes", ModelConfig(vocabulary_size=256))


@pytest.mark.parametrize("kind", ["byte-level-bpe", "wordpiece-uncased"])
def test_files_of_older_kinds(kind: str, tmp_path: Path) -> None:
    """GPT-2's vocab.json with merges.txt, and BERT's vocab.txt."""
    is_bert = kind == "wordpiece-uncased"
    tokenizers.Tokenizer.from_str(train(kind, BERT_WORDS if is_bert else ()).decode()).model.save(str(tmp_path))
    spec = f"bert-uncased:{tmp_path / 'vocab.txt'}" if is_bert else str(tmp_path / "vocab.json")
    exported = exported_tokenizer(spec, BERT if is_bert else GPT)
    assert not exported.note
    ours, theirs = open_tokenizer(spec), loaded(exported, tmp_path / "out")
    for text in CORPUS[:3]:
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)


@pytest.fixture(scope="module")
def tiktoken_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """Return encoding -> our tokenizer and its export, of one small vocabulary."""
    path = tmp_path_factory.mktemp("tiktoken") / "any.tiktoken"
    write_tiktoken(path, json.loads(train("byte-level-bpe"))["model"]["vocab"])
    pieces = {}
    for encoding in ENCODINGS:
        exported = exported_tokenizer(f"{encoding}:{path}", ModelConfig(vocabulary_size=200_100))
        assert not exported.note
        theirs = tokenizers.Tokenizer.from_str(exported.files["tokenizer.json"].decode())
        pieces[encoding] = open_tokenizer(f"{encoding}:{path}"), theirs
    return pieces


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("aesSLVTd' 1234\n\r\t.,!é東ſ\u00a0") | st.characters(codec="utf-8"), max_size=40))
def test_tiktoken_files(tiktoken_pair: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]], text: str) -> None:
    assume("<|" not in text)  # names of special tokens, which are text to ours
    for encoding, (ours, theirs) in tiktoken_pair.items():
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == ours.encode(text), encoding
        assert theirs.decode(ids) == text
        assert theirs.token_to_id("<|endoftext|>") == ours.end_of_document


def test_hugging_face_folders_are_copied_file_by_file(tmp_path: Path) -> None:
    files = {
        "tokenizer.json": train("byte-level-bpe", ("<pad>",)),
        "tokenizer_config.json": b'{"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<pad>"}',
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b'{"temperature": 0.5}',
    }
    config = b'{"bos_token_id": 5, "eos_token_id": [0, 7], "pad_token_id": 4000}'
    for name, content in {**files, "config.json": config, "other.py": b"import this"}.items():
        (tmp_path / name).write_bytes(content)
    exported = exported_tokenizer(str(tmp_path), ModelConfig(vocabulary_size=300))
    assert exported.files == files
    # The model has no row 4000.
    assert exported.ids == {"bos_token_id": 5, "eos_token_id": [0, 7], "pad_token_id": 1}


def gpt2_folder(folder: Path, **ids: object) -> Path:
    """A small model that transformers saved, with a tokenizer."""
    config = transformers.GPT2Config(vocab_size=300, n_layer=1, n_embd=16, n_head=2, n_positions=16, **ids)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(train("byte-level-bpe"))
    return folder


@pytest.mark.parametrize("middle", ["megapipe", "hf"])
def test_chat_template_and_generation_settings_survive_a_round_trip(middle: str, tmp_path: Path) -> None:
    theirs = gpt2_folder(tmp_path / "theirs", eos_token_id=[0, 7], bos_token_id=5)
    (theirs / "chat_template.jinja").write_text("{{ messages }}")
    (theirs / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [0, 7]}')
    convert(theirs, middle, tmp_path / "ours")
    tokenizer = open_tokenizer(str(read_trained(str(tmp_path / "ours")).tokenizer))
    assert tokenizer.fingerprint == open_tokenizer(str(theirs)).fingerprint
    convert(tmp_path / "ours", "hf", tmp_path / "back")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes()
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (5, [0, 7], None)


def test_unknown_tokenizers_are_not_read_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = gpt2_folder(tmp_path / "theirs")
    convert(theirs, "megapipe", tmp_path / "ours")
    shutil.rmtree(tmp_path / "ours" / TOKENIZER)
    monkeypatch.chdir(theirs)
    convert(tmp_path / "ours", "megapipe", tmp_path / "again")
    assert not (tmp_path / "again" / TOKENIZER).exists()
