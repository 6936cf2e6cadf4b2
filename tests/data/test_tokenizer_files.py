"""Files of every kind of tokenizer, made by training or elsewhere, against the libraries that they come from."""

import argparse
import json
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public as published
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import GPT2Tokenizer

from megapipe.data import DataError
from megapipe.data.preprocess.command import main
from megapipe.data.preprocess.documents import SampledTexts
from megapipe.data.preprocess.inputs import InputFile
from megapipe.data.tokenizers import TRAINERS, Tokenizer, open_tokenizer
from megapipe.data.tokenizers.hugging_face import BERT_SPECIAL_TOKENS, train_byte_level_bpe, train_word_piece
from megapipe.data.tokenizers.model_files import ENCODINGS
from tests.data.commands import run_command
from tests.data.small_tokenizers import write_tiktoken
from tests.data.test_tokenizers import code_like, texts


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
