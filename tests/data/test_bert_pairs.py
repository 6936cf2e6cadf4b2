"""Parts of BERT samples: sentences that follow each other, found from the sample's number alone."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.data.bert_pairs import NOTHING, Parts, SentencePairs
from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset
from tests.data.bert_shards import random_documents
from tests.data.shards import numbered_documents, write_shard

fresh_files = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths_strategy = st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=2, max_size=12)


def shard_of(folder: Path, documents: list[list[int]]) -> IndexedDataset:
    """Documents are lists of sentence lengths."""
    numbered = [[list(range(length)) for length in document] for document in documents]
    return IndexedDataset(write_shard(folder / "shard", numbered))


def open_pairs(shard: IndexedDataset, **changes: object) -> SentencePairs:
    how = {"split": "train", "shares": "1", "sequence_length": 16, "pairs": "order", "short_probability": 0.1}
    return SentencePairs(shard, **{**how, "seed": 5, **changes})  # type: ignore[arg-type]


def documents_of(shard: IndexedDataset, part: tuple[int, int]) -> set[int]:
    starts = np.cumsum([0, *(len(shard.document(document)) for document in range(shard.num_documents))])
    return set((np.searchsorted(starts, np.arange(*part), side="right") - 1).tolist())


@fresh_files
@given(
    documents=lengths_strategy,
    pairs=st.sampled_from(["order", "next", "none"]),
    length=st.integers(5, 40),
    short=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_samples_are_runs_of_text_as_the_label_says(
    tmp_path: Path, documents: list[list[int]], pairs: str, length: int, short: float
) -> None:
    documents = [[3, 4, 2], [5, 1], *documents, [7] * 20]
    shard = shard_of(tmp_path, documents)
    source = open_pairs(shard, pairs=pairs, sequence_length=length, short_probability=short)
    for ordinal in range(2 * len(source)):
        found = source.parts(ordinal)
        first, second = found.first, found.second
        assert found.real
        assert 1 <= found.num_tokens <= source.max_tokens
        assert len(documents_of(shard, first)) == 1
        if pairs == "none":
            assert (second, found.label) == ((0, 0), 0)
            continue
        assert first[0] < first[1]
        assert second[0] < second[1]
        together = documents_of(shard, first) | documents_of(shard, second)
        if pairs == "next":
            assert len(together) == 1 + found.label
            assert found.label or first[1] <= second[0]
        else:
            assert len(together) == 1
            assert (second[1] <= first[0]) if found.label else (first[1] <= second[0])


def test_a_sample_that_fits_takes_whole_sentences_and_fills_up_backwards(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [[4, 3, 5, 2]])
    source = open_pairs(shard, sequence_length=17, short_probability=0.0)
    for ordinal in range(50):
        found = source.parts(ordinal)
        ends = {0, 4, 7, 12, 14}
        assert {*found.first, *found.second} <= ends
        assert found.num_tokens == 14
        inner = sorted([found.first, found.second])
        assert inner[0][1] == inner[1][0]


def test_labels_are_fair_coins_and_short_samples_as_many_as_asked(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [[2] * 400 for _ in range(20)])
    source = open_pairs(shard, sequence_length=103, short_probability=0.2)
    found = [source.parts(ordinal) for ordinal in range(4000)]
    labels = sum(parts.label for parts in found)
    assert abs(labels - 2000) < 5 * 1000**0.5
    # Targets are uniform in [2, 100]: a short one is below 99 with probability 97/99 (sentences have two tokens).
    short = sum(parts.num_tokens < 99 for parts in found)
    assert abs(short - 800 * 97 / 99) < 5 * (4000 * 0.16) ** 0.5
    lengths = np.array([parts.num_tokens for parts in found if parts.num_tokens < 99])
    assert abs(lengths.mean() - 51) < 5 * 29 / len(lengths) ** 0.5


def test_no_document_is_starved_however_short(tmp_path: Path) -> None:
    """A mapping that began samples at fixed places would never reach most of these documents."""
    shard = shard_of(tmp_path, [[3, 3]] * 200)
    source = open_pairs(shard, sequence_length=63)
    counts = np.zeros(200)
    for ordinal in range(10_000):
        counts[source.parts(ordinal).first[0] // 6] += 1
    assert ((counts - 50) ** 2 / 50).sum() < 199 + 5 * (2 * 199) ** 0.5  # chi-squared


def test_an_epoch_takes_every_stretch_once(tmp_path: Path) -> None:
    """With one sentence in each stretch, an epoch of single sentences is the whole split."""
    shard = shard_of(tmp_path, [[14] for _ in range(60)])
    source = open_pairs(shard, pairs="none", short_probability=0.0)
    assert len(source) == 60
    for epoch in range(3):
        firsts = [source.parts(epoch * 60 + position).first for position in range(60)]
        assert sorted(firsts) == [(14 * index, 14 * index + 14) for index in range(60)]
        assert firsts != sorted(firsts)


def test_a_split_stays_inside_of_its_documents(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [[5, 5, 5] for _ in range(40)])
    for split, allowed in (("train", range(20)), ("validation", range(20, 40))):
        for pairs in ("order", "next"):
            source = open_pairs(shard, split=split, shares="50,50,0", pairs=pairs)
            for ordinal in range(100):
                found = source.parts(ordinal)
                assert documents_of(shard, found.first) | documents_of(shard, found.second) <= set(allowed)


def test_in_the_texts_order_each_stretch_comes_once(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [[1] * 420])
    source = open_pairs(shard, pairs="none", short_probability=0.0, shuffle=False)
    assert len(source) == 30
    # The last may fill up with what is before it.
    assert [source.parts(ordinal).first[0] // 14 for ordinal in range(29)] == list(range(29))
    assert source.parts(30) == NOTHING


def test_tokens_are_cut_from_the_longer_part_and_from_both_ends(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [[50, 9], [50, 60]])
    source = open_pairs(shard, sequence_length=33, short_probability=0.0, split="train", shares="1")
    cut_in_front = []
    for ordinal in range(200):
        one, two = sorted(source.parts(ordinal)[:2])
        if one[0] < 59:  # of 50 and 9 tokens
            assert two == (50, 59)
            assert one[1] - one[0] == 21
            cut_in_front.append(one[0])
        else:
            assert one[1] - one[0] == two[1] - two[0] == 15
    assert abs(np.mean(cut_in_front) - 29 / 2) < 5 * (29 / 4 / len(cut_in_front)) ** 0.5


def test_documents_of_one_sentence_are_passed_over(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [[9], [9], [4, 5], [9], [3, 3]])
    source = open_pairs(shard)
    seen = {document for ordinal in range(50) for document in documents_of(shard, source.parts(ordinal).first)}
    assert seen == {2, 4}


@pytest.mark.parametrize(
    ("documents", "changes", "message"),
    [
        ([[20], [20]], {}, r"2 sequences in 2 documents, so it is not split into sentences.*--split-sentences"),
        ([[3, 3]], {}, r"too few tokens for one sample of 13"),
        ([[20], [20], [20, 20]], {"shares": "67,33"}, r"has two sentences.*--split-sentences"),
        ([[20, 20]], {"pairs": "next"}, r"sentences of other documents, but .* set data.pairs order"),
    ],
)
def test_what_cannot_be_paired_is_told(
    tmp_path: Path, documents: list[list[int]], changes: dict[str, str], message: str
) -> None:
    shard = shard_of(tmp_path, documents)
    with pytest.raises(DataError, match=message):
        _ = [open_pairs(shard, **changes).parts(ordinal) for ordinal in range(50)]


def test_opening_reads_nothing_but_a_few_numbers(tmp_path: Path) -> None:
    """Parts of one sample touch neither the tokens nor the documents before it."""
    generator = np.random.default_rng(0)
    documents = random_documents(generator, 50, 100)
    shard = IndexedDataset(write_shard(tmp_path / "shard", [*documents, *numbered_documents([40])]))
    shard._token_array = None  # type: ignore[assignment]
    assert isinstance(open_pairs(shard).parts(3), Parts)
