"""Trained vocabularies: exact size, reproducible, lossless, with the ids of their libraries."""

import argparse
import json
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import GPT2Tokenizer

from megapipe.data import DataError
from megapipe.data.preprocess.command import main
from megapipe.data.preprocess.documents import SampledTexts
from megapipe.data.preprocess.inputs import InputFile
from megapipe.data.tokenizers import TRAINERS, Tokenizer, open_tokenizer
from tests.data.commands import run_command

SOURCES = ["--input", "python-stdlib", "--include", "arg*.py", "textwrap.py", "json/*.py"]
VOCABULARY = 500
# U+2581 represents the space in SentencePiece and comes back as one.
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60)


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
@given(text=any_text.filter(lambda text: "<|endoftext|>" not in text))
def test_every_text_is_decoded_again(trained: Path, text: str) -> None:
    tokenizer = cached(trained)
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
        assert cached(trained).end_of_document == 2
        assert open_tokenizer(str(trained), "\n").end_of_document == 1
        with pytest.raises(DataError, match="no piece '<nope>'"):
            open_tokenizer(str(trained), "<nope>")
    else:
        expected = LibraryTokenizer.from_file(str(trained)).encode(text).ids
    assert cached(trained).encode(text) == expected
    assert cached(trained).vocabulary_size == VOCABULARY
    assert len(expected) < len(text) / 1.8


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\x05"])
def test_a_damaged_model_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "damaged.model").write_bytes(content)
    with pytest.raises(DataError, match=r"damaged.model is not a SentencePiece model"):
        open_tokenizer(str(tmp_path / "damaged.model"))


@cache
def cached(path: Path) -> Tokenizer:
    return open_tokenizer(str(path))


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    train("byte-level-bpe", folder / "tokenizer.json")
    LibraryTokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    return folder


@settings(max_examples=60, deadline=None)
@given(text=any_text)
def test_gpt2_files_give_the_ids_of_transformers(gpt2_folder: Path, text: str) -> None:
    ids = cached(gpt2_folder).encode(text)
    assert ids == gpt2_oracle(gpt2_folder)(text).input_ids
    assert cached(gpt2_folder).decode(ids) == text


@cache
def gpt2_oracle(folder: Path) -> GPT2Tokenizer:
    return GPT2Tokenizer.from_pretrained(str(folder))


def test_gpt2_files_are_found_by_folder_or_name(gpt2_folder: Path, tmp_path: Path) -> None:
    paths = (gpt2_folder, gpt2_folder / "vocab.json", gpt2_folder / "merges.txt")
    assert len({open_tokenizer(str(path)).fingerprint for path in paths}) == 1
    assert cached(gpt2_folder).end_of_document == 0
    assert cached(gpt2_folder).encode("a<|endoftext|>b")[1] == 0
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
