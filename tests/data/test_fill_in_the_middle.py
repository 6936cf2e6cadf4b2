"""Rearranged documents can be put back; rates hold; everything but the ids stays."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from megapipe.data.fill_in_the_middle import FillInTheMiddle, FillInTheMiddleRule
from megapipe.data.samples import GptSamples
from tests.data.shards import write_shard

PREFIX, SUFFIX, MIDDLE, END = 9001, 9002, 9003, 9000
RULE = FillInTheMiddleRule(
    rate=0.5, suffix_first=0.25, prefix=PREFIX, suffix=SUFFIX, middle=MIDDLE, end_of_document=END
)


@pytest.fixture
def samples(tmp_path: Path) -> GptSamples:
    """Token k of the corpus is k mod 9000, but for the mark that ends each document of 1 to 40 tokens."""
    documents, first = [], 0
    for length in np.random.default_rng(0).integers(0, 40, size=2000).tolist():
        documents.append([[*(place % 9000 for place in range(first, first + length)), END]])
        first += length + 1
    prefix = write_shard(tmp_path / "shard", documents)
    return GptSamples(prefix, split="train", shares="1", sequence_length=50, seed=3)


def restored(text: list[int]) -> tuple[str, list[int]]:
    """How a text was rearranged, and what it was."""
    if PREFIX not in text:
        return "not", text
    suffix, middle = text.index(SUFFIX), text.index(MIDDLE)
    if text[1] == SUFFIX:
        return "suffix first", text[middle + 1 :] + text[2:middle]
    return "prefix first", text[1:suffix] + text[middle + 1 :] + text[suffix + 1 : middle]


def test_every_document_is_itself_but_for_its_first_three_tokens(samples: GptSamples) -> None:
    ordinals = np.arange(len(samples))
    changed = FillInTheMiddle(samples, RULE, seed=5)
    kinds: list[str] = []
    looks_suffix_first = 0.0
    boundaries = samples.boundaries(ordinals)
    assert len(changed) == len(samples)
    assert np.array_equal(changed.num_labels(ordinals), samples.num_labels(ordinals))
    assert all(map(np.array_equal, changed.boundaries(ordinals), boundaries))
    rows = zip(changed.tokens(ordinals), samples.tokens(ordinals), boundaries, strict=True)
    for found, original, places in rows:
        bounds = [0, *places.tolist(), 51]
        for begin, end in itertools.pairwise(bounds):
            before, after = original[begin:end].tolist(), found[begin:end].tolist()
            if before[-1] == END:
                assert after[-1] == END
                before, after = before[:-1], after[:-1]
            kind, text = restored(after)
            assert text == (before if kind == "not" else before[3:])
            if len(before) > 3:
                kinds.append(kind)
                # An empty prefix gives both forms the same tokens; both cuts are one of len(before) - 2 places.
                looks_suffix_first += 0.5 * (0.25 + 0.75 * (1 - (1 - 1 / (len(before) - 2)) ** 2))
            else:
                assert kind == "not"
    # Within five standard deviations.
    allowed = 5 * (0.25 * len(kinds)) ** 0.5
    assert kinds.count("not") == pytest.approx(0.5 * len(kinds), abs=allowed)
    assert kinds.count("suffix first") == pytest.approx(looks_suffix_first, abs=allowed)


def test_a_sample_is_the_same_in_whatever_company_and_another_in_the_next_epoch(samples: GptSamples) -> None:
    changed = FillInTheMiddle(samples, RULE, seed=5)
    ordinals = np.array([[4, 0], [7, 4]])
    tokens = changed.tokens(ordinals)
    assert tokens.shape == (2, 2, 51)
    assert np.array_equal(tokens[0, 0], tokens[1, 1])
    assert np.array_equal(tokens[1, 0], changed.tokens(7))
    assert not np.array_equal(tokens, FillInTheMiddle(samples, RULE, seed=6).tokens(ordinals))
    again = int(np.flatnonzero(samples.windows(np.arange(len(samples)) + len(samples)) == samples.windows(4))[0])
    assert np.array_equal(samples.tokens(4), samples.tokens(again + len(samples)))
    assert not np.array_equal(changed.tokens(4), changed.tokens(again + len(samples)))


def test_cuts_are_uniform(samples: GptSamples) -> None:
    """Prefix, middle and suffix have a third of the text each on average, as two uniform cuts give."""
    changed = FillInTheMiddle(samples, RULE, seed=8)
    shares = []
    for found in changed.tokens(np.arange(len(samples))):
        text = found.tolist()
        for begin in np.flatnonzero(found == PREFIX).tolist():
            part = text[begin:]
            if part[1] == SUFFIX or END not in part:
                continue
            part = part[: part.index(END)]
            suffix, middle = part.index(SUFFIX), part.index(MIDDLE)
            if len(part) > 10:
                shares.append(np.array([suffix - 1, middle - suffix - 1, len(part) - middle - 1]) / (len(part) - 3))
    assert len(shares) > 200
    assert np.mean(shares, axis=0) == pytest.approx([1 / 3] * 3, abs=5 * (1 / 18 / len(shares)) ** 0.5)
