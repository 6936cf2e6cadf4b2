"""Muon over state that replicas share out: the steps of plain replicas, and checkpoints that move between them."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megapipe.config.run import PretrainConfig
from tests.checkpoint.runs import Outcome, assert_same_bits, config_in, run
from tests.support.bert_runs import PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_gradients
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, run_gpt, write_shard
from tests.support.meshes import Backend, run_mesh

STEPS = 3
MUON = {"name": "muon", "learning_rate": 5e-3}
MODELS = {"gpt2-tied": GPT2_SHAPE, "llama-untied": LLAMA_SHAPE}
DATA, TENSOR, PIPELINE = ({"data": 2}, {"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def config_of(corpus: str, model: str, sizes: dict[str, int], **groups: dict[str, Any]) -> PretrainConfig:
    layout = {name: sizes.get(name, 1) for name in ("data", "tensor", "pipeline")}
    return make_config(corpus, MODELS[model], parallel=layout, **({"optimizer": MUON} | groups))


def trained(
    corpus: str, model: str, sizes: dict[str, int], backend: Backend = "threads", **groups: dict[str, Any]
) -> list[RankRun]:
    ranks: list[RankRun] = run_mesh(sizes, run_gpt, config_of(corpus, model, sizes, **groups), STEPS, backend=backend)
    return ranks


LAYERED = {"schedule": {"name": "modular", "chunks": 4}}
BF16 = {"training": {"precision": "bf16"}}
NO_MASTER = {"training": {"precision": "bf16", "master_weights": False}}
slow = pytest.mark.slow
CASES = [
    pytest.param("llama-untied", DATA, (3,), LAYERED),
    pytest.param("llama-untied", DATA, (1, 2), LAYERED, marks=pytest.mark.exhaustive),
    pytest.param("gpt2-tied", DATA, (1, 2, 3), {**LAYERED, **BF16}, marks=pytest.mark.exhaustive),
    pytest.param("llama-untied", TENSOR, (3,), LAYERED, marks=pytest.mark.exhaustive),
    pytest.param("gpt2-tied", PIPELINE, (1,), {"schedule": {"name": "zb_h1"}}, marks=pytest.mark.exhaustive),
    pytest.param("llama-untied", PIPELINE, (1,), {"schedule": {"name": "2bw"}}, marks=pytest.mark.exhaustive),
    pytest.param("llama-untied", DATA, (3,), {**LAYERED, **NO_MASTER}, marks=pytest.mark.exhaustive),
    pytest.param("gpt2-tied", DATA, (2,), {**LAYERED, "offload": {"optimizer": True}}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("model", "sizes", "stages", "groups"), CASES)
def test_two_replicas_get_the_bits_of_plain_ones(
    corpus: str, model: str, sizes: dict[str, int], stages: tuple[int, ...], groups: dict[str, Any]
) -> None:
    """Two numbers have one sum in any order, and layered gradients are reduced once. Only the gradient norm is added
    up in other parts, so none is taken."""
    groups = {"optimizer": {**MUON, "clip_norm": None}, **groups}
    plain = trained(corpus, model, sizes, **groups)
    for stage in stages:
        check_same(trained(corpus, model, sizes, **groups, zero={"stage": stage}), plain)


@slow
def test_a_bert_does_too(tmp_path: Path) -> None:
    """Its head has matrices behind a table and a long bias, which are cut anywhere."""
    data = write_corpus(tmp_path)
    model = replace(PRE_NORM, num_layers=2, tie_embeddings=False)
    groups: dict[str, dict[str, Any]] = {"parallel": {**DATA}, "optimizer": {**MUON, "clip_norm": None}, **LAYERED}
    plain, shared = (
        run_mesh(
            DATA, run_gpt, make_bert_config(data, model, zero={"stage": stage}, **groups), STEPS, backend="threads"
        )
        for stage in (0, 3)
    )
    check_same(shared, plain)


def check_same(ranks: list[RankRun], expected: list[RankRun]) -> None:
    """Losses, first gradients and final weights, bit for bit."""
    for rank, other in zip(ranks, expected, strict=True):
        assert [result.loss for result in rank.results] == [result.loss for result in other.results]
    for kind in ("gradients", "weights"):
        found, wanted = (assembled([getattr(rank, kind) for rank in run]) for run in (ranks, expected))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), f"{kind} of {name}"


@pytest.mark.parametrize(
    ("zero", "backend"),
    [
        ({"stage": 1, "shard_size": 2}, "threads"),
        pytest.param({"stage": 3}, "processes", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_four_replicas_train_what_one_process_trains(corpus: str, zero: dict[str, Any], backend: Backend) -> None:
    """Their shards cut the longest matrix. Losses within 1e-3: the iteration in bf16 makes more of a last bit."""
    (expected,) = trained(corpus, "llama-untied", {})
    ranks = trained(corpus, "llama-untied", {"data": 4}, backend, zero=zero)
    wanted = [result.loss for result in expected.results]
    for rank in ranks:
        assert [result.loss for result in rank.results] == [result.loss for result in ranks[0].results]
    assert [result.loss for result in ranks[0].results] == pytest.approx(wanted, rel=1e-3)
    check_gradients(assembled([rank.gradients for rank in ranks]), assembled([expected.gradients]))
    assembled([rank.weights for rank in ranks])


@slow
def test_checkpoints_move_between_shards(tmp_path: Path, corpus: str) -> None:
    """Whatever layout saved it, the next one reads the same bits of weights and moments."""
    plain = config_in(tmp_path, corpus, LLAMA_SHAPE, optimizer=MUON)

    def after(step: int, sizes: dict[str, int], stage: Literal[0, 1, 2, 3]) -> Outcome:
        return run(sizes, replace(plain, zero=replace(plain.zero, stage=stage)), step)

    shared = after(2, {"data": 4}, 3)
    for layout in ((DATA, 1), ({}, 0)):
        assert_same_bits(after(2, *layout), shared)
    alone = after(3, {}, 0)
    assert_same_bits(after(3, TENSOR, 2), alone)
