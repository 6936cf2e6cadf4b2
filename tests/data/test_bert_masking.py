"""Masking of BERT samples: statistics over a million tokens, and megatron-core's own masking beside it."""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from megapipe.config.bert import BertDataConfig, masking_budget
from megapipe.data.bert_masking import Masking
from megapipe.data.bert_vocabulary import BertVocabulary
from megapipe.random.draws import Draws

SIZE = 1000
LENGTH = 128
FIRST_CONTINUATION = 700
VOCABULARY = BertVocabulary(SIZE, 0, 2, 3, 4, np.arange(SIZE) >= FIRST_CONTINUATION)


def masking(**fields: object) -> Masking:
    return Masking.of(BertDataConfig(prefix="", **fields), VOCABULARY)  # type: ignore[arg-type]


def sample(number: int, length: int = LENGTH, words_only: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of two parts with their special ones, and the numbers of the parts."""
    generator = np.random.default_rng(number)
    tokens = generator.integers(5, FIRST_CONTINUATION if words_only else SIZE, size=length)
    middle = int(generator.integers(length // 4, length // 2))
    parts = (np.arange(length) > middle).astype(np.int64)
    for place, token in ((0, 2), (middle, 3), (length - 1, 3)):
        tokens[place], parts[place] = token, -1
    return tokens, parts


def hidden_of(found: Masking, number: int, **how: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(text, seen, positions, parts) of a sample."""
    tokens, parts = sample(number, **how)  # type: ignore[arg-type]
    masked = found.apply(tokens, parts, Draws(7, "test", number))
    assert np.array_equal(masked.labels, tokens[masked.positions])
    untouched = np.ones(len(tokens), dtype=bool)
    untouched[masked.positions] = False
    assert np.array_equal(masked.tokens[untouched], tokens[untouched])
    return tokens, masked.tokens, masked.positions, parts


def within(count: int, probability: float, trials: int, sigmas: float = 5.0) -> bool:
    """Whether a binomial count lies within so many standard deviations of its mean."""
    return abs(count - probability * trials) <= sigmas * (trials * probability * (1 - probability)) ** 0.5


@pytest.mark.parametrize("lengths", ["inverse", pytest.param("geometric", marks=pytest.mark.exhaustive)])
def test_a_million_tokens(lengths: str) -> None:
    found = masking(ngram_lengths=lengths, max_ngram=3 if lengths == "inverse" else 10)
    budget = masking_budget(0.15, LENGTH)
    total = hidden = masks = kept = 0
    strangers = np.zeros(SIZE, dtype=int)
    runs = 0
    for number in range(10**6 // LENGTH + 1):
        tokens, seen, positions, parts = hidden_of(found, number)
        assert len(positions) <= budget
        assert (parts[positions] >= 0).all(), "a special token was hidden"
        before = tokens[positions]
        after = seen[positions]
        total += LENGTH
        hidden += len(positions)
        masks += int((after == VOCABULARY.mask).sum())
        kept += int((after == before).sum())
        other = after[(after != VOCABULARY.mask) & (after != before)]
        strangers += np.bincount(other, minlength=SIZE)
        runs += 1 + int((np.diff(positions) > 1).sum())
    assert total >= 10**6
    # The last words tried may be too long for what is left of the budget.
    assert 0.995 * budget / LENGTH <= hidden / total <= budget / LENGTH
    # Alike, the tokens of a run are one draw; a random token may be [MASK] or the token itself.
    sigmas = 5.0 if lengths == "inverse" else 5.0 * (hidden / runs) ** 0.5
    assert within(masks, 0.8 + 0.1 / SIZE, hidden, sigmas)
    assert within(kept, 0.1 + 0.1 / SIZE, hidden, sigmas)
    expected = strangers.sum() / (SIZE - 1)
    strangers = np.delete(strangers, VOCABULARY.mask)
    spread = ((strangers - expected) ** 2 / expected).sum()
    assert abs(spread - (SIZE - 2)) < 6 * (2 * SIZE) ** 0.5  # chi-squared


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.9])
def test_words_are_hidden_whole(probability: float) -> None:
    found = masking(mask_probability=probability)
    for number in range(200):
        tokens, _, positions, parts = hidden_of(found, number)
        hidden = np.zeros(LENGTH, dtype=bool)
        hidden[positions] = True
        inside = VOCABULARY.continues[tokens[1:]] & (parts[1:] == parts[:-1])
        assert np.array_equal(hidden[1:][inside], hidden[:-1][inside])


def test_pieces_are_hidden_by_themselves_where_whole_words_are_not_asked_for() -> None:
    found = masking(whole_words=False, max_ngram=1)
    places = np.zeros(LENGTH)
    torn = 0
    for number in range(3000):
        tokens, _, positions, _ = hidden_of(found, number)
        assert len(positions) == masking_budget(0.15, LENGTH)
        places[positions] += 1
        hidden = np.isin(np.arange(LENGTH), positions)
        torn += int((VOCABULARY.continues[tokens[1:]] & (hidden[1:] != hidden[:-1])).sum())
    assert torn > 1000
    # Nothing but the middle [SEP], of changing place, makes one token likelier than another.
    inner = places[LENGTH // 2 : LENGTH - 1]
    expected = inner.mean()
    assert ((inner - expected) ** 2 / expected).sum() < len(inner) + 5 * (2 * len(inner)) ** 0.5


def test_runs_do_not_cross_from_one_part_to_the_other() -> None:
    found = masking(max_ngram=10, ngram_lengths="geometric", mask_probability=0.5)
    for number in range(300):
        tokens, _, positions, parts = hidden_of(found, number)
        assert VOCABULARY.separator not in tokens[positions]
        assert VOCABULARY.classification not in tokens[positions]
        assert set(np.unique(parts[positions])) <= {0, 1}


def test_spanberts_runs_have_a_mean_of_3_8_words_and_one_fate() -> None:
    """Section 3.1 of the paper states the mean."""
    found = masking(ngram_lengths="geometric", max_ngram=10)
    shares = np.diff(found.lengths, prepend=0.0)
    assert (shares * np.arange(1, 11)).sum() == pytest.approx(3.8, abs=0.005)


def test_spanberts_runs_are_replaced_alike() -> None:
    mixed = {}
    for lengths in ("geometric", "inverse"):
        found = masking(ngram_lengths=lengths, max_ngram=3, mask_probability=0.02)  # a budget of three tokens
        fates = []
        for number in range(2000):
            tokens, seen, positions, _ = hidden_of(found, number, words_only=True)
            if np.ptp(positions) == 2:  # one run, or seldom several that touch
                same = seen[positions] == tokens[positions]
                fates.append(len(set(np.where(seen[positions] == VOCABULARY.mask, 2, same).tolist())))
        assert len(fates) > 200
        mixed[lengths] = np.mean(np.array(fates) > 1)
    assert mixed["geometric"] < 0.1
    assert abs(mixed["inverse"] - (1 - 0.8**3 - 2 * 0.1**3)) < 0.12


def test_short_samples_hide_at_least_one_token_and_empty_budgets_end() -> None:
    found = masking()
    tokens = np.array([2, 10, 3, 11, 3])
    parts = np.array([-1, 0, -1, 1, -1])
    for number in range(50):
        assert len(found.apply(tokens, parts, Draws(0, "short", number)).positions) == 1
    # One word of two pieces does not fit into a budget of one.
    word = np.array([2, 10, 800, 3, 11, 801, 3])
    parts = np.array([-1, 0, 0, -1, 1, 1, -1])
    assert len(found.apply(word, parts, Draws(0, "short", 0)).positions) == 0


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="megatron-core has no wheel from Python 3.14 on")
@pytest.mark.parametrize("max_ngram", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_megatron_core_hides_as_much_in_runs_as_long(max_ngram: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset as Theirs
    names = [f"##{index}" if index >= FIRST_CONTINUATION else str(index) for index in range(SIZE)]
    tokenizer = SimpleNamespace(cls=2, sep=3, mask=4, inv_vocab=names)
    config = SimpleNamespace(
        tokenizer=tokenizer,
        masking_probability=0.15,
        masking_do_full_word=True,
        masking_max_ngram=max_ngram,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        masking_do_permutation=False,
    )
    theirs = SimpleNamespace(config=config, _get_token_mask=lambda state: None)
    ours = masking(max_ngram=max_ngram)
    counts = {"ours": np.zeros(60), "theirs": np.zeros(60)}
    for number in range(600):
        tokens, parts = sample(number)
        # Theirs runs across the middle [SEP]: one part here.
        inner = parts >= 0
        tokens = np.concatenate([tokens[:1], tokens[inner], tokens[-1:]])
        parts = np.where(np.isin(np.arange(len(tokens)), (0, len(tokens) - 1)), -1, 0)
        tokens[1] = 10  # a word begins
        found = ours.apply(tokens, parts, Draws(1, "ours", number)).positions
        state = np.random.RandomState(number)
        other = Theirs._create_masked_lm_predictions(theirs, tokens.tolist(), LENGTH, state)[1]
        for name, positions in (("ours", found), ("theirs", np.array(other))):
            edges = np.flatnonzero(np.diff(positions, prepend=-9, append=999) > 1)
            counts[name] += np.bincount(np.diff(edges), minlength=60)
    tokens_hidden = {name: (runs * np.arange(60)).sum() for name, runs in counts.items()}
    assert tokens_hidden["ours"] == pytest.approx(tokens_hidden["theirs"], rel=0.005)
    both = counts["ours"] + counts["theirs"] >= 40
    ours_, theirs_ = counts["ours"][both], counts["theirs"][both]
    spread = ((ours_ - theirs_) ** 2 / (ours_ + theirs_)).sum()
    assert both.sum() >= 5
    assert spread < both.sum() + 5 * (2 * both.sum()) ** 0.5  # chi-squared of two samples
