"""Trained vocabularies: exact size, reproducible, lossless, with the ids of their libraries."""

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
from megapipe.data.manifest import read_manifest
from megapipe.data.preprocess.command import main
from megapipe.data.preprocess.documents import SampledTexts
from megapipe.data.preprocess.inputs import InputFile, find_inputs
from megapipe.data.shards import IndexedDataset
from megapipe.data.tokenizers import TRAINERS, Tokenizer, open_tokenizer

SOURCES = ["--input", "python-stdlib", "--include", "arg*.py", "textwrap.py", "json/*.py"]
VOCABULARY = 500
# U+2581 represents the space in SentencePiece and comes back as one.
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60)


def train(kind: str, output: Path, *more: str) -> int:
    arguments = ["train-tokenizer", *SOURCES, "--type", kind, "--vocabulary-size", str(VOCABULARY)]
    return main([*arguments, "--output", str(output), *more])


LOSSLESS = [kind for kind in TRAINERS if not kind.startswith("wordpiece")]


@pytest.fixture(scope="module", params=LOSSLESS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    output = tmp_path_factory.mktemp(kind) / f"tokenizer{TRAINERS[kind][0]}"
    assert train(kind, output) == 0
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
    kind = trained.parent.name.removesuffix("0")
    again = tmp_path / trained.name
    assert train(kind, again) == 0
    assert again.read_bytes() == trained.read_bytes()


def test_the_library_reads_the_file_and_agrees(trained: Path) -> None:
    text = "def main(argv):\n\n    return  0\t# naïve 東京\n"
    if trained.suffix == ".model":
        expected = sentencepiece.SentencePieceProcessor(model_file=str(trained)).encode(text)
    else:
        expected = LibraryTokenizer.from_file(str(trained)).encode(text).ids
    assert cached(trained).encode(text) == expected
    if trained.suffix == ".model":
        assert cached(trained).end_of_document == 2
        assert open_tokenizer(str(trained), "\n").end_of_document == 1
        with pytest.raises(DataError, match="no piece '<nope>'"):
            open_tokenizer(str(trained), "<nope>")
    for content in (b"", b"not a model", b"\x0a\x05"):
        damaged = trained.with_name("damaged.model")
        damaged.write_bytes(content)
        with pytest.raises(DataError, match=r"damaged.model is not a SentencePiece model"):
            open_tokenizer(str(damaged))


def test_shards_are_written_with_a_trained_tokenizer(trained: Path, tmp_path: Path) -> None:
    arguments = [*SOURCES, "--tokenizer", str(trained), "--append-eod", "--output-prefix", str(tmp_path / "out")]
    assert main([*arguments, "--workers", "1"]) == 0
    prefix = tmp_path / "out_text_document"
    dataset, manifest, tokenizer = IndexedDataset(prefix), read_manifest(prefix), cached(trained)
    assert manifest is not None
    assert manifest.vocabulary_size == VOCABULARY
    manifest.check_tokenizer(tokenizer.spec, tokenizer.fingerprint)
    with pytest.raises(DataError, match="not with bytes"):
        manifest.check_tokenizer("bytes", open_tokenizer("bytes").fingerprint)
    files, characters = find_inputs([SOURCES[1]], include=SOURCES[3:]), 0
    for index, file in enumerate(files):
        ids = dataset.document(index).tolist()
        assert ids[-1] == tokenizer.end_of_document
        text = file.path.read_text("utf-8")
        assert tokenizer.decode(ids) == text
        characters += len(text)
    assert dataset.num_tokens < characters / 1.8


@cache
def cached(path: Path) -> Tokenizer:
    return open_tokenizer(str(path))


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    assert train("byte-level-bpe", folder / "tokenizer.json") == 0
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    library.model.save(str(folder))
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
    fingerprints = {
        open_tokenizer(str(path)).fingerprint
        for path in (gpt2_folder, gpt2_folder / "vocab.json", gpt2_folder / "merges.txt")
    }
    assert len(fingerprints) == 1
    assert cached(gpt2_folder).end_of_document == 0
    assert cached(gpt2_folder).encode("a<|endoftext|>b")[1] == 0
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"merges.txt are not a vocabulary and its merges"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "suffix", "arguments", "message"),
    [
        ("sentencepiece-bpe", ".model", ["--vocabulary-size", "90000"], "too small for a vocabulary of 90000"),
        ("sentencepiece-unigram", ".model", ["--vocabulary-size", "90000"], "too small for a vocabulary of 90000"),
        ("byte-level-bpe", ".json", ["--vocabulary-size", "90000"], "too small for a vocabulary of 90000"),
        ("sentencepiece-bpe", ".model", ["--vocabulary-size", "100"], "is too small for the single characters"),
        ("byte-level-bpe", ".json", ["--vocabulary-size", "100"], "is too small for all bytes, which need 257"),
        ("sentencepiece-bpe", ".json", [], "is a .model file"),
        ("byte-level-bpe", ".model", [], "is a .json file"),
        ("byte-level-bpe", ".vocab.json", [], "tokenizer.json"),
    ],
)
def test_impossible_vocabularies_are_refused(
    tmp_path: Path, kind: str, suffix: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(kind, tmp_path / f"out{suffix}", *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", list(TRAINERS))
def test_broken_and_empty_input_is_refused(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": f"line {number} of some text"}) for number in range(300)]
    source, output = tmp_path / "in.jsonl", tmp_path / f"out{TRAINERS[kind][0]}"
    arguments = ["train_tokenizer", "--input", str(source), "--type", kind, "--vocabulary_size", "290"]
    arguments += ["--output", str(output)]
    source.write_text("\n".join([*lines[:200], "{broken", *lines[200:]]))
    assert main(arguments) == 2
    assert "in.jsonl, line 201: not JSON" in capsys.readouterr().err
    assert not output.exists()
    source.write_text("\n\n")
    assert main(arguments) == 2
    assert "error: " in capsys.readouterr().err
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
