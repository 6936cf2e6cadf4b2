"""Tiny GPT runs that save and resume, on any mesh."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.checkpoint.shards import parts_of, shards_of
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.optim.scaling import learning_rate
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.batches import open_loader, open_samples
from megapipe.training.loop.checkpoints import Checkpointer
from megapipe.training.loop.replica import Replica
from tests.support.gpt_runs import Shard, assembled, make_config, shards
from tests.support.meshes import Backend, run_mesh

Sizes = dict[str, int]


@dataclass(frozen=True)
class RankOutcome:
    """Result of one rank. losses: of the whole run, as (step, loss), with those of the checkpoint.

    start: the step from which it resumed. said: lines of rank 0. kept: kind -> this rank's shards at the end; loaded:
    those at the start.
    """

    losses: list[tuple[int, float]]
    start: int
    said: list[str]
    kept: dict[str, list[Shard]]
    loaded: dict[str, list[Shard]]


@dataclass(frozen=True)
class Outcome:
    """Result of all ranks. tensors, loaded: kind -> name -> whole tensor, at the end and at the start."""

    losses: list[tuple[int, float]]
    start: int
    said: list[str]
    tensors: dict[str, dict[str, Tensor]]
    loaded: dict[str, dict[str, Tensor]]


def config_in(folder: Path, corpus: str, model: ModelConfig, **groups: dict[str, Any]) -> PretrainConfig:
    """Return a run of 20 steps that saves every ten steps, between two steps, in `folder`."""
    config = make_config(corpus, model)
    config.checkpoint = replace(config.checkpoint, every=10, asynchronous=False)
    config = replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})
    config.training = replace(config.training, directory=str(folder))
    return config


def run(sizes: Sizes, config: PretrainConfig, until: int, backend: Backend = "threads") -> Outcome:
    """Resume or start on a mesh of `sizes`, train until step `until`, saving as configured and at the end."""
    layout: dict[str, Any] = {name: sizes.get(name, 1) for name in ("data", "pipeline", "context", "tensor")}
    parallel = replace(config.parallel, **layout, timeout_seconds=30.0)
    ranks: list[RankOutcome] = run_mesh(sizes, train, replace(config, parallel=parallel), until, backend=backend)
    assert all(rank.losses == ranks[0].losses for rank in ranks)
    kept, loaded = (whole_tensors([getattr(rank, when) for rank in ranks]) for when in ("kept", "loaded"))
    return Outcome(ranks[0].losses, ranks[0].start, ranks[0].said, kept, loaded)


def whole_tensors(ranks: Sequence[dict[str, list[Shard]]]) -> dict[str, dict[str, Tensor]]:
    """Return kind -> name -> whole tensor from the shards of all ranks."""
    kinds = {kind for rank in ranks for kind in rank}
    return {kind: assembled([rank.get(kind, []) for rank in ranks]) for kind in sorted(kinds)}


def train(mesh: Mesh, config: PretrainConfig, until: int) -> RankOutcome:
    """Run one rank of `run`."""
    said: list[str] = []
    with Checkpointer(config, mesh, said.append) as checkpointer:
        replica = Replica(config, mesh)
        resumed = checkpointer.restore(replica)
        loaded = kept(replica)
        start, consumed = (0, 0) if resumed is None else (resumed.step, resumed.consumed_samples)
        losses = [] if resumed is None else list(resumed.losses)
        loader = open_loader(config, mesh, replica, open_samples(config, "train"))
        for step in range(start, until):
            batch = loader.load(consumed)
            rate = learning_rate(config.optimizer, step + 1, config.training.steps)
            scaler = replica.loss_scaler
            scale = 1.0 if scaler is None else scaler.scale(step)
            copies = checkpointer.saves.background.take_snapshot()
            given = StepInput(step, batch.contexts, batch.token_counts, rate, loss_scale=scale, snapshot=copies)
            results = replica.engine.feed(given)
            consumed += config.batch.global_size
            last = step + 1 == until
            saving = checkpointer.saves.is_due(step + 1, last)
            if last or saving:
                results += replica.engine.drain()
            for result in results if scaler is not None else ():
                scaler.observe(result.step, result.skipped)
            losses += [(result.step + 1, result.loss) for result in results]
            if saving:
                checkpointer.save(replica, step + 1, consumed, losses)
        return RankOutcome(losses, start, said, kept(replica), loaded)


def initial_weights(mesh: Mesh, config: PretrainConfig) -> list[Shard]:
    """Return this rank's weights of a run that starts with those of `init_from`."""
    layout = {name: mesh.size(name) for name in ("tensor", "pipeline")}
    config = replace(config, parallel=replace(config.parallel, **layout))  # type: ignore[arg-type]
    with Checkpointer(config, mesh) as checkpointer:
        replica = Replica(config, mesh)
        assert checkpointer.restore(replica) is None
    states = replica.states()
    assert all(state.newest == 0 and not state.moments for state in states)
    return shards(states, [state.master for state in states])


def kept(replica: Replica) -> dict[str, list[Shard]]:
    """Return the weights of all versions and the moments of this rank."""
    parts: dict[str, list[Shard]] = {}
    for shard in shards_of(replica.states()):
        for kind, part in parts_of(shard).items():
            spec, box = shard.segment.spec, shard.segment.box
            parts.setdefault(kind, []).append(
                Shard(spec.name, spec.shape, box, shard.state.held(shard.segment), part.clone())
            )
    return parts


def assert_same_bits(actual: Outcome, expected: Outcome) -> None:
    """Check that losses, weights and moments are equal, bit for bit."""
    assert actual.losses == expected.losses
    assert actual.tensors.keys() == expected.tensors.keys()
    for kind, tensors in expected.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(actual.tensors[kind][name], tensor), f"{kind} of {name}"


def assert_close(actual: Outcome, expected: Outcome) -> None:
    """Check that losses and weights differ only by the order of sums."""
    wanted = [loss for _, loss in expected.losses]
    assert [loss for _, loss in actual.losses] == pytest.approx(wanted, rel=1e-4)
    for name, tensor in expected.tensors["weights"].items():
        difference = float((actual.tensors["weights"][name] - tensor).double().norm())
        assert difference <= 1e-3 * float(tensor.double().norm()) + 1e-3, name
