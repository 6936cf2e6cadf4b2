"""Models with experts on the layouts of tests/distributed/test_covering.py: the same training, at the predicted cost.

Losses, first gradients and weights are those of one process, bit for bit where no sum is reordered, else in fp32: in
fewer bits a sum in another order sends some token to another expert. No rank calls an all-to-all for its experts. What
is exchanged and kept between steps is predicted to the byte; activations are where every token goes to all experts, so
that rows are distributed evenly, which the formulas assume.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest

from megapipe.config.parallel import ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.prediction import predict_rank
from megapipe.schedules import dumps, loads
from megapipe.training.validation import validate
from tests.distributed.conftest import Corpora
from tests.distributed.test_covering import (
    CASES,
    check_costs,
    check_equal,
    name_of,
    predicted_and_counted,
    train_as_predicted,
    whole_run,
)
from tests.support.counting_groups import counts_of
from tests.support.covering import Case
from tests.support.gpt_runs import LLAMA_SHAPE, RankRun, make_config
from tests.support.layout_runs import LayoutRun, run_layout
from tests.support.layouts import BASE, adds_in_one_order, config_of, oracle_of, sizes_of, world_size
from tests.support.meshes import run_mesh, run_threads

Oracles = Callable[[str, tuple[tuple[str, str], ...]], RankRun]

KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"shared_expert_size": 32, "shared_expert_gate": True, "router_bias": True},
    "deepseek": {
        "shared_expert_size": 80,
        "router_scores": "sigmoid",
        "router_groups": 2,
        "router_groups_chosen": 1,
        "router_scale": 1.5,
    },
}
"""Routers and shared experts."""

CHOSEN: list[Case] = [{"model": "llama", "tensor": "2", "sequence": "on", "recompute": "selective"}]
SLOW: list[Case] = [
    {"model": "llama", "tensor": "2"},
    {"model": "gpt2", "schedule": "zb_h1", "pipeline": "2"},
    {"model": "llama", "schedule": "modular", "data": "2", "zero": "3"},
    {"model": "llama", "tensor": "2", "pipeline": "2", "recompute": "full"},
    {"model": "llama", "schedule": "zb_h1", "pipeline": "2", "tensor": "2", "sequence": "on"},
    {"model": "llama", "context": "2 ring"},
    {"model": "bert", "tied": "untied", "context": "2 all-to-all"},
]
SHOWN = 60
"""One of this number of cases of the covering array is slow, the others are exhaustive."""


def marked(kind: str, case: Case, *marks: pytest.MarkDecorator) -> object:
    case = {**BASE, **case}
    case = case if adds_in_one_order(case) else {**case, "precision": "fp32"}
    return pytest.param(kind, case, marks=marks, id=f"{kind}: {name_of(case)}")


FIRST = [*CHOSEN, *SLOW[3:5]]
EVERY_CASE = [
    *(
        marked(kind, case, *([pytest.mark.slow] if number else []))
        for number, (kind, case) in enumerate(zip(KINDS, FIRST, strict=True))
    ),
    *(marked(kind, case, pytest.mark.exhaustive) for case in SLOW for kind in KINDS),
    *(
        marked(kind, case, pytest.mark.exhaustive if number % SHOWN else pytest.mark.slow)
        for number, (case, kind) in enumerate(zip(CASES, cycle(KINDS), strict=False))
    ),
]
EVEN = [
    marked(kind, case, pytest.mark.slow if place == number else pytest.mark.exhaustive)
    for place, case in enumerate(FIRST)
    for number, kind in enumerate(KINDS)
]


def with_experts(kind: str, case: Case, corpora: Corpora, choices: int = 2) -> PretrainConfig:
    """Four experts in every block, scored far enough apart for rounding not to change a choice."""
    config = config_of(case, *corpora)
    model = replace(config.model, num_experts=4, experts_per_token=choices, ffn_hidden_size=48, init_std=0.1)
    model = replace(model, **KINDS[kind])
    if choices == 4:
        model.router_groups_chosen = model.router_groups
    return replace(config, model=model)


@pytest.fixture(scope="module")
def expected(small_corpora: Corpora) -> Oracles:
    """The run that a case has to equal, by the case of that run; each is run once."""
    return cache(lambda kind, oracle: whole_run(with_experts(kind, dict(oracle), small_corpora)))


@pytest.mark.parametrize(("kind", "case"), EVERY_CASE)
def test_layouts_match_one_process_and_predicted_traffic(
    small_corpora: Corpora, expected: Oracles, kind: str, case: Case
) -> None:
    config = with_experts(kind, case, small_corpora)
    validate(config, world_size(case))
    ranks: list[LayoutRun] = run_mesh(sizes_of(config), run_layout, config, timeout=120.0)
    check_equal(case, [rank.run for rank in ranks], expected(kind, tuple(oracle_of(case).items())))
    for number, rank in enumerate(ranks):
        predicted = predict_rank(config, rank.schedule, number, predictions=rank.predictions)
        assert counts_of(rank.traffic) == predicted.traffic()
        assert rank.state == predicted.state()
        if case["context"] != "2 all-to-all":
            assert "all_to_all" not in str(counts_of(rank.traffic))


@pytest.mark.parametrize(("kind", "case"), EVEN)
def test_evenly_used_experts_keep_what_is_predicted(small_corpora: Corpora, kind: str, case: Case) -> None:
    train_as_predicted(with_experts(kind, case, small_corpora, choices=4))


@pytest.mark.parametrize(
    ("sizes", "experts", "stage"),
    [
        ({"data": 4}, 2, 2),
        pytest.param({"data": 4}, 2, 3, marks=pytest.mark.exhaustive),
        pytest.param({"pipeline": 2, "data": 2}, 1, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_experts_shared_by_other_replicas_train_alike(
    corpus: str, sizes: dict[str, int], experts: int, stage: int
) -> None:
    """Experts as a state unit of their own, which another number of replicas shares than the rest of their block."""
    config = make_config(corpus, replace(LLAMA_SHAPE, num_experts=4, experts_per_token=4), schedule={"name": "1f1b"})
    [alone] = run_threads({}, run_layout, config)
    config.zero = ZeroConfig(stage=stage, expert_shard_size=experts)  # type: ignore[arg-type]
    config.parallel = replace(config.parallel, **sizes)
    ranks = predicted_and_counted(config)
    losses, expected = ([each.loss for each in rank.run.results] for rank in (ranks[0][1], alone))
    assert losses == pytest.approx(expected, rel=1e-6)
    for each in ranks:
        check_costs(*each)
    schedule = ranks[0][1].schedule
    own, apart_unit = (unit for unit in schedule.header.stage_states[0] if unit.layer == 1)
    assert (own.shards, apart_unit.shards) == (0, experts)
    assert (own.weights == "sharded", apart_unit.weights == "sharded") == (stage == 3, stage == 3 and experts > 1)
    assert loads(dumps(schedule)) == schedule
