"""Tokenizers give the ids of their libraries; the fast core gives the same ids, or is not used."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megapipe.data import DataError
from megapipe.data.preprocess.inputs import find_inputs
from megapipe.data.tokenizers import hugging_face, open_tokenizer
from megapipe.data.tokenizers.hugging_face import (
    FastCore,
    HuggingFaceTokenizer,
    is_byte_level_bpe,
    use_fast_core,
    why_no_fast_core,
)
from tests.data.commands import ROOT, preprocess

CORPUS = ["def main(argv):\n    return 0\n", "  the loss   falls, the loss fell\n\n", "naïve café — 東京\t\x00"] * 30
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def train_byte_level(
    texts: list[str], size: int, special: list[str], word: pre_tokenizers.PreTokenizer | None = None
) -> Tokenizer:
    """Train a byte-level BPE. word: how to split, if not like GPT-2."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=word is not None))
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
    Tokenizer(models.WordLevel({"a": 0, "b": 900}, unk_token="a")).save(str(copy))
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
    return trained(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gpt2_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("gpt2", tmp_path_factory.mktemp("gpt2"))


def trained(kind: str, folder: Path) -> Path:
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
def library(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


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
