"""BERT vocabularies and tiktoken files, against the libraries that they come from."""

import json
from functools import cache
from pathlib import Path

import pytest
import tiktoken
import tiktoken_ext.openai_public as published
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer

from megapipe.data import DataError
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.data.tokenizers.hugging_face import BERT_SPECIAL_TOKENS, train_byte_level_bpe, train_word_piece
from megapipe.data.tokenizers.model_files import ENCODINGS
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
    for spec in (f"bert-{'uncased' if lowercase else 'cased'}:{path}", str(path.with_name("tokenizer.json"))):
        ids = opened(spec).encode(text)
        assert ids == bert_oracle(path, lowercase).encode(text, add_special_tokens=False).ids
        assert opened(spec).encode_array(text).tolist() == ids


@cache
def opened(spec: str) -> Tokenizer:
    return open_tokenizer(spec)


@cache
def bert_oracle(path: Path, lowercase: bool) -> BertWordPieceTokenizer:
    return BertWordPieceTokenizer(str(path), lowercase=lowercase)


def test_a_bert_vocabulary_knows_its_special_tokens(word_piece: tuple[Path, bool], tmp_path: Path) -> None:
    path, lowercase = word_piece
    tokenizer = opened(f"bert-uncased:{path}")
    assert [tokenizer.special_tokens[name] for name in BERT_SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (600, 3)
    assert opened(str(path.with_name("tokenizer.json"))).special_tokens["[unused1]"] == 5
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
