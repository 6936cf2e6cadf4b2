"""The fast core gives the ids of the tokenizers library, or is not used."""

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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megapipe.data.preprocess.inputs import find_inputs
from megapipe.data.tokenizers import fast_core, open_tokenizer
from megapipe.data.tokenizers.fast_core import FastCore, is_byte_level_bpe, use_fast_core, why_no_fast_core
from megapipe.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megapipe.data.tokenizers.tiktoken_files import ENCODINGS
from tests.data.preprocess_runs import ROOT, preprocess

LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
any_text = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
    st.lists(st.sampled_from(["it's", "WE'LL", " 1234", "\r\n", "  ", "<|endoftext|>", "def main", "aaaa", "é"])).map(
        "".join
    ),
)


def texts() -> list[str]:
    return [file.path.read_text() for file in find_inputs(["python-stdlib"], include=["arg*.py", "textwrap.py"])]


@pytest.fixture(scope="module", params=["gpt2", "llama3"])
def tokenizer_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gpt2_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("gpt2", tmp_path_factory.mktemp("gpt2"))


def trained(kind: str, folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "llama3":
        split = pre_tokenizers.Split(Regex(LLAMA_PATTERN), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "[MASK]"]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts(), trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@settings(max_examples=150)
@given(text=any_text)
def test_ids_are_those_of_the_library(tokenizer_file: Path, text: str) -> None:
    ids = fast(tokenizer_file).encode_array(text)
    assert ids.tolist() == library(tokenizer_file).encode(text, add_special_tokens=False).ids


@cache
def fast(path: Path) -> HuggingFaceTokenizer:
    tokenizer = open_tokenizer(str(path))
    assert is_byte_level_bpe(tokenizer)
    assert why_no_fast_core(tokenizer, texts()) is None
    use_fast_core(tokenizer)
    return tokenizer


@cache
def library(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def test_sources_are_encoded_alike_also_after_a_fresh_start(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_core, "_RENEWED_AFTER", 50_000)
    tokenizer = open_tokenizer(str(tokenizer_file))
    use_fast_core(tokenizer)
    for text in texts():
        assert tokenizer.encode_array(text).tolist() == tokenizer.encode(text)


def test_a_core_with_other_ids_is_found_out(gpt2_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these is a slip that a faster way of splitting words makes."""
    slips: dict[str, Callable[[str], str]] = {
        "\\u2028": lambda text: text.replace("\u2028", " "),
        "[MASK]": lambda text: text.replace("[MASK]", "[MASK ]"),
        "'LL": lambda text: text.replace("'LL", "' LL"),
        "its own text": lambda text: text.replace("argparse", "Argparse"),
    }
    call = FastCore.__call__
    tokenizer = open_tokenizer(str(gpt2_file))
    assert is_byte_level_bpe(tokenizer)
    for name, slip in slips.items():

        def wrong(self: FastCore, text: str, slip: Callable[[str], str] = slip) -> np.ndarray:
            return call(self, slip(text))

        monkeypatch.setattr(FastCore, "__call__", wrong)
        reason = why_no_fast_core(tokenizer, ["WE'LL see", texts()[0]])
        assert reason is not None, name
        assert "its ids differ from those of the tokenizers library for " in reason


def test_a_tokenizer_that_the_core_does_not_know_is_encoded_by_the_library(
    gpt2_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(gpt2_file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "[aeiou]+|[^aeiou]+"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("some text of vowels")
    arguments = ["--input", tmp_path / "a.txt", "--tokenizer", tmp_path, "--output-prefix", tmp_path / "out"]
    assert preprocess(*arguments) == 0
    assert "with the tokenizers library, not with the fast core: it " in capsys.readouterr().err


def test_shards_are_the_same_with_either_core(gpt2_file: Path, tmp_path: Path) -> None:
    arguments = ["--input", "python-stdlib", "--include", "arg*.py", "json/*.py", "--tokenizer", gpt2_file]
    for core in ("auto", "library"):
        prefix = ["--output-prefix", tmp_path / core, "--append-eod", "--end-of-document", "<|endoftext|>"]
        assert preprocess(*arguments, "--tokenizer-core", core, *prefix) == 0
    for kind in ("bin", "idx"):
        files = [(tmp_path / f"{core}_text_document.{kind}").read_bytes() for core in ("auto", "library")]
        assert files[0] == files[1]


def test_patterns_of_published_encodings_too(gpt2_file: Path) -> None:
    content = json.loads(gpt2_file.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pattern = {"type": "Split", "pattern": {"Regex": ENCODINGS["o200k_base"].pattern}, "behavior": "Isolated"}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{**pattern, "invert": False}, byte_level]}
    tokenizer = HuggingFaceTokenizer(Tokenizer.from_str(json.dumps(content)), "o200k", "sha256:0", None)
    assert why_no_fast_core(tokenizer, texts()) is None


def test_the_core_runs_on_one_thread() -> None:
    code = "import sys, os, json, threading\nfrom megapipe.data.tokenizers.fast_core import FastCore\n"
    code += "from megapipe.data.tokenizers.training import train_byte_level_bpe\n"
    code += "core = FastCore(train_byte_level_bpe(['some text of words'] * 9, 262, []).decode())\n"
    code += "before = len(os.listdir('/proc/self/task')); core('some text ' * 100000)\n"
    code += "assert len(os.listdir('/proc/self/task')) == before"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
