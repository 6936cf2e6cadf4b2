"""A vocabulary that all pipeline ranks share trains and evaluates what one process does."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.config import ConfigError
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.prediction import predict_rank
from megapipe.layout.walk import ACTING
from megapipe.schedules.actions import KIND, Kind, kind_mask
from megapipe.training.validation import validate
from tests.distributed.test_slices import evaluated
from tests.support.equality import check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config, run_gpt, write_shard
from tests.support.layout_runs import LayoutRun, run_layout
from tests.support.meshes import run_mesh, run_threads
from tests.support.patience import undisturbed

DROPPING = replace(GPT2_SHAPE, tie_embeddings=False, embedding_dropout=0.1, hidden_dropout=0.1)
SCALED = replace(LLAMA_SHAPE, tie_embeddings=False, logit_scale=0.7, logit_softcap=3.0)
SECOND = {"parallel": {"vocabulary": "pipeline_2"}}
NUMBERS = 512
"""Bytes of a step's own numbers, which no layer declares."""


def configurations(
    folder: Path, model: ModelConfig, sizes: dict[str, int], **groups: dict[str, Any]
) -> tuple[PretrainConfig, PretrainConfig]:
    """A run of one process, and one whose pipeline ranks share the output layer."""
    prefix = write_shard(folder)
    groups["parallel"] = {"vocabulary": "pipeline", **sizes, **groups.get("parallel", {})}
    return make_config(prefix, model), make_config(prefix, model, **groups)


@pytest.mark.parametrize(
    ("model", "sizes", "groups"),
    [
        (DROPPING, {"pipeline": 2}, {}),
        (SCALED, {"pipeline": 4}, {"schedule": {"name": "zb_h1"}}),
        (SCALED, {"pipeline": 2, "tensor": 2}, {"schedule": {"name": "zb_v"}}),
        (SCALED, {"pipeline": 2}, {**SECOND, "schedule": {"name": "zb_v"}}),
        (GPT2_SHAPE, {"pipeline": 2}, {"schedule": {"name": "zb_h1"}}),
        pytest.param(
            replace(SCALED, num_layers=6), {"pipeline": 4}, {"schedule": {"name": "zb_v"}}, marks=pytest.mark.slow
        ),
        pytest.param(
            replace(SCALED, num_layers=6),
            {"pipeline": 4},
            {"schedule": {"name": "v_half"}},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(GPT2_SHAPE, {"pipeline": 4}, SECOND, marks=pytest.mark.slow),
        pytest.param(
            GPT2_SHAPE, {"pipeline": 2, "data": 2}, {"zero": {"stage": 1}, **SECOND}, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            SCALED,
            {"pipeline": 2, "tensor": 2},
            {**SECOND, "schedule": {"name": "v_half"}},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            DROPPING, {"pipeline": 2, "data": 2}, {**SECOND, "zero": {"stage": 3}}, marks=pytest.mark.exhaustive
        ),
        pytest.param(DROPPING, {"pipeline": 2, "data": 2}, {"zero": {"stage": 3}}, marks=pytest.mark.slow),
        pytest.param(
            DROPPING, {"pipeline": 2, "context": 2}, {"schedule": {"name": "interleaved_1f1b"}}, marks=pytest.mark.slow
        ),
    ],
)
def test_shards_of_the_vocabulary_train_as_one_process(
    tmp_path: Path, model: ModelConfig, sizes: dict[str, int], groups: dict[str, dict[str, Any]]
) -> None:
    whole, config = configurations(tmp_path, model, sizes, **groups)
    validate(config, prod(sizes.values()))
    (oracle,) = run_threads({}, run_gpt, whole, 2)
    check_close(run_threads(sizes, run_gpt, config, 2), oracle, first_loss=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes", "groups"),
    [
        (replace(LLAMA_SHAPE, num_layers=4), {"pipeline": 2}, {}),
        (replace(LLAMA_SHAPE, num_layers=3), {"pipeline": 2}, {**SECOND, "schedule": {"name": "zb_v"}}),
    ],
)
def test_every_action_leaves_the_bytes_of_the_walk(
    tmp_path: Path, model: ModelConfig, sizes: dict[str, int], groups: dict[str, dict[str, Any]]
) -> None:
    _, config = configurations(tmp_path, model, sizes, **groups)
    ranks = undisturbed(
        lambda: run_mesh(sizes, run_layout, config, timeout=120.0),
        lambda ranks: all(most_wrong(config, *each) <= NUMBERS for each in enumerate(ranks)),
    )
    assert [most_wrong(config, *each) for each in enumerate(ranks)] == pytest.approx([0] * len(ranks), abs=NUMBERS)


def most_wrong(config: PretrainConfig, number: int, rank: LayoutRun) -> int:
    """Return the largest difference of counted and predicted bytes after any action, of any part or of all."""
    predicted = predict_rank(config, rank.schedule, number)
    kinds = rank.schedule.sections.body[predicted.pipeline_rank][:, KIND]
    kinds = kinds[kind_mask(kinds, *ACTING)]
    compared = [kind for kind in ACTING if kind != Kind.UPDATE]  # several of these are one instruction
    walked = np.stack(predicted.timeline[:5], axis=1)[kind_mask(kinds, *compared)]
    counted = np.array([sample for action, sample in rank.samples if action.kind in compared])
    assert [action.kind for action, _ in rank.samples if action.kind in compared] == [
        kind for kind in kinds.tolist() if kind in compared
    ]
    wrong = counted - walked
    return int(max(np.abs(wrong).max(), np.abs(wrong.sum(axis=1)).max()))


@pytest.mark.parametrize(
    ("model", "groups", "reason"),
    [
        (SCALED, {"parallel": {"pipeline": 1}}, "parallel.pipeline is 1"),
        (SCALED, {"parallel": {"tensor": 2, "sequence": True}}, "parallel.sequence is true"),
        (SCALED, {"recompute": {"logits": True}}, "recompute.logits is true"),
        (SCALED, {"schedule": {"name": "2bw"}}, "2bw never flushes, so its output layer cannot be sharded"),
        (SCALED, {"schedule": {"name": "dualpipe_v"}}, "dualpipe_v overlaps forwards with backwards"),
        (SCALED, {"schedule": {"name": "seq1f1b"}}, "seq1f1b passes slices of sequences"),
    ],
)
def test_what_shards_do_not_support_is_refused(
    tmp_path: Path, model: ModelConfig, groups: dict[str, dict[str, Any]], reason: str
) -> None:
    parallel = {"pipeline": 2, **groups.get("parallel", {})}
    _, config = configurations(tmp_path, model, parallel, **{k: v for k, v in groups.items() if k != "parallel"})
    with pytest.raises(ConfigError, match=reason):
        validate(config, parallel["pipeline"] * parallel.get("tensor", 1))


def test_evaluation_with_shards_has_one_process_loss(tmp_path: Path) -> None:
    whole, config = configurations(tmp_path, SCALED, {"pipeline": 2})
    (expected,) = run_threads({}, evaluated, whole)
    assert run_threads({"pipeline": 2}, evaluated, config) == pytest.approx([expected] * 2, rel=1e-6)
