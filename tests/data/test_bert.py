"""BERT samples: their form, their parts, and which tokens are hidden, with megatron-core's masking as the oracle."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.config.bert import BertDataConfig, masking_budget
from megapipe.data import DataError
from megapipe.data.bert_parts import NO_PARTS, BertVocabulary, Masking, Parts, SentencePairs
from megapipe.data.bert_samples import BertSamples
from megapipe.data.shards import IndexedDataset
from megapipe.random.sampling import Draws
from tests.data.bert_shards import SPECIAL, random_documents, write_sentences, write_vocabulary
from tests.data.shards import numbered_documents, write_shard

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


@pytest.mark.parametrize("pairs", ["order", "none"])
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


def test_a_sample_depends_only_on_seed_and_number(data: BertDataConfig) -> None:
    whole = opened(data).batch(range(100, 124))
    order = np.random.default_rng(0).permutation(24)
    other = opened(data)
    assert not np.array_equal(whole.tokens, other.batch(range(100 + len(other), 124 + len(other))).tokens)
    assert not np.array_equal(whole.tokens, opened(data, seed=6).batch(range(100, 124)).tokens)
    for size in (1, 4):
        samples = opened(data)
        for begin in range(0, 24, size):
            rows = order[begin : begin + size]
            part = samples.batch(rows + 100)
            for actual, expected in zip(part, whole, strict=True):
                assert np.array_equal(actual, expected[rows])


def test_past_the_end_of_a_sequential_order_nothing_counts(data: BertDataConfig) -> None:
    samples = opened(data, shuffle=False)
    ordinals = [len(samples) - 1, len(samples)]
    batch = samples.batch(ordinals)
    assert (batch.loss_mask.sum(axis=1) > 0).tolist() == [True, False]
    assert batch.sentence_weights.tolist() == [1.0, 0.0]
    assert np.array_equal(batch.lengths, samples.lengths(ordinals))


def test_both_forms_of_a_vocabulary_are_equal(tmp_path: Path) -> None:
    text = write_vocabulary(tmp_path, SIZE)
    pieces = {piece: number for number, piece in enumerate(text.read_text().splitlines())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain, json_ = BertVocabulary.read(f"bert-uncased:{text}"), BertVocabulary.read(tmp_path)
    assert (plain.size, plain.mask, plain.padding) == (json_.size, json_.mask, json_.padding) == (SIZE, MASK, PADDING)
    assert np.array_equal(plain.continues, json_.continues)
    assert plain.continues.sum() == int(0.3 * SIZE)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_of_a_vocabulary_end_only_at_newlines(tmp_path: Path, newline: str) -> None:
    pieces = [*SPECIAL, "a\x85", "\u2028", "b\x1c", "##c"]
    (tmp_path / "vocab.txt").write_text("".join(piece + newline for piece in pieces), encoding="utf-8", newline="")
    vocabulary = BertVocabulary.read(tmp_path)
    assert vocabulary.size == len(pieces)
    assert np.flatnonzero(vocabulary.continues).tolist() == [pieces.index("##c")]


def test_words_of_byte_level_vocabularies_start_with_spaces(tmp_path: Path) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(["some words in some other words\n"] * 9, vocab_size=400, special_tokens=special)
    trained.save(str(tmp_path / "tokenizer.json"))
    vocabulary = BertVocabulary.read(tmp_path)
    ends = vocabulary.classification, vocabulary.padding, vocabulary.separator, vocabulary.mask
    assert ends == tuple(special.index(name) for name in ("<s>", "<pad>", "</s>", "<mask>"))
    pieces = [trained.decode([number]) for number in range(vocabulary.size)]
    expected = [not piece.startswith((" ", "\n", "\t")) for piece in pieces]
    expected[: len(special)] = vocabulary.continues[: len(special)]
    assert vocabulary.continues.tolist() == expected
    assert not vocabulary.continues[list(ends)].any()


NAMES = r"\[PAD\], \[CLS\], \[SEP\], \[MASK\]"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", "word\n##piece\n", rf"vocab\.txt has no {NAMES}.*train-tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}}}', rf"tokenizer\.json has no {NAMES}"),
        ("tokenizer.json", "{", r"tokenizer\.json is not readable JSON"),
        ("vocab.txt", None, r"no vocabulary .* give a vocab\.txt"),
    ],
)
def test_an_unusable_vocabulary_is_refused(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        BertVocabulary.read(tmp_path / name)


def test_files_that_do_not_fit_are_refused(data: BertDataConfig, tmp_path: Path) -> None:
    smaller = replace(data, tokenizer=str(write_vocabulary(tmp_path, 20)))
    for wrong, size, message in (
        (data, 60, r"vocabulary has 90 ids, but the model's vocabulary_size is 60"),
        (replace(data, tokenizer=""), SIZE, r"set data\.tokenizer"),
        (smaller, SIZE, r"token \d+ of .*sentences\.bin is \d+, outside of the vocabulary of 20"),
    ):
        with pytest.raises(DataError, match=message):
            opened(wrong, vocabulary_size=size).batch(range(40))


fresh_files = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sentence_lengths = st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=2, max_size=12)


def shard_of(folder: Path, documents: list[list[int]]) -> IndexedDataset:
    """Write documents, given as lists of sentence lengths."""
    numbered = [[list(range(length)) for length in document] for document in documents]
    return IndexedDataset(write_shard(folder / "shard", numbered))


def open_pairs(
    shard: IndexedDataset, part: Any = "train", short: float = 0.1, shuffle: bool = True, **fields: Any
) -> SentencePairs:
    """part: of the splits. short: probability of a short sample. fields: others of BertDataConfig."""
    fields = {"split": "1", "sequence_length": 16, "pairs": "order", "short_sequence_probability": short, **fields}
    return SentencePairs(shard, BertDataConfig(prefix="", **fields), split=part, seed=5, shuffle=shuffle)


def documents_of(shard: IndexedDataset, part: tuple[int, int]) -> set[int]:
    starts = np.cumsum([0, *(len(shard.document(document)) for document in range(shard.num_documents))])
    return set((np.searchsorted(starts, np.arange(*part), side="right") - 1).tolist())


@fresh_files
@given(
    documents=sentence_lengths,
    pairs=st.sampled_from(["order", "next", "none"]),
    length=st.integers(5, 40),
    short=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_parts_are_runs_of_text_in_the_labels_order(
    tmp_path: Path, documents: list[list[int]], pairs: str, length: int, short: float
) -> None:
    documents = [[3, 4, 2], [5, 1], *documents, [7] * 20]
    shard = shard_of(tmp_path, documents)
    source = open_pairs(shard, pairs=pairs, sequence_length=length, short=short)
    for ordinal in range(2 * len(source)):
        pair = source.parts(ordinal)
        first, second = pair.first, pair.second
        assert pair.real
        assert 1 <= pair.num_tokens <= source.max_tokens
        assert len(documents_of(shard, first)) == 1
        if pairs == "none":
            assert (second, pair.label) == ((0, 0), 0)
            continue
        assert first[0] < first[1]
        assert second[0] < second[1]
        together = documents_of(shard, first) | documents_of(shard, second)
        if pairs == "next":
            assert len(together) == 1 + pair.label
            assert pair.label or first[1] <= second[0]
        else:
            assert len(together) == 1
            assert (second[1] <= first[0]) if pair.label else (first[1] <= second[0])


def test_a_sample_that_fits_has_whole_sentences(tmp_path: Path) -> None:
    source = open_pairs(shard_of(tmp_path, [[4, 3, 5, 2]]), sequence_length=17, short=0.0)
    for ordinal in range(50):
        pair = source.parts(ordinal)
        assert {*pair.first, *pair.second} <= {0, 4, 7, 12, 14}
        assert pair.num_tokens == 14
        inner = sorted([pair.first, pair.second])
        assert inner[0][1] == inner[1][0]


def test_labels_and_short_samples_have_their_probabilities(tmp_path: Path) -> None:
    source = open_pairs(shard_of(tmp_path, [[2] * 400 for _ in range(20)]), sequence_length=103, short=0.2)
    pairs = [source.parts(ordinal) for ordinal in range(2000)]
    assert within(sum(parts.label for parts in pairs), 0.5, 2000)
    # Targets are uniform in [2, 100]: a short one is below 99 with probability 97/99 (sentences have two tokens).
    lengths = np.array([parts.num_tokens for parts in pairs if parts.num_tokens < 99])
    assert within(len(lengths), 0.2 * 97 / 99, 2000)
    assert abs(lengths.mean() - 51) < 5 * 29 / len(lengths) ** 0.5


def test_short_documents_are_drawn_equally_often(tmp_path: Path) -> None:
    source = open_pairs(shard_of(tmp_path, [[3, 3]] * 60), sequence_length=63)
    documents = [source.parts(ordinal).first[0] // 6 for ordinal in range(1500)]
    counts = np.bincount(documents, minlength=60)
    assert ((counts - 25) ** 2 / 25).sum() < 59 + 5 * (2 * 59) ** 0.5  # chi-squared


def test_every_range_is_used_once_in_an_epoch(tmp_path: Path) -> None:
    source = open_pairs(shard_of(tmp_path, [[1] * 420]), pairs="none", short=0.0, shuffle=False)
    assert len(source) == 30
    # The last may fill up with what is before it.
    assert [source.parts(ordinal).first[0] // 14 for ordinal in range(29)] == list(range(29))
    assert source.parts(30) == NO_PARTS
    source = open_pairs(shard_of(tmp_path, [[14] for _ in range(60)]), pairs="none", short=0.0)
    firsts = [[source.parts(epoch * 60 + position).first for position in range(60)] for epoch in range(3)]
    assert all(sorted(epoch) == [(14 * index, 14 * index + 14) for index in range(60)] for epoch in firsts)
    assert len({tuple(epoch) for epoch in firsts}) == 3


def test_tokens_are_cut_from_the_longer_parts_ends(tmp_path: Path) -> None:
    source = open_pairs(shard_of(tmp_path, [[50, 9], [50, 60]]), sequence_length=33, short=0.0)
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


def test_documents_of_one_sentence_are_skipped(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, [[9], [9], [4, 5], [9], [3, 3]])
    source = open_pairs(shard)
    validation = open_pairs(shard, "validation", split="60,40", sequence_length=8)
    for samples, expected in ((source, {2, 4}), (validation, {4})):
        firsts = [samples.parts(ordinal).first for ordinal in range(50)]
        assert set().union(*(documents_of(shard, first) for first in firsts)) == expected


@pytest.mark.parametrize(
    ("documents", "changes", "message"),
    [
        ([[20], [20]], {}, r"2 sequences in 2 documents, so it is not split into sentences.*--split-sentences"),
        ([[3, 3]], {}, r"too few tokens for one sample of 13"),
        ([[20], [20], [20, 20]], {"split": "67,33"}, r"has two sentences.*--split-sentences"),
        ([[20, 20]], {"pairs": "next"}, r"the train split has one document, .* set data.pairs order"),
        ([[20, 20, 20], []], {"pairs": "next"}, r"sentences of other documents, but .* set data.pairs order"),
    ],
)
def test_what_cannot_be_paired_is_refused(
    tmp_path: Path, documents: list[list[int]], changes: dict[str, str], message: str
) -> None:
    shard = shard_of(tmp_path, documents)
    with pytest.raises(DataError, match=message):
        _ = [open_pairs(shard, **changes).parts(ordinal) for ordinal in range(50)]  # type: ignore[arg-type]


def test_parts_read_no_tokens(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    documents = random_documents(generator, 50, 100)
    shard = IndexedDataset(write_shard(tmp_path / "shard", [*documents, *numbered_documents([40])]))
    shard._token_array = None  # type: ignore[assignment]
    assert isinstance(open_pairs(shard).parts(3), Parts)


PIECES = 1000
LENGTH = 128
FIRST_CONTINUATION = 700
TOKENS = 150_000
VOCABULARY = BertVocabulary(PIECES, 0, 2, 3, 4, np.arange(PIECES) >= FIRST_CONTINUATION)


def masking(**fields: object) -> Masking:
    return Masking.of(BertDataConfig(prefix="", **fields), VOCABULARY)  # type: ignore[arg-type]


def sample(number: int, length: int = LENGTH, words_only: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens of two parts with their special tokens, and the numbers of the parts."""
    generator = np.random.default_rng(number)
    tokens = generator.integers(5, FIRST_CONTINUATION if words_only else PIECES, size=length)
    middle = int(generator.integers(length // 4, length // 2))
    parts = (np.arange(length) > middle).astype(np.int64)
    for place, token in ((0, 2), (middle, 3), (length - 1, 3)):
        tokens[place], parts[place] = token, -1
    return tokens, parts


def hidden_of(rule: Masking, number: int, **how: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(text, seen, positions, parts) of a sample."""
    tokens, parts = sample(number, **how)
    masked = rule.apply(tokens, parts, Draws(7, "test", number))
    assert np.array_equal(masked.labels, tokens[masked.positions])
    untouched = np.setdiff1d(np.arange(len(tokens)), masked.positions)
    assert np.array_equal(masked.tokens[untouched], tokens[untouched])
    return tokens, masked.tokens, masked.positions, parts


def within(count: int, probability: float, trials: int, sigmas: float = 5.0) -> bool:
    """Return whether a binomial count is within `sigmas` standard deviations of its mean."""
    return abs(count - probability * trials) <= sigmas * (trials * probability * (1 - probability)) ** 0.5


@pytest.mark.parametrize("lengths", ["inverse", pytest.param("geometric", marks=pytest.mark.exhaustive)])
def test_statistics_of_many_tokens(lengths: str) -> None:
    rule = masking(ngram_lengths=lengths, max_ngram=3 if lengths == "inverse" else 10)
    budget = masking_budget(0.15, LENGTH)
    total = hidden = masks = kept = runs = 0
    strangers = np.zeros(PIECES, dtype=int)
    for number in range(TOKENS // LENGTH + 1):
        tokens, seen, positions, parts = hidden_of(rule, number)
        assert len(positions) <= budget
        assert (parts[positions] >= 0).all(), "a special token was hidden"
        before, after = tokens[positions], seen[positions]
        total += LENGTH
        hidden += len(positions)
        masks += int((after == VOCABULARY.mask).sum())
        kept += int((after == before).sum())
        other = after[(after != VOCABULARY.mask) & (after != before)]
        strangers += np.bincount(other, minlength=PIECES)
        runs += 1 + int((np.diff(positions) > 1).sum())
    assert total >= TOKENS
    # The last words tried may be too long for what is left of the budget.
    assert 0.995 * budget / LENGTH <= hidden / total <= budget / LENGTH
    # Alike, the tokens of a run are one draw; a random token may be [MASK] or the token itself.
    sigmas = 5.0 if lengths == "inverse" else 5.0 * (hidden / runs) ** 0.5
    assert within(masks, 0.8 + 0.1 / PIECES, hidden, sigmas)
    assert within(kept, 0.1 + 0.1 / PIECES, hidden, sigmas)
    expected = strangers.sum() / (PIECES - 1)
    strangers = np.delete(strangers, VOCABULARY.mask)
    spread = ((strangers - expected) ** 2 / expected).sum()
    assert abs(spread - (PIECES - 2)) < 6 * (2 * PIECES) ** 0.5  # chi-squared


@pytest.mark.parametrize("probability", [0.05, 0.9])
def test_words_are_hidden_whole(probability: float) -> None:
    rule = masking(mask_probability=probability)
    for number in range(200):
        tokens, _, positions, parts = hidden_of(rule, number)
        hidden = np.isin(np.arange(LENGTH), positions)
        inside = VOCABULARY.continues[tokens[1:]] & (parts[1:] == parts[:-1])
        assert np.array_equal(hidden[1:][inside], hidden[:-1][inside])


def test_pieces_are_hidden_singly_without_whole_words() -> None:
    rule = masking(whole_words=False, max_ngram=1)
    places, torn = np.zeros(LENGTH), 0
    for number in range(1500):
        tokens, _, positions, _ = hidden_of(rule, number)
        assert len(positions) == masking_budget(0.15, LENGTH)
        places[positions] += 1
        hidden = np.isin(np.arange(LENGTH), positions)
        torn += int((VOCABULARY.continues[tokens[1:]] & (hidden[1:] != hidden[:-1])).sum())
    assert torn > 500
    # Nothing but the middle [SEP], of changing place, makes one token likelier than another.
    inner = places[LENGTH // 2 : LENGTH - 1]
    expected = inner.mean()
    assert ((inner - expected) ** 2 / expected).sum() < len(inner) + 5 * (2 * len(inner)) ** 0.5


def test_spanberts_runs_are_replaced_together() -> None:
    rule = masking(ngram_lengths="geometric", max_ngram=10)
    shares = np.diff(rule.lengths, prepend=0.0)
    assert (shares * np.arange(1, 11)).sum() == pytest.approx(3.8, abs=0.005), "the mean in section 3.1 of the paper"
    mixed = {}
    for lengths in ("geometric", "inverse"):
        rule = masking(ngram_lengths=lengths, max_ngram=3, mask_probability=0.02)  # a budget of three tokens
        fates = []
        for number in range(1000):
            tokens, seen, positions, _ = hidden_of(rule, number, words_only=True)
            if np.ptp(positions) == 2:  # one run, or seldom several that touch
                same = seen[positions] == tokens[positions]
                fates.append(len(set(np.where(seen[positions] == VOCABULARY.mask, 2, same).tolist())))
        assert len(fates) > 100
        mixed[lengths] = np.mean(np.array(fates) > 1)
    assert mixed["geometric"] < 0.1
    assert abs(mixed["inverse"] - (1 - 0.8**3 - 2 * 0.1**3)) < 0.12


def test_short_samples_hide_at_least_one_token() -> None:
    for tokens, parts, hidden in (
        ([2, 10, 3, 11, 3], [-1, 0, -1, 1, -1], 1),
        # One word of two pieces does not fit into a budget of one.
        ([2, 10, 800, 3, 11, 801, 3], [-1, 0, 0, -1, 1, 1, -1], 0),
    ):
        for number in range(50):
            masked = masking().apply(np.array(tokens), np.array(parts), Draws(0, "short", number))
            assert len(masked.positions) == hidden


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="megatron-core has no wheel from Python 3.14 on")
@pytest.mark.parametrize("max_ngram", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_megatron_core_hides_runs_of_the_same_lengths(max_ngram: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset as Theirs
    names = [f"##{index}" if index >= FIRST_CONTINUATION else str(index) for index in range(PIECES)]
    tokenizer = SimpleNamespace(cls=2, sep=3, mask=4, inv_vocab=names)
    names_of_false = ("use_longer_ngrams", "use_geometric_distribution", "do_permutation")
    rules = {"probability": 0.15, "do_full_word": True, "max_ngram": max_ngram, **dict.fromkeys(names_of_false, False)}
    config = SimpleNamespace(tokenizer=tokenizer, **{f"masking_{name}": value for name, value in rules.items()})
    theirs = SimpleNamespace(config=config, _get_token_mask=lambda state: None)
    ours = masking(max_ngram=max_ngram)
    counts = {"ours": np.zeros(60), "theirs": np.zeros(60)}
    for number in range(600):
        tokens, parts = sample(number)
        # Theirs runs across the middle [SEP]: one part here.
        inner = parts >= 0
        tokens = np.concatenate([tokens[:1], tokens[inner], tokens[-1:]])
        parts = np.where(np.isin(np.arange(len(tokens)), (0, len(tokens) - 1)), -1, 0)
        tokens[1] = 10  # a word starts
        hidden = ours.apply(tokens, parts, Draws(1, "ours", number)).positions
        state = np.random.RandomState(number)
        other = Theirs._create_masked_lm_predictions(theirs, tokens.tolist(), LENGTH, state)[1]
        for name, positions in (("ours", hidden), ("theirs", np.array(other))):
            edges = np.flatnonzero(np.diff(positions, prepend=-9, append=999) > 1)
            counts[name] += np.bincount(np.diff(edges), minlength=60)
    tokens_hidden = {name: (runs * np.arange(60)).sum() for name, runs in counts.items()}
    assert tokens_hidden["ours"] == pytest.approx(tokens_hidden["theirs"], rel=0.005)
    both = counts["ours"] + counts["theirs"] >= 40
    ours_, theirs_ = counts["ours"][both], counts["theirs"][both]
    spread = ((ours_ - theirs_) ** 2 / (ours_ + theirs_)).sum()
    assert both.sum() >= 5
    assert spread < both.sum() + 5 * (2 * both.sum()) ** 0.5  # chi-squared of two samples
