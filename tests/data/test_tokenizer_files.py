"""Tokenizers give the ids of their libraries; the fast core gives the same ids, or is not used. Files of every kind of
tokenizer, made by training or elsewhere, are read."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public as published
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from megapipe.data import DataError
from megapipe.data.preprocess.command import main
from megapipe.data.preprocess.documents import SampledTexts
from megapipe.data.preprocess.inputs import InputFile, find_inputs
from megapipe.data.tokenizers import TRAINERS, Tokenizer, hugging_face, open_tokenizer
from megapipe.data.tokenizers.hugging_face import (
    BERT_SPECIAL_TOKENS,
    FastCore,
    HuggingFaceTokenizer,
    is_byte_level_bpe,
    train_byte_level_bpe,
    train_word_piece,
    use_fast_core,
    why_no_fast_core,
)
from megapipe.data.tokenizers.model_files import ENCODINGS
from tests.data.commands import ROOT, preprocess, run_command
from tests.data.small_tokenizers import write_tiktoken

CORPUS = ["def main(argv):\n    return 0\n", "  the loss   falls, the loss fell\n\n", "naïve café — 東京\t\x00"] * 30
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def train_byte_level(
    texts: list[str], size: int, special: list[str], word: pre_tokenizers.PreTokenizer | None = None
) -> LibraryTokenizer:
    """Train a byte-level BPE. word: how to split, if not like GPT-2."""
    tokenizer = LibraryTokenizer(models.BPE(ignore_merges=word is not None))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=word is None)
    tokenizer.pre_tokenizer = bytes_of if word is None else pre_tokenizers.Sequence([word, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def library_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a byte-level BPE with a template, truncation and padding, which a corpus must not contain."""
    tokenizer = train_byte_level(CORPUS, 400, ["<s>", "</s>", "<|stop|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(max_length=5)
    tokenizer.enable_padding(length=50)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@settings(max_examples=100, deadline=None)
@given(text=any_text.filter(lambda text: "[PAD]" not in text))  # transformers adds this token for its padding
def test_tokenizer_json_gives_the_ids_of_transformers(library_tokenizer: Path, text: str) -> None:
    tokenizer = open_tokenizer(str(library_tokenizer))
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(library_tokenizer))
    ids = tokenizer.encode(text)
    assert ids == oracle(text, add_special_tokens=False, truncation=False, padding=False).input_ids
    if "<" not in text:
        assert tokenizer.decode(ids) == text
        long = 20 * text
        assert tokenizer.decode(tokenizer.encode(long)) == long, "neither truncated nor padded"


def test_end_of_document_and_fingerprint(library_tokenizer: Path, tmp_path: Path) -> None:
    copy, settings_file = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    copy.write_bytes(library_tokenizer.read_bytes())
    assert open_tokenizer(str(copy)).end_of_document == 1  # </s> by its name
    assert open_tokenizer(str(tmp_path), "<|stop|>").end_of_document == 2
    for token, end in (("<|stop|>", 2), ({"content": "<|stop|>", "lstrip": False}, 2), (None, 1)):
        settings_file.write_text(json.dumps({"eos_token": token}))
        assert open_tokenizer(str(copy)).end_of_document == end
    settings_file.write_text("{")
    for spec, end_name, message in (
        (library_tokenizer, "<nope>", "no token '<nope>'"),
        (copy, None, r"tokenizer_config.json is not readable"),
        ("bytes", "</s>", "256"),
    ):
        with pytest.raises(DataError, match=message):
            open_tokenizer(str(spec), end_name)
    settings_file.unlink()
    fingerprint = open_tokenizer(str(library_tokenizer)).fingerprint
    assert open_tokenizer(str(copy)).fingerprint == fingerprint
    content = json.loads(copy.read_text())
    content["added_tokens"][2]["content"] = "<|halt|>"
    copy.write_text(json.dumps(content))
    assert len({fingerprint, open_tokenizer(str(copy)).fingerprint, open_tokenizer("bytes").fingerprint}) == 3
    # The vocabulary size is the largest id + 1, because ids may have gaps.
    LibraryTokenizer(models.WordLevel({"a": 0, "b": 900}, unk_token="a")).save(str(copy))
    gaps = open_tokenizer(str(copy))
    assert (gaps.vocabulary_size, gaps.end_of_document) == (901, None)


words = ["it's", "WE'LL", " 1234", "\r\n", "  ", "<|endoftext|>", "[MASK]", "def main", "aaaa", "é", "!?", "東京"]
code_like = st.one_of(any_text, st.lists(st.sampled_from(words)).map("".join))
LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def texts() -> list[str]:
    return [file.path.read_text() for file in find_inputs(["python-stdlib"], include=["arg*.py", "textwrap.py"])]


@pytest.fixture(scope="module", params=["gpt2", "llama3"])
def byte_level_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gpt2_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_of("gpt2", tmp_path_factory.mktemp("gpt2"))


def byte_level_of(kind: str, folder: Path) -> Path:
    word = pre_tokenizers.Split(Regex(LLAMA_PATTERN), "isolated") if kind == "llama3" else None
    path = folder / "tokenizer.json"
    train_byte_level(texts(), 900, ["<|endoftext|>", "[MASK]"], word).save(str(path))
    return path


@settings(max_examples=150)
@given(text=code_like)
def test_the_fast_core_gives_the_librarys_ids(byte_level_file: Path, text: str) -> None:
    ids = fast(byte_level_file).encode_array(text)
    assert ids.tolist() == library(byte_level_file).encode(text, add_special_tokens=False).ids


@cache
def fast(path: Path) -> HuggingFaceTokenizer:
    tokenizer = open_tokenizer(str(path))
    assert is_byte_level_bpe(tokenizer)
    assert why_no_fast_core(tokenizer, texts()) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hugging_face, "_RENEWAL_CHARACTERS", 50_000)
        use_fast_core(tokenizer)
        for text in texts():
            assert tokenizer.encode_array(text).tolist() == tokenizer.encode(text)
    return tokenizer


@cache
def library(path: Path) -> LibraryTokenizer:
    return LibraryTokenizer.from_file(str(path))


def test_a_core_with_other_ids_is_rejected(gpt2_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these is a mistake that a faster way to split words makes."""
    mistakes: dict[str, Callable[[str], str]] = {
        "\\u2028": lambda text: text.replace("\u2028", " "),
        "[MASK]": lambda text: text.replace("[MASK]", "[MASK ]"),
        "'LL": lambda text: text.replace("'LL", "' LL"),
        "its own text": lambda text: text.replace("argparse", "Argparse"),
    }
    call = FastCore.__call__
    tokenizer = open_tokenizer(str(gpt2_file))
    assert is_byte_level_bpe(tokenizer)
    for name, mistake in mistakes.items():

        def wrong(self: FastCore, text: str, mistake: Callable[[str], str] = mistake) -> np.ndarray:
            return call(self, mistake(text))

        monkeypatch.setattr(FastCore, "__call__", wrong)
        reason = why_no_fast_core(tokenizer, ["WE'LL see", texts()[0]])
        assert reason is not None, name
        assert "its ids differ from those of the tokenizers library for " in reason


def test_the_library_encodes_what_the_core_does_not_know(gpt2_file: Path, tmp_path: Path) -> None:
    content = json.loads(gpt2_file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "[aeiou]+|[^aeiou]+"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("some text of vowels")
    arguments = ["--input", tmp_path / "a.txt", "--tokenizer", tmp_path, "--output-prefix", tmp_path / "out"]
    assert "with the tokenizers library, not with the fast core: it " in preprocess(*arguments).err


def test_the_core_runs_on_one_thread() -> None:
    code = "import sys, os, json, threading\n"
    code += "from megapipe.data.tokenizers.hugging_face import FastCore, train_byte_level_bpe\n"
    code += "core = FastCore(train_byte_level_bpe(['some text of words'] * 9, 262, []).decode())\n"
    code += "before = len(os.listdir('/proc/self/task')); core('some text ' * 100000)\n"
    code += "assert len(os.listdir('/proc/self/task')) == before"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def word_piece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    content = json.loads(train_word_piece(texts(), 600, ["[unused1]"], request.param))
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(content["model"]["vocab"]) + "\n")
    (path.with_name("tokenizer.json")).write_text(json.dumps(content))
    return path, request.param


@settings(max_examples=100)
@given(text=code_like)
def test_bert_vocabularies_give_the_ids_of_the_library(word_piece: tuple[Path, bool], text: str) -> None:
    path, lowercase = word_piece
    for spec in (f"bert-{'uncased' if lowercase else 'cased'}:{path}", path.with_name("tokenizer.json")):
        ids = opened(spec).encode(text)
        assert ids == bert_oracle(path, lowercase).encode(text, add_special_tokens=False).ids
        assert opened(spec).encode_array(text).tolist() == ids


@cache
def opened(spec: str | Path) -> Tokenizer:
    return open_tokenizer(str(spec))


@cache
def bert_oracle(path: Path, lowercase: bool) -> BertWordPieceTokenizer:
    return BertWordPieceTokenizer(str(path), lowercase=lowercase)


def test_a_bert_vocabulary_knows_its_special_tokens(word_piece: tuple[Path, bool], tmp_path: Path) -> None:
    path, lowercase = word_piece
    tokenizer = opened(f"bert-uncased:{path}")
    assert [tokenizer.special_tokens[name] for name in BERT_SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (600, 3)
    assert opened(path.with_name("tokenizer.json")).special_tokens["[unused1]"] == 5
    assert tokenizer.fingerprint != opened(f"bert-cased:{path}").fingerprint
    copy = tmp_path / "vocab.txt"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(DataError, match=r"pass it as bert-uncased:.*vocab\.txt or bert-cased:"):
        open_tokenizer(str(copy))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
    assert open_tokenizer(str(tmp_path)).encode("ABC Éa") == bert_oracle(path, lowercase).encode("ABC Éa").ids[1:-1]
    copy.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(DataError, match=r"has no token \[MASK\]"):
        open_tokenizer(f"bert-cased:{copy}")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, int]]:
    """A small vocabulary as a .tiktoken file."""
    path = tmp_path_factory.mktemp("tiktoken") / "cl100k_base.tiktoken"
    return path, write_tiktoken(path, json.loads(train_byte_level_bpe(texts(), 700, []))["model"]["vocab"])


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_encodings_are_the_published_ones(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(published, loader, lambda *arguments, **options: {})
    expected = getattr(published, encoding)()
    assert ENCODINGS[encoding].pattern == expected["pat_str"]
    assert ENCODINGS[encoding].special_tokens == expected["special_tokens"]


@settings(max_examples=100)
@given(text=code_like, encoding=st.sampled_from(list(ENCODINGS)))
def test_tiktoken_files_give_the_ids_of_tiktoken(
    ranks: tuple[Path, dict[bytes, int]], text: str, encoding: str
) -> None:
    path, mergeable = ranks
    pattern, special = ENCODINGS[encoding]
    oracle = tiktoken.Encoding("oracle", pat_str=pattern, mergeable_ranks=mergeable, special_tokens=special)
    tokenizer = opened(f"{encoding}:{path}")
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text, disallowed_special=())
    assert tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.end_of_document is not None
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text


def test_tiktoken_files_say_what_they_are_by_name(ranks: tuple[Path, dict[bytes, int]], tmp_path: Path) -> None:
    path, _ = ranks
    tokenizer = open_tokenizer(str(path))
    assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (100277, 100257)
    assert open_tokenizer(str(path), "<|endofprompt|>").end_of_document == 100276
    with pytest.raises(DataError, match=r"no special token '<nope>'; it has <\|endoftext\|>"):
        open_tokenizer(str(path), "<nope>")
    other, content = tmp_path / "mine.tiktoken", path.read_bytes()
    for written, spec, message in (
        (content, str(other), r"for example cl100k_base:.*mine\.tiktoken"),
        (content.partition(b"\n")[2], f"o200k_base:{other}", "has no token for byte"),
        (b"not base64 at all\n", f"o200k_base:{other}", r"is not a \.tiktoken file"),
    ):
        other.write_bytes(written)
        with pytest.raises(DataError, match=message):
            open_tokenizer(spec)


SOURCES = ["--input", "python-stdlib", "--include", "arg*.py", "textwrap.py", "json/*.py"]
VOCABULARY = 500
# U+2581 represents the space in SentencePiece and comes back as one.
trained_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60)


def train(kind: str, output: Path, *more: object, status: int = 0) -> str:
    """Train with the command; return its messages."""
    words = ["train-tokenizer", *SOURCES, "--type", kind, "--vocabulary-size", VOCABULARY, "--output", output, *more]
    return run_command(main, *words, status=status).err


LOSSLESS = [kind for kind in TRAINERS if not kind.startswith("wordpiece")]


@pytest.fixture(scope="module", params=LOSSLESS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp(request.param) / f"tokenizer{TRAINERS[request.param][0]}"
    train(request.param, output)
    return output


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=trained_text.filter(lambda text: "<|endoftext|>" not in text))
def test_every_text_is_decoded_again(trained: Path, text: str) -> None:
    tokenizer = opened(trained)
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_document is not None
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text
    assert all(0 <= token < VOCABULARY and token != tokenizer.end_of_document for token in ids)


@pytest.mark.exhaustive
def test_training_again_gives_the_same_file(trained: Path, tmp_path: Path) -> None:
    train(trained.parent.name.removesuffix("0"), tmp_path / trained.name)
    assert (tmp_path / trained.name).read_bytes() == trained.read_bytes()


def test_the_library_reads_the_file_and_agrees(trained: Path) -> None:
    source = Path(argparse.__file__).read_text("utf-8")
    text = f"def main(argv):\n\n    return  0\t# naïve 東京\n{source}"
    if trained.suffix == ".model":
        expected = sentencepiece.SentencePieceProcessor(model_file=str(trained)).encode(text)
        assert opened(trained).end_of_document == 2
        assert open_tokenizer(str(trained), "\n").end_of_document == 1
        with pytest.raises(DataError, match="no piece '<nope>'"):
            open_tokenizer(str(trained), "<nope>")
    else:
        expected = LibraryTokenizer.from_file(str(trained)).encode(text).ids
    assert opened(trained).encode(text) == expected
    assert opened(trained).vocabulary_size == VOCABULARY
    assert len(expected) < len(text) / 1.8


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\x05"])
def test_a_damaged_model_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "damaged.model").write_bytes(content)
    with pytest.raises(DataError, match=r"damaged.model is not a SentencePiece model"):
        open_tokenizer(str(tmp_path / "damaged.model"))


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    train("byte-level-bpe", folder / "tokenizer.json")
    LibraryTokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    return folder


@settings(max_examples=60, deadline=None)
@given(text=trained_text)
def test_gpt2_files_give_the_ids_of_transformers(gpt2_folder: Path, text: str) -> None:
    ids = opened(gpt2_folder).encode(text)
    assert ids == gpt2_oracle(gpt2_folder)(text).input_ids
    assert opened(gpt2_folder).decode(ids) == text


@cache
def gpt2_oracle(folder: Path) -> GPT2Tokenizer:
    return GPT2Tokenizer.from_pretrained(str(folder))


def test_gpt2_files_are_found_by_folder_or_name(gpt2_folder: Path, tmp_path: Path) -> None:
    paths = (gpt2_folder, gpt2_folder / "vocab.json", gpt2_folder / "merges.txt")
    assert len({open_tokenizer(str(path)).fingerprint for path in paths}) == 1
    assert opened(gpt2_folder).end_of_document == 0
    assert opened(gpt2_folder).encode("a<|endoftext|>b")[1] == 0
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"merges.txt are not a vocabulary and its merges"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "output", "size", "message"),
    [
        ("sentencepiece-bpe", "out.model", 90_000, "too small for a vocabulary of 90000"),
        ("sentencepiece-unigram", "out.model", 90_000, "too small for a vocabulary of 90000"),
        ("byte-level-bpe", "out.json", 90_000, "too small for a vocabulary of 90000"),
        ("sentencepiece-bpe", "out.model", 100, "is too small for the single characters"),
        ("byte-level-bpe", "out.json", 100, "is too small for all bytes, which need 257"),
        ("sentencepiece-bpe", "out.json", 500, "is a .model file"),
        ("byte-level-bpe", "out.model", 500, "is a .json file"),
        ("byte-level-bpe", "out.vocab.json", 500, "tokenizer.json"),
    ],
)
def test_impossible_vocabularies_are_refused(tmp_path: Path, kind: str, output: str, size: int, message: str) -> None:
    assert message in train(kind, tmp_path / output, "--vocabulary-size", size, status=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", [["<pad>", "<pad>"], [" "], ["[MASK]"]])
def test_special_tokens_need_names_of_their_own(tmp_path: Path, names: list[str]) -> None:
    error = train("byte-level-bpe", tmp_path / "out.json", "--special-tokens", *names, status=2)
    assert f"--special-tokens {names[0]!r}: name each special token once" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", list(TRAINERS))
def test_broken_and_empty_input_is_refused(tmp_path: Path, kind: str) -> None:
    lines = [json.dumps({"text": f"line {number} of some text"}) for number in range(300)]
    source, output = tmp_path / "in.jsonl", tmp_path / f"out{TRAINERS[kind][0]}"
    words = ["--input", source, "--type", kind, "--vocabulary_size", 290, "--output", output]
    broken = "\n".join([*lines[:200], "{broken", *lines[200:]])
    for content, message in ((broken, "in.jsonl, line 201: not JSON"), ("\n\n", "error: ")):
        source.write_text(content)
        assert message in run_command(main, "train_tokenizer", *words, status=2).err
        assert not output.exists()


def test_a_large_input_is_sampled_evenly(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number:06d}"}) + "\n" for number in range(20_000)))
    files = [InputFile(path, path.stat().st_size)]
    texts = SampledTexts(files, ["text"], "stop", sample_bytes=path.stat().st_size // 4)
    first = list(texts)
    assert list(texts) == first
    assert texts.num_texts == len(first)
    assert texts.num_bytes == 6 * len(first)
    assert abs(len(first) - 5000) < 5 * (20_000 * 0.25 * 0.75) ** 0.5
    assert abs(sum(map(int, first)) / len(first) - 10_000) < 5 * 20_000 / (12 * len(first)) ** 0.5
    assert len(list(SampledTexts(files, ["text"], "stop", sample_bytes=10**9))) == 20_000
