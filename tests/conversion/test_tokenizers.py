"""Exported tokenizers: transformers gives the ids of training, or no tokenizer is written."""

import base64
import io
import json
import shutil
import string
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.checkpoint import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.command import main
from megapipe.conversion.megapipe_format import TOKENIZER
from megapipe.conversion.tokenizer_files import LETTERS, ExportedTokenizer, exported_tokenizer
from megapipe.data.tokenizers import TRAINERS, Tokenizer, open_tokenizer
from megapipe.data.tokenizers.model_files import ENCODINGS, SentencePieceTokenizer

CORPUS = [
    "def add(one, other):\n    return one + other\n\n\nclass Sum:\n\tpass  # tabs\n",
    "The quick brown fox jumps over the lazy dog; 0123456789 times. Grüße, naïve café, 東京.\n",
    string.printable,
] * 8
SIZES = {"sentencepiece-bpe": 420, "sentencepiece-unigram": 370, "byte-level-bpe": 300, "wordpiece-uncased": 160}


TEXTS = st.text(st.sampled_from("   \n\t▁ae01") | st.characters(codec="utf-8", exclude_characters="\0"), max_size=60)
LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}


@pytest.fixture(scope="module", params=[*SIZES, "bytes"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, transformers.PreTrainedTokenizerBase]:
    """Return our tokenizer, and the one that transformers loads from its export."""
    folder = tmp_path_factory.mktemp("tokenizer")
    spec = "bytes"
    if request.param != "bytes":
        suffix, train = TRAINERS[request.param]
        spec = str(folder / f"ours{suffix}")
        first = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if "wordpiece" in request.param else ()
        Path(spec).write_bytes(train(CORPUS, SIZES[request.param], first))
    model = BertModelConfig(vocabulary_size=512) if "wordpiece" in request.param else ModelConfig(vocabulary_size=512)
    exported = exported_tokenizer(spec, model)
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
def test_the_same_ids_for_any_text(pair: tuple[Tokenizer, transformers.PreTrainedTokenizerBase], text: str) -> None:
    ours, theirs = pair
    assume(not any(name in text for name in theirs.all_special_tokens))
    assert same(ours, theirs(text, add_special_tokens=False).input_ids, text)


def test_texts_and_special_tokens_are_equal(pair: tuple[Tokenizer, transformers.PreTrainedTokenizerBase]) -> None:
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


@pytest.fixture(
    scope="module",
    params=[
        "like llama",
        "without extra spaces",
        "without bytes",
        "user-defined",
        "unigram",
        "default",
        "default unigram",
    ],
)
def prefixed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, transformers.PreTrainedTokenizerBase]:
    """Models that put a space before every text, as SentencePiece does by default."""
    options: dict[str, dict[str, object]] = {
        "like llama": LLAMA,
        "without extra spaces": {"normalization_rule_name": "identity"},
        "without bytes": {**LLAMA, "byte_fallback": False, "vocab_size": 180},
        "user-defined": {**LLAMA, "user_defined_symbols": ["\n", "0"]},
        "unigram": {**LLAMA, "model_type": "unigram", "vocab_size": 370},
        "default": {},
        "default unigram": {"model_type": "unigram", "byte_fallback": False, "vocab_size": 115},
    }
    folder = tmp_path_factory.mktemp("prefixed")
    path = trained(folder / "ours.model", **options[request.param])
    exported = exported_tokenizer(str(path), ModelConfig(vocabulary_size=512))
    assert exported.files["tokenizer.model"] == path.read_bytes()
    return open_tokenizer(str(path)), loaded(exported, folder / "out")


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_models_that_add_a_space_give_the_same_ids(
    prefixed: tuple[Tokenizer, transformers.PreTrainedTokenizerBase], text: str
) -> None:
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
        exported_tokenizer(str(path), ModelConfig(vocabulary_size=512))
    assert not exported_tokenizer("none", ModelConfig()).note
    assert "--tokenizer" in exported_tokenizer(None, ModelConfig()).note
    gone = exported_tokenizer(str(tmp_path / "gone.model"), ModelConfig())
    assert not gone.files
    assert "gone.model" in gone.note
    with pytest.raises(CheckpointError, match="has 257 ids, but the model's vocabulary has 256"):
        exported_tokenizer("bytes", ModelConfig(vocabulary_size=256))


@pytest.mark.parametrize("kind", ["byte-level-bpe", "wordpiece-uncased"])
def test_files_of_older_kinds(kind: str, tmp_path: Path) -> None:
    """GPT-2's vocab.json with merges.txt, and BERT's vocab.txt."""
    _, train = TRAINERS[kind]
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if kind == "wordpiece-uncased" else ()
    model = tokenizers.Tokenizer.from_str(train(CORPUS, SIZES[kind], special).decode()).model
    model.save(str(tmp_path))
    spec = f"bert-uncased:{tmp_path / 'vocab.txt'}" if special else str(tmp_path / "vocab.json")
    config = BertModelConfig(vocabulary_size=512) if special else ModelConfig(vocabulary_size=512)
    exported = exported_tokenizer(spec, config)
    assert not exported.note
    for name, content in exported.files.items():
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_bytes(content)
    ours, theirs = open_tokenizer(spec), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in CORPUS[:3]:
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)


@pytest.fixture(scope="module")
def tiktoken_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """Return encoding -> our tokenizer and its export, of one small vocabulary."""
    vocabulary = json.loads(TRAINERS["byte-level-bpe"][1](CORPUS, 400, ()))["model"]["vocab"]
    bytes_of = {letter: byte for byte, letter in LETTERS.items()}
    names = sorted((name for name in vocabulary if name != "<|endoftext|>"), key=vocabulary.__getitem__)
    tokens = [bytes(bytes_of[letter] for letter in name) for name in names]
    path = tmp_path_factory.mktemp("tiktoken") / "any.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    pieces = {}
    for encoding in ENCODINGS:
        spec = f"{encoding}:{path}"
        exported = exported_tokenizer(spec, ModelConfig(vocabulary_size=200_100))
        assert not exported.note
        theirs = tokenizers.Tokenizer.from_str(exported.files["tokenizer.json"].decode())
        pieces[encoding] = open_tokenizer(spec), theirs
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
        "tokenizer.json": TRAINERS["byte-level-bpe"][1](CORPUS, 300, ("<pad>",)),
        "tokenizer_config.json": b'{"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<pad>"}',
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b'{"temperature": 0.5}',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"bos_token_id": 5, "eos_token_id": [0, 7], "pad_token_id": 4000}')
    (tmp_path / "other.py").write_text("import this")
    exported = exported_tokenizer(str(tmp_path), ModelConfig(vocabulary_size=300))
    assert exported.files == files
    assert exported.ids == {
        "bos_token_id": 5,
        "eos_token_id": [0, 7],
        "pad_token_id": 1,
    }  # the model has no row 4000


def gpt2_folder(folder: Path, **ids: object) -> Path:
    """A small model that transformers saved, with a tokenizer."""
    config = transformers.GPT2Config(vocab_size=300, n_layer=1, n_embd=16, n_head=2, n_positions=16, **ids)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(TRAINERS["byte-level-bpe"][1](CORPUS, 300, ()))
    return folder


@pytest.mark.parametrize("middle", ["megapipe", "hf"])
def test_chat_template_and_generation_settings_survive_a_round_trip(middle: str, tmp_path: Path) -> None:
    theirs = gpt2_folder(tmp_path / "theirs", eos_token_id=[0, 7], bos_token_id=5)
    (theirs / "chat_template.jinja").write_text("{{ messages }}")
    (theirs / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [0, 7]}')
    assert main(["convert", str(theirs), "--to", middle, str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), "--to", "hf", str(tmp_path / "back")]) == 0
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes()
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (5, [0, 7], None)


def test_unknown_tokenizers_are_not_read_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = gpt2_folder(tmp_path / "theirs")
    assert main(["convert", str(theirs), "--to", "megapipe", str(tmp_path / "ours")]) == 0
    shutil.rmtree(tmp_path / "ours" / TOKENIZER)
    monkeypatch.chdir(theirs)
    assert main(["convert", str(tmp_path / "ours"), "--to", "megapipe", str(tmp_path / "again")]) == 0
    assert not (tmp_path / "again" / TOKENIZER).exists()
