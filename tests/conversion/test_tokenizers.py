"""Exported tokenizers: transformers gives the ids that the model was trained on, or none is written."""

import json
import string
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.checkpoint import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.tokenizer_files import exported_tokenizer
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
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


def test_more_ids_than_the_model_has_rows_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has 257 ids but the model knows 256"):
        exported_tokenizer("bytes", ModelConfig(vocabulary_size=256))


def test_none_is_written_where_nothing_names_it_or_it_is_gone(tmp_path: Path) -> None:
    assert "--tokenizer" in exported_tokenizer(None, ModelConfig()).note
    gone = exported_tokenizer(str(tmp_path / "gone.model"), ModelConfig())
    assert not gone.files
    assert "gone.model" in gone.note
