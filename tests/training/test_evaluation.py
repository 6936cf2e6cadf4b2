"""Evaluation: the token-weighted mean over the same samples, on every layout."""

import math
from dataclasses import replace

import pytest
import torch

from megapipe.config.parallel import MeshShape, ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepResult
from megapipe.layers.context import MicrobatchContext
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.batches import open_samples
from megapipe.training.loop.replica import Replica
from megapipe.training.loop.steps import Evaluator, batch_sums, perplexity
from megapipe.training.observe.records import EvaluationRecord
from tests.support.gpt_runs import GPT2_SHAPE, make_config, opened
from tests.support.meshes import run_mesh

RARE = pytest.mark.exhaustive
BOTH = {"data": 2, "pipeline": 2}
DROPPING = replace(GPT2_SHAPE, hidden_dropout=0.3, embedding_dropout=0.3)
"""Dropout that an evaluation must not apply."""


def configuration(corpus: str, samples: int, sizes: dict[str, int] | None = None) -> PretrainConfig:
    return make_config(
        corpus,
        DROPPING,
        data={"split": "80,20,0"},
        evaluation={"every": 1, "samples": samples},
        parallel={"timeout_seconds": 30.0, **(sizes or {})},
    )


def evaluate(mesh: Mesh, config: PretrainConfig) -> tuple[EvaluationRecord, EvaluationRecord]:
    replica = Replica(config, mesh)
    evaluation = Evaluator(config, mesh, replica, open_samples(config, "validation"))
    return evaluation.run(3), evaluation.run(4)


def one_by_one(config: PretrainConfig, limit: int) -> tuple[float, int]:
    """Mean loss and number of predictions of the first windows, one at a time through the bare modules."""
    samples = open_samples(config, "validation")
    replica = Replica(config, connected_mesh(MeshShape({}), torch.device("cpu")))
    loss_sum, count = 0.0, 0
    for ordinal in range(min(limit, len(samples))):
        window = torch.from_numpy(samples.tokens(ordinal)[None])
        mask = torch.arange(window.shape[1] - 1)[None] < int(samples.num_labels(ordinal))
        for boundary in samples.boundaries([ordinal])[0]:
            mask[0, boundary - 1] = False
        context = MicrobatchContext(
            tokens=window[:, :-1], labels=window[:, 1:], loss_mask=mask.float(), ordinals=torch.tensor([ordinal]),
            training=False,
        )  # fmt: skip
        hidden: tuple[torch.Tensor, ...] = ()
        with torch.no_grad():
            for versions in replica.stages[0].units:
                hidden = versions[0](*hidden, context=context)
        loss_sum += float(hidden[0])
        count += int(mask.sum())
    return loss_sum / count, count


@pytest.mark.parametrize("samples", [3, 10, 1000])
def test_the_mean_is_over_tokens_of_whole_batches(corpus: str, samples: int) -> None:
    config = configuration(corpus, samples)
    (record, again), = run_mesh({}, evaluate, config, backend="threads")  # fmt: skip
    loss, count = one_by_one(config, limit=math.ceil(samples / 8) * 8)
    assert record.loss == pytest.approx(loss, rel=1e-6)
    assert record.loss_tokens == count
    assert record.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert (record.step, again.step) == (3, 4)
    assert again.loss == record.loss


@pytest.mark.parametrize(
    ("sizes", "tolerance"),
    [
        (BOTH, 0.0),
        ({"tensor": 2}, 1e-6),
        pytest.param({"pipeline": 2}, 0.0, marks=RARE),
        pytest.param({"data": 2}, 0.0, marks=RARE),
        pytest.param({"tensor": 2, "pipeline": 2}, 1e-6, marks=RARE),
    ],
    ids=str,
)
def test_every_layout_and_rank_gets_the_same_loss(corpus: str, sizes: dict[str, int], tolerance: float) -> None:
    ((expected, _),) = run_mesh({}, evaluate, configuration(corpus, 20), backend="threads")
    for record, _ in run_mesh(sizes, evaluate, configuration(corpus, 20, sizes), backend="threads"):
        assert record.loss == pytest.approx(expected.loss, rel=tolerance, abs=0.0)
        assert record.loss_tokens == expected.loss_tokens


def evaluate_trained(mesh: Mesh, config: PretrainConfig) -> float:
    """Evaluate after three updates, so that the weight versions differ."""
    replica, given = opened(mesh, config)
    for step in range(3):
        replica.engine.feed(given(step))
    replica.engine.drain()
    return Evaluator(config, mesh, replica, open_samples(config, "validation")).run(3).loss


def test_evaluation_uses_the_newest_version_also_if_sharded(corpus: str) -> None:
    config = configuration(corpus, 20, BOTH)
    config.schedule = replace(config.schedule, name="2bw")
    config.optimizer = replace(config.optimizer, clip_norm=None)
    expected = run_mesh(BOTH, evaluate_trained, config, backend="threads")
    assert expected[0] < run_mesh(BOTH, evaluate, config, backend="threads")[0][0].loss
    config.zero = ZeroConfig(stage=3, gradient_buffers=8)
    assert run_mesh(BOTH, evaluate_trained, config, backend="threads") == expected


def test_perplexity_beyond_a_float_is_infinite() -> None:
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


@pytest.mark.parametrize("counts", [(5.0, 7.0), ((5.0, 2.0), (7.0, 1.0))])
def test_sums_of_a_batch_are_by_term(counts: tuple[float | tuple[float, ...], ...]) -> None:
    terms = 1 if isinstance(counts[0], float) else 2
    sums = batch_sums(StepResult(0, 0.0, 0.0, outputs=((torch.ones(terms),), (torch.ones(terms),))), counts)
    assert sums[:2].tolist() == [[2.0] * terms, [12.0, 3.0][:terms]]
    assert sums[2].isnan().all()
