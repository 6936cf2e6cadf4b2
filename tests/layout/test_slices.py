"""Where sequences are cut into slices, and runs that cannot have slices."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.stages import equal_work, slice_ranges
from megapipe.planner.cost.run_layout import lay_run
from megapipe.training.validation import validate
from tests.planner.search.runs import machine
from tests.support.gpt_runs import LLAMA_SHAPE, make_config

LAYERS, HIDDEN, FFN, HEADS, VOCABULARY = 24, 4096, 16384, 32, 32000


@pytest.mark.parametrize(
    ("length", "lengths"),
    [(16384, [4936, 4232, 3776, 3440]), (32768, [11064, 8408, 7072, 6224]), (65536, [25064, 16264, 13024, 11184])],
)
def test_cuts_of_equal_work_are_those_of_the_paper(length: int, lengths: list[int]) -> None:
    """The code of Seq1F1B counts these FLOPs for a token, and for a pair of tokens."""
    token = LAYERS * (8 * HIDDEN**2 + 4 * HIDDEN * FFN) + 4 * HIDDEN * VOCABULARY
    pair = LAYERS * HEADS * (4 * HIDDEN // HEADS + 3)
    assert [len(each) for each in equal_work(token + pair * (np.arange(length) + 0.5), 4, 8)] == lengths


@given(st.integers(1, 6), st.integers(1, 5), st.integers(16, 200), st.integers(0, 2**31))
def test_slices_of_equal_work_cover_a_sample(count: int, multiple: int, parts: int, seed: int) -> None:
    costs = np.random.default_rng(seed).uniform(1.0, 2.0, parts * multiple)
    ranges = equal_work(costs, count, multiple)
    assert [ranges[0].start, ranges[-1].stop, len(ranges)] == [0, len(costs), count]
    assert all(before.stop == after.start for before, after in pairwise(ranges))
    work = [costs[places.start : places.stop].sum() for places in ranges]
    assert all(len(each) % multiple == 0 for each in ranges)
    assert max(work[1:], default=0.0) <= costs.sum() / count + 1e-9


def config(**groups: dict[str, Any]) -> PretrainConfig:
    shape = replace(LLAMA_SHAPE, max_positions=64)
    base = make_config("nowhere", shape, data={"sequence_length": 64}, schedule={"name": "seq1f1b", "slices": 2})
    return replace(base, **{name: replace(getattr(base, name), **fields) for name, fields in groups.items()})


@pytest.mark.parametrize(
    ("groups", "ranks", "problem"),
    [
        ({"parallel": {"context": 2}}, 2, "parallel.context 2 shards them"),
        ({"model": {"attention_chunk_size": 8}}, 1, "model.attention_chunk_size cuts samples into chunks"),
        ({"model": {"num_experts": 4, "experts_per_token": 2}}, 1, "model.num_experts is set"),
        (
            {"model": {"layer_kinds": {"sparse": {"num_experts": 4}}, "layer_pattern": ("base", "sparse")}}, 1,
            "model.num_experts is set",
        ),
        ({"training": {"compile": True}}, 1, "training.compile is true"),
        ({"offload": {"activations": "blocks"}}, 1, "offload.activations is blocks"),
        ({"data": {"sequence_length": 40}}, 1, "sequence_length 40 is not a multiple of 16 .*use 32 or 48"),
        ({"schedule": {"name": "1f1b"}}, 1, "1f1b does not accept the option 'slices'"),
        (
            {"schedule": {"name": "1f1b", "slices": None, "slice_split": "flops"}}, 1,
            "schedule.slice_split is flops, but 1f1b passes whole sequences",
        ),
        ({"schedule": {"slices": 8, "slice_split": "flops"}}, 1, "leaves less than 8 tokens for one of them"),
    ],
)  # fmt: skip
def test_what_slices_do_not_go_with_is_refused(groups: Any, ranks: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate(config(**groups), ranks)


def test_times_of_slices_are_not_planned() -> None:
    with pytest.raises(ConfigError, match="whose times are not planned"):
        lay_run(config(), machine(), 1)


def test_later_slices_of_equal_work_are_shorter() -> None:
    lengths = [len(each) for each in slice_ranges(config(schedule={"slice_split": "flops"}))]
    assert sum(lengths) == 64
    assert lengths[0] > lengths[1]
