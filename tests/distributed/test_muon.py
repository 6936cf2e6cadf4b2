"""Muon trains the same model on every layout, and resumes bit for bit on another one."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import assert_same_bits, config_in, run
from tests.support.equality import check_bits
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

MUON = {"name": "muon", "learning_rate": 5e-3}
MODELS = {"gpt2-tied": GPT2_SHAPE, "llama-untied": LLAMA_SHAPE}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def trained(corpus: str, model: str, sizes: dict[str, int], steps: int, **groups: dict[str, Any]) -> list[RankRun]:
    layout = {name: sizes.get(name, 1) for name in ("tensor", "pipeline")}
    config = make_config(corpus, MODELS[model], parallel=layout, optimizer=MUON, **groups)
    return run_mesh(sizes, run_gpt, config, steps)


@pytest.mark.parametrize("model", [pytest.param("gpt2-tied", marks=pytest.mark.exhaustive), "llama-untied"])
def test_every_layout_trains_the_same_model(corpus: str, model: str) -> None:
    """Newton and Schulz's iteration in bf16 makes more of a last bit than AdamW does: losses within 1e-3."""
    (expected,) = trained(corpus, model, {}, 6)
    check_bits(trained(corpus, model, {"pipeline": 2}, 6, schedule={"name": "zb_h1"}), expected)
    wanted = [result.loss for result in expected.results]
    assert wanted[-1] < wanted[0] - 0.05
    for sizes in ({"tensor": 2}, {"data": 2}):
        ranks = trained(corpus, model, sizes, 6)
        for rank in ranks:
            assert [result.loss for result in rank.results] == pytest.approx(wanted, rel=1e-3)
        assembled([rank.weights for rank in ranks])


@pytest.mark.parametrize(
    "training",
    [{}, pytest.param({"precision": "bf16", "master_weights": False}, marks=pytest.mark.exhaustive)],
    ids=["fp32", "bf16 alone"],
)
def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path: Path, corpus: str, training: dict[str, Any]) -> None:
    groups: dict[str, Any] = {"optimizer": MUON, "training": training}
    expected = run({}, config_in(tmp_path / "whole", corpus, LLAMA_SHAPE, **groups), 8)
    assert set(expected.tensors) == {"weights", "momentum", "first_moment", "second_moment"}
    assert "blocks.0.mlp.up.weight" not in expected.tensors["second_moment"]
    config = config_in(tmp_path / "parts", corpus, LLAMA_SHAPE, **groups)
    run({"pipeline": 2}, config, 4)
    assert_same_bits(run({}, config, 8), expected)
