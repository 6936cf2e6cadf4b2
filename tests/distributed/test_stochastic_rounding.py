"""Weights in bf16 alone are the same on every layout that gives the same gradients, and resume bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import assert_same_bits, config_in, run
from tests.support.equality import check_bits
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, assembled, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

TRAINING = {"precision": "bf16", "master_weights": False}
MODELS = {"gpt2-tied": GPT2_SHAPE, "llama-untied": LLAMA_SHAPE}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("model", [pytest.param("gpt2-tied", marks=pytest.mark.exhaustive), "llama-untied"])
def test_pipelines_give_the_bits_of_one_process(corpus: str, model: str) -> None:
    (expected,) = run_mesh({}, run_gpt, make_config(corpus, MODELS[model], training=TRAINING), 4)
    assert all(shard.values.dtype == torch.bfloat16 for shard in expected.weights)
    for schedule in ("1f1b", "zb_h1"):
        layout: dict[str, Any] = {"parallel": {"pipeline": 2}, "schedule": {"name": schedule}}
        config = make_config(corpus, MODELS[model], training=TRAINING, **layout)
        check_bits(run_mesh({"pipeline": 2}, run_gpt, config, 4), expected)


def test_tensor_ranks_round_replicated_parameters_alike(corpus: str) -> None:
    """`assembled` insists on equal copies; sums in another order leave nearly all of the weights the same."""
    config = make_config(corpus, LLAMA_SHAPE, training=TRAINING)
    (expected,) = run_mesh({}, run_gpt, config, 1)
    ranks = run_mesh(
        {"tensor": 2}, run_gpt, make_config(corpus, LLAMA_SHAPE, training=TRAINING, parallel={"tensor": 2}), 1
    )
    found, wanted = assembled([rank.weights for rank in ranks]), assembled([expected.weights])
    same = sum(int((found[name] == wanted[name]).sum()) for name in wanted)
    assert same > 0.97 * sum(each.numel() for each in wanted.values())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path: Path, corpus: str, schedule: str) -> None:
    groups: dict[str, Any] = {
        "training": TRAINING,
        "schedule": {"name": schedule},
        "optimizer": {"moment_dtype": "bf16"},
    }
    expected = run({"pipeline": 2}, config_in(tmp_path / "whole", corpus, GPT2_SHAPE, **groups), 8)
    config = config_in(tmp_path / "parts", corpus, GPT2_SHAPE, **groups)
    run({"pipeline": 2}, config, 4)
    sizes = {"pipeline": 2} if schedule == "2bw" else {}
    assert_same_bits(run(sizes, config, 8), expected)


@pytest.mark.parametrize(
    ("sizes", "stage"),
    [
        ({"data": 2}, 3),
        pytest.param({"data": 2}, 1, marks=pytest.mark.exhaustive),
        pytest.param({"data": 2, "tensor": 2}, 1, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_replicas_that_share_weights_out_round_them_as_whole_ones_do(
    corpus: str, sizes: dict[str, int], stage: int
) -> None:
    # Without clipping: shards add the squares of the norm in another order, and its last bits reach every update.
    groups = {"training": TRAINING, "parallel": sizes, "optimizer": {"clip_norm": None}}
    plain = make_config(corpus, LLAMA_SHAPE, **groups)
    shared = make_config(corpus, LLAMA_SHAPE, **groups, zero={"stage": stage})
    wanted, found = (
        assembled([rank.weights for rank in run_mesh(sizes, run_gpt, config, 3)]) for config in (plain, shared)
    )
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
