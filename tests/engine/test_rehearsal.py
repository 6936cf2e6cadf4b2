"""A rehearsal computes what a step computes, sends nothing between stages, and leaves no trace in what follows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.config.bert import BertDataConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.step import StepInput, StepResult
from megapipe.engine.transfers import Sender
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.actions import Kind
from megapipe.training.loop.replica import Replica
from tests.distributed.test_covering import CASES, name_of
from tests.support.bert_runs import write_corpora
from tests.support.covering import Case
from tests.support.gpt_runs import Shard, load_batches, shards, train_step
from tests.support.layouts import config_of, sizes_of, world_size
from tests.support.meshes import run_mesh, run_threads

PIPELINES = sorted((case for case in CASES if case["pipeline"] != "1"), key=world_size)
FAST = [next(case for case in PIPELINES if case["schedule"] == name) for name in ("zb_v", "2bw")]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, BertDataConfig]:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


def marked(case: Case) -> Any:
    if case in FAST:
        return case
    return pytest.param(case, marks=(pytest.mark.slow, pytest.mark.one_in(10)))


def run(
    mesh: Mesh, config: PretrainConfig, rehearsed: Sequence[int]
) -> tuple[list[StepResult], list[Shard], set[Kind]]:
    """Train for two steps, some of them rehearsed; the results, the weights, and what the rehearsals ran."""
    replica = Replica(config, mesh)
    results, ran = [], set()
    for step, batch in enumerate(load_batches(replica, config, mesh, 2)):
        if step in rehearsed:
            ran |= rehearse(replica, StepInput(step, batch.contexts, batch.token_counts))
        results.append(train_step(replica, config, batch, step))
    states = replica.states()
    return results, shards(states, [state.master for state in states]), ran


def rehearse(replica: Replica, given: StepInput) -> set[Kind]:
    """Rehearse on this rank, and return the kinds of the actions that ran."""
    engine, ran = replica.engine, set()
    execute = engine._execute

    def watched(section: Any, steps: Any) -> None:
        ran.update(each.action.kind for each in engine._sections[section])
        execute(section, steps)

    engine._execute = watched  # type: ignore[method-assign]
    engine.rehearse(given)
    engine._execute = execute  # type: ignore[method-assign]
    return ran


@pytest.mark.parametrize("case", [marked(case) for case in PIPELINES], ids=name_of)
def test_a_rehearsed_run_is_the_run_without(corpora: tuple[str, BertDataConfig], case: Case) -> None:
    config = config_of(case, *corpora)
    plain = run_threads(sizes_of(config), run, config, ())
    rehearsed = run_threads(sizes_of(config), run, config, (0, 1))
    for (results, weights, _), (others, same, ran) in zip(plain, rehearsed, strict=True):
        assert results == others
        assert all(torch.equal(mine.values, theirs.values) for mine, theirs in zip(weights, same, strict=True))
        assert {Kind.FORWARD, Kind.REDUCE_SCALARS, Kind.UPDATE} <= ran


def test_nothing_crosses_between_stages(corpora: tuple[str, BertDataConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of({**FAST[0], "schedule": "1f1b"}, *corpora)
    monkeypatch.setattr(Sender, "send", lambda self, tensors: pytest.fail("a rehearsal sends"))
    run_threads(sizes_of(config), _rehearse_alone, config)


def _rehearse_alone(mesh: Mesh, config: PretrainConfig) -> None:
    replica = Replica(config, mesh)
    (batch,) = load_batches(replica, config, mesh)
    replica.engine.rehearse(StepInput(0, batch.contexts, batch.token_counts))


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["zb_h1", "pipedream"])
def test_modules_of_a_user_train_as_without(schedule: str) -> None:
    runs = (run_mesh({"pipeline": 2}, _train_modules, schedule, rehearsed) for rehearsed in (True, False))
    for plain, rehearsed in zip(*runs, strict=True):
        assert plain.keys() == rehearsed.keys()
        assert all(torch.equal(value, rehearsed[name]) for name, value in plain.items())


def _train_modules(mesh: Mesh, schedule: str, rehearsed: bool) -> dict[str, Tensor]:
    """rehearsed: what the pipeline takes to be done. Every module draws random numbers."""
    layers = [lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5)) for _ in range(4)]
    torch.manual_seed(1)
    sample = torch.zeros(4, 8)
    loss = nn.MSELoss(reduction="sum")
    optimizer = OptimizerConfig(clip_norm=None)
    pipeline = Pipeline(layers, mesh, loss=loss, sample=sample, microbatches=4, schedule=schedule, optimizer=optimizer)
    pipeline._rehearsed = rehearsed
    rows = torch.linspace(-1.0, 1.0, 16 * 8).view(16, 8)
    for _ in range(2):
        pipeline.step(rows, rows.flip(0), learning_rate=1e-2)
    pipeline.drain()
    assert pipeline._rehearsed
    return pipeline.state_dict()
