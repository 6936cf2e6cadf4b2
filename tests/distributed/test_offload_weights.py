"""Weights that wait in host memory give the bits of weights that stay, under any schedule that flushes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_offload import STEPS, TIED, UNTIED, config_of, resident
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_bits, check_close
from tests.support.gpt_runs import run_gpt, write_shard
from tests.support.meshes import run_mesh

SLOW = pytest.mark.slow

WEIGHTS = {"optimizer": True, "weights": True}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("model", "schedule", "offload", "precision"),
    [
        (UNTIED, {"name": "1f1b"}, {}, "bf16"),
        pytest.param(UNTIED, {"name": "gpipe"}, {"weight_buffers": 3}, "fp32", marks=pytest.mark.exhaustive),
        pytest.param(TIED, {"name": "interleaved_1f1b"}, {}, "bf16", marks=pytest.mark.exhaustive),
        pytest.param(UNTIED, {"name": "modular"}, {"weight_buffers": 1}, "fp32", marks=pytest.mark.exhaustive),
        pytest.param(
            TIED, {"name": "1f1b", "two_bp": True}, {"weight_buffers": 1}, "fp32", marks=pytest.mark.exhaustive
        ),
        pytest.param(TIED, {"name": "zb_h1"}, {"activations": "blocks"}, "fp32", marks=pytest.mark.exhaustive),
    ],
)
def test_weights_that_come_and_go_give_the_bits_of_one_process_that_moves_nothing(
    corpus: str, model: str, schedule: dict[str, Any], offload: dict[str, Any], precision: str
) -> None:
    config = config_of(corpus, model, {"pipeline": 2}, WEIGHTS | offload, precision, **schedule)
    check_bits(run_mesh({"pipeline": 2}, run_gpt, config, STEPS), resident(corpus, model, precision))


@SLOW
def test_weight_halves_make_parts_again_without_the_weights(corpus: str) -> None:
    config = config_of(corpus, UNTIED, {"pipeline": 2}, WEIGHTS, name="zb_h1")
    config.recompute = replace(config.recompute, method="selective")
    check_bits(run_mesh({"pipeline": 2}, run_gpt, config, STEPS), resident(corpus, UNTIED))


@SLOW
@pytest.mark.parametrize(("schedule", "precision"), [("zb_v", "fp32"), ("gpipe", "bf16")])
def test_bert_is_the_same_too(tmp_path: Path, schedule: str, precision: str) -> None:
    layout, data, model = {"pipeline": 2}, write_corpus(tmp_path), POST_NORM if precision == "fp32" else PRE_NORM
    config = make_bert_config(data, model, parallel=layout, schedule={"name": schedule}, offload=WEIGHTS)
    plain = make_bert_config(data, model)
    for each in (config, plain):
        each.training = replace(each.training, precision=precision)  # type: ignore[arg-type]
    (expected,) = run_mesh({}, run_gpt, plain, STEPS)
    check_bits(run_mesh(layout, run_gpt, config, STEPS), expected)


@SLOW
@pytest.mark.parametrize("sizes", [{"data": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
def test_replicas_and_tensor_ranks_keep_theirs_in_host_memory_too(corpus: str, sizes: dict[str, int]) -> None:
    config = config_of(corpus, TIED, sizes, WEIGHTS, name="1f1b")
    config.parallel = replace(config.parallel, data=sizes.get("data", 1))
    check_close(run_mesh(sizes, run_gpt, config, STEPS), resident(corpus, TIED), 1e-5)
