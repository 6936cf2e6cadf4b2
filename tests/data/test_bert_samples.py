"""BERT samples: put together as they should be, the same in any company, and clear about what cannot be used."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megapipe.config.bert import BertDataConfig
from megapipe.data.bert_samples import BertSamples
from megapipe.data.bert_vocabulary import BertVocabulary
from megapipe.data.errors import DataError
from tests.data.bert_shards import SPECIAL, random_documents, write_sentences, write_vocabulary

SIZE = 90
PADDING, _, CLASSIFICATION, SEPARATOR, MASK = range(len(SPECIAL))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> BertDataConfig:
    documents = random_documents(np.random.default_rng(3), 80, SIZE)
    folder = tmp_path_factory.mktemp("corpus")
    return write_sentences(folder, documents, SIZE, sequence_length=32)


def opened(data: BertDataConfig, **changes: object) -> BertSamples:
    how = {"split": "train", "seed": 5, "vocabulary_size": SIZE}
    return BertSamples(data, **{**how, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("pairs", ["order", "next", "none"])
def test_samples_have_the_form_that_bert_reads(data: BertDataConfig, pairs: str) -> None:
    samples = opened(replace(data, pairs=pairs))
    batch = samples.batch(range(40))
    assert np.array_equal(batch.lengths, samples.lengths(range(40)))
    for row in range(40):
        length = batch.lengths[row]
        hidden = batch.loss_mask[row] > 0
        text = batch.tokens[row].copy()
        text[batch.positions[row][hidden]] = batch.labels[row][hidden]
        assert (text[length:] == PADDING).all()
        assert text[0] == CLASSIFICATION
        ends = np.flatnonzero(text[:length] == SEPARATOR)
        assert len(ends) == (1 if pairs == "none" else 2)
        assert ends[-1] == length - 1
        types = np.zeros(32, dtype=int)
        if pairs != "none":
            types[ends[0] + 1 : length] = 1
        assert np.array_equal(batch.token_types[row], types)
        ordinary = np.setdiff1d(np.arange(1, length), ends)
        assert np.array_equal(text[ordinary], samples.text([row]))
        assert set(batch.positions[row][hidden]) <= set(ordinary)
        assert (np.diff(batch.positions[row][hidden]) > 0).all()
        assert (batch.positions[row][~hidden] == 0).all()
        assert batch.sentence_weights[row] == (pairs != "none")
    assert (batch.tokens == MASK).any()
    assert 0 < batch.sentence_labels.sum() < 40 or pairs == "none"


def test_a_sample_is_the_same_in_any_company_and_process(data: BertDataConfig) -> None:
    whole = opened(data).batch(range(100, 124))
    order = np.random.default_rng(0).permutation(24)
    for size in (1, 4):
        samples = opened(data)
        for begin in range(0, 24, size):
            rows = order[begin : begin + size]
            part = samples.batch(rows + 100)
            for found, expected in zip(part, whole, strict=True):
                assert np.array_equal(found, expected[rows])


def test_another_epoch_and_another_seed_hide_other_tokens(data: BertDataConfig) -> None:
    samples = opened(data)
    number = len(samples)
    assert not np.array_equal(samples.batch(range(8)).tokens, samples.batch(range(number, number + 8)).tokens)
    assert not np.array_equal(samples.batch(range(8)).tokens, opened(data, seed=6).batch(range(8)).tokens)


def test_past_the_end_of_a_sequential_order_nothing_counts(data: BertDataConfig) -> None:
    samples = opened(data, shuffle=False)
    batch = samples.batch([len(samples) - 1, len(samples)])
    assert batch.loss_mask[0].sum() > 0
    assert batch.sentence_weights.tolist() == [1.0, 0.0]
    assert batch.loss_mask[1].sum() == 0
    assert np.array_equal(batch.lengths, samples.lengths([len(samples) - 1, len(samples)]))


def test_both_forms_of_a_vocabulary_say_the_same(tmp_path: Path) -> None:
    text = write_vocabulary(tmp_path, SIZE)
    pieces = {piece: number for number, piece in enumerate(text.read_text().splitlines())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain, json_ = BertVocabulary.read(f"bert-uncased:{text}"), BertVocabulary.read(tmp_path)
    assert (plain.size, plain.mask, plain.padding) == (json_.size, json_.mask, json_.padding) == (SIZE, MASK, PADDING)
    assert np.array_equal(plain.continues, json_.continues)
    assert plain.continues.sum() == int(0.3 * SIZE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("word\n##piece\n", r"vocab\.txt has no \[PAD\], \[CLS\], \[SEP\], \[MASK\].*train-tokenizer"),
        (json.dumps({"model": {"type": "BPE", "vocab": {}}}), r"is a BPE tokenizer; BERT samples need a WordPiece"),
        ("{", r"tokenizer\.json is not readable JSON"),
        (None, r"no vocabulary .* give a vocab\.txt"),
    ],
)
def test_an_unusable_vocabulary_is_told(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / ("tokenizer.json" if content and content.startswith("{") else "vocab.txt")
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        BertVocabulary.read(path)


def test_files_that_do_not_fit_are_told(data: BertDataConfig, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocabulary has 90 ids, but the model's vocabulary_size is 60"):
        opened(data, vocabulary_size=60)
    with pytest.raises(DataError, match=r"set data\.tokenizer"):
        opened(replace(data, tokenizer=""))
    smaller = replace(data, tokenizer=str(write_vocabulary(tmp_path, 20)))
    with pytest.raises(DataError, match=r"token \d+ of .*sentences\.bin is \d+, outside of the vocabulary of 20"):
        opened(smaller).batch(range(40))
