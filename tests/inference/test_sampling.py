"""Sampling against transformers' own warpers, its draws against the probabilities, and its random numbers."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megapipe.inference.generation import penalized, pick, probabilities, uniform
from megapipe.inference.settings import SamplingSettings


def random_logits(seed: int, rows: int, columns: int) -> torch.Tensor:
    """Without ties, which the two sort differently."""
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 4),
    columns=st.integers(1, 50),
    temperature=st.floats(0.1, 5.0),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
)
def test_probabilities_equal_those_of_transformers(
    seed: int, rows: int, columns: int, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    logits = random_logits(seed, rows, columns)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = torch.softmax(MinPLogitsWarper(min_p)(None, TopPLogitsWarper(top_p)(None, expected)), dim=-1)
    actual = probabilities(logits, SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    # Next to top_p = 1 the last bit of a cumulative sum decides about tokens of no weight.
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)


@given(st.integers(0, 2**32), st.lists(st.integers(0, 29), min_size=1), st.floats(0.1, 3.0))
def test_penalized_logits_equal_those_of_transformers(seed: int, tokens: list[int], penalty: float) -> None:
    logits = random_logits(seed, 2, 30)
    seen = torch.tensor([tokens, tokens[:1] * len(tokens)])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits)
    assert torch.equal(penalized(logits, [tokens, tokens[:1]], penalty), expected)


def test_ties_survive_top_k_and_are_cut_by_topp() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    share = 1 / (3 + np.exp(-1.0))
    assert probabilities(logits, SamplingSettings(top_k=2))[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert probabilities(logits, SamplingSettings(top_p=share * 1.5))[0].tolist() == [0.5, 0.5, 0, 0]


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_temperature_zero_takes_the_first_of_the_likeliest(seed: int, columns: int) -> None:
    logits = random_logits(seed, 3, columns).repeat(1, 2)
    expected = logits[:, :columns].argmax(-1).tolist()
    assert pick(logits, SamplingSettings(temperature=0.0), [0.9] * 3).tolist() == expected


@given(st.integers(0, 2**32), st.integers(2, 30), st.floats(0.05, 1.0))
def test_evenly_spaced_numbers_pick_every_token_by_its_probability(seed: int, columns: int, top_p: float) -> None:
    logits = random_logits(seed, 1, columns)
    settings = SamplingSettings(top_p=top_p)
    count = 2000
    numbers = (np.arange(count) + 0.5) / count
    tokens = pick(logits.expand(count, -1), settings, numbers.tolist())
    shares = torch.bincount(tokens, minlength=columns) / count
    expected = probabilities(logits, settings)[0]
    assert (shares - expected).abs().max() <= 1.5 / count
    assert (shares[expected == 0] == 0).all()


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_the_outermost_numbers_pick_tokens_that_can_be_picked(number: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    assert pick(logits, SamplingSettings(), [number]).tolist() == [1 if number == 0.0 else 2]


@given(st.integers(0, 2**32), st.lists(st.integers(0, 2**20), min_size=3, max_size=3))
def test_random_numbers_are_those_of_philox(seed: int, key: list[int]) -> None:
    """The values are part of what a seed means; the generator is numpy's, seeded by hand, with a counter for each
    prompt, sample and position."""
    domain = int.from_bytes(hashlib.blake2b(b"generation", digest_size=8).digest(), "little")
    prompt, sample, position = key
    counter = (position << 64) + (sample << 128) + (prompt << 192)
    generator = np.random.Generator(np.random.Philox(key=seed + (domain << 64), counter=counter))
    assert uniform(seed, prompt, sample, position) == generator.random()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"temperature": -0.5}, ["temperature is -0.5", "at least 0"]),
        ({"temperature": float("nan")}, ["temperature is nan"]),
        ({"top_k": 0}, ["top-k is 0", "at least 1"]),
        ({"top_p": 0.0}, ["top-p is 0.0", "above 0"]),
        ({"top_p": 1.5}, ["top-p is 1.5", "at most 1"]),
        ({"min_p": 1.5}, ["min-p is 1.5", "at most 1"]),
        ({"repetition_penalty": 0.0}, ["repetition-penalty is 0.0", "above 0"]),
        ({"seed": -1}, ["seed is -1", "at least 0"]),
    ],
)
def test_a_wrong_setting_names_value_and_rule(change: dict[str, float], parts: list[str]) -> None:
    assert SamplingSettings().problems() == []
    (problem,) = replace(SamplingSettings(), **change).problems()
    for part in parts:
        assert part in problem
