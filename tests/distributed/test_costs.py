"""Costs that the covering array does not show: peaks of whole steps, sums of a step, what auto decides."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from megapipe.config.memory import OffloadConfig, RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.layout.prediction import predict_rank
from megapipe.layout.walk import ACTING
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.actions import KIND, Kind, kind_mask
from megapipe.spec.layers import model_layers
from megapipe.training.loop.replica import Replica
from tests.distributed.conftest import Make
from tests.distributed.layout_cases import (
    EXHAUSTIVE,
    ONE,
    P2,
    P4,
    STEPS,
    Groups,
    every,
    parallel,
    schedule,
)
from tests.distributed.test_covering import NUMBERS
from tests.spec.sizes import message_bytes, predicted_bytes
from tests.support.equality import check_bits
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, load_batches, make_config, run_gpt
from tests.support.layout_runs import LayoutRun, run_layout
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_mesh, run_threads
from tests.support.patience import undisturbed
from tests.training.test_offload_plan import MODEL, auto


def peak(mesh: Mesh, config: PretrainConfig) -> int:
    """Return the peak of the bytes that the second step allocates."""
    replica = Replica(config, mesh)
    (batch,) = load_batches(replica, config, mesh)
    replica.engine.run(StepInput(0, batch.contexts, batch.token_counts, 1e-3))
    with LiveBytes() as live:
        replica.engine.run(StepInput(1, batch.contexts, batch.token_counts, 1e-3))
    return live.peak


@pytest.mark.parametrize(
    ("blocks", "inputs", "inside"),
    [(2, 2, 2), *(pytest.param(*case, marks=EXHAUSTIVE) for case in ((1, 4, 1), (4, 1, 4)))],
)
def test_a_rank_keeps_inputs_and_one_group_of_blocks(corpus: str, blocks: int, inputs: int, inside: int) -> None:
    """gpipe keeps the inputs of all micro-batches, the activations that one micro-batch recomputes, and throughout
    those of the heads."""
    model = replace(GPT2_SHAPE, num_layers=4, attention="unfused")
    config = make_config(corpus, model, **schedule("gpipe"), **every(blocks))
    microbatches = config.batch.global_size // config.batch.micro_size
    shape = config.batch.micro_size, config.data.sequence_length
    stream = message_bytes(model, *shape, "fp32")
    layers = {layer.kind: predicted_bytes(model, layer, *shape, "fp32", "unfused") for layer in model_layers(model)}
    expected = microbatches * (inputs * stream + layers["head"]) + inside * layers["block"]
    (peak_bytes,) = run_threads(ONE, peak, config)
    assert 0.9 * expected < peak_bytes < 1.1 * expected + 2 * stream
    (everything,) = run_threads(ONE, peak, replace(config, recompute=RecomputeConfig()))
    assert everything > microbatches * 4 * layers["block"]


def filled_fields(mesh: Mesh, config: PretrainConfig) -> set[str]:
    """Return the fields of a micro-batch that a stage has read."""
    (batch,) = load_batches(Replica(config, mesh), config, mesh)
    names = [{name for name, value in vars(context).items() if value is not None} for context in batch.contexts]
    assert all(one == other for one, other in itertools.pairwise(names))
    return names[0]


def test_only_the_ends_of_a_pipeline_read_tokens(make: Make) -> None:
    for rank, fields in enumerate(run_threads(P4, filled_fields, make("bert-post", P4))):
        assert ("tokens" in fields) == (rank == 0)
        assert ("labels" in fields) == (rank == 3)
        assert {"lengths", "ordinals"} <= fields


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        (4, parallel(vocabulary="pipeline")),
        (3, {**parallel(vocabulary="pipeline_2"), **schedule("zb_v")}),
        (6, every(2)),
    ],
)
def test_every_action_leaves_the_bytes_of_the_walk(corpus: str, layers: int, groups: Groups) -> None:
    config = make_config(corpus, replace(LLAMA_SHAPE, num_layers=layers), **groups)
    config.parallel = replace(config.parallel, pipeline=2)
    ranks = undisturbed(
        lambda: run_mesh(P2, run_layout, config, timeout=120.0),
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


def run_and_plan(mesh: Mesh, config: PretrainConfig) -> tuple[RankRun, str]:
    return run_gpt(mesh, config, STEPS), " ".join(Replica(config, mesh).remarks)


def test_auto_moves_and_recomputes_without_changing_a_bit(corpus: str) -> None:
    """Two of six blocks are kept, two moved and two recomputed."""
    plain = make_config(corpus, MODEL, **schedule("gpipe"))
    mixed = replace(plain, offload=OffloadConfig(**auto(22.0, 0.6)))
    (actual,), (expected,) = (run_threads(ONE, run_and_plan, each) for each in (mixed, plain))
    assert "2 keep, 2 move, 2 recompute (rmrmkk)" in actual[1]
    check_bits([actual[0]], expected[0])
