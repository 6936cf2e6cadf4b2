"""The chain of `serial_recursion` as a Pipeline in fp64, compared with that recursion to the last bit."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from megapipe.config.optimizer import OptimizerConfig
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.step import StepInput, StepResult
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from megapipe.schedules.registry import Options
from tests.engine.library_models import torch_optimizer
from tests.engine.serial_recursion import (
    ROWS,
    Chain,
    History,
    Microbatch,
    apply_layer,
    learning_rate,
    loss_sum,
    recursion,
)
from tests.support.meshes import Backend, run_mesh

SGD = OptimizerConfig(name="sgd", weight_decay=0.02, clip_norm=None)
OPTIMIZERS = {
    "sgd": SGD,
    "momentum": replace(SGD, momentum=0.9, clip_norm=0.5),
    "adamw": OptimizerConfig(name="adamw", clip_norm=0.5),
}
UNCLIPPED = {name: replace(optimizer, clip_norm=None) for name, optimizer in OPTIMIZERS.items()}
SPLITS = {1: (3,), 2: (2, 1), 3: (1, 2, 1), 4: (1, 2, 1, 1)}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained. layers_per_stage: one stage a pipeline rank. num_microbatches: of one replica.

    poisoned: (step, micro-batch of the global batch) whose targets hold an infinity. drain_after: steps after which
    the pipeline is drained.
    """

    name: str
    layers_per_stage: tuple[int, ...]
    num_microbatches: int
    optimizer: OptimizerConfig
    tied: bool = False
    options: Options = field(default_factory=Options)
    poisoned: tuple[int, int] | None = None
    drain_after: Collection[int] = ()
    width: int = 8
    dtype: torch.dtype = torch.float64

    @property
    def chain(self) -> Chain:
        return Chain(sum(self.layers_per_stage), self.tied, self.width, self.dtype)

    @property
    def updates(self) -> int:
        """Updates of one step."""
        return self.num_microbatches if self.name == "pipedream" else 1

    def delay(self, stage: int) -> int:
        """Age in updates of the weights that a stage computes with."""
        oldest = len(self.layers_per_stage) - 1
        if self.name == "pipedream":
            return oldest if self.options.get("vertical_sync", False) else oldest - stage
        return int(self.name == "2bw")

    def batch(self, step: int, replicas: int = 1) -> list[Microbatch]:
        """The global batch of a step."""
        batch = self.chain.batch(step, self.num_microbatches * replicas)
        if self.poisoned is not None and self.poisoned[0] == step:
            batch[self.poisoned[1]].targets[0, 0] = torch.inf
        return batch


@st.composite
def cases(draw: Any, names: Sequence[tuple[str, Options]], optimizers: dict[str, OptimizerConfig], steps: int) -> Case:
    """Draw any pipeline, drained after any steps. One step of a schedule whose updates can be skipped is poisoned."""
    layers = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    name, options = draw(st.sampled_from(names))
    return Case(
        name,
        layers,
        len(layers) + draw(st.integers(0, 5)),
        optimizers[draw(st.sampled_from(sorted(optimizers)))],
        tied=draw(st.booleans()) and sum(layers) > 1,
        options=options,
        poisoned=None if name == "pipedream" else draw(st.none() | st.tuples(st.integers(0, steps - 1), st.just(0))),
        drain_after=draw(st.sets(st.integers(0, steps - 1))),
    )


HISTORIES: dict[str, History] = {}


def serial(case: Case, steps: int, replicas: int = 1) -> History:
    """Return the serial recursion of a case, computed once for all cases that differ in schedule or drains alone.
    PipeDream's updates each take one micro-batch of every replica."""
    delays = [case.delay(stage) for stage, layers in enumerate(case.layers_per_stage) for _ in range(layers)]
    key = repr(
        (case.chain, case.num_microbatches, case.updates, case.optimizer, case.poisoned, delays, steps, replicas)
    )
    if key in HISTORIES:
        return HISTORIES[key]
    batches: list[Sequence[Microbatch]] = []
    rates = []
    for step in range(steps):
        batch = case.batch(step, replicas)
        batches += [batch[index :: case.updates] for index in range(case.updates)]
        rates += [learning_rate(step)] * case.updates
    optimizer = partial(torch_optimizer, case.optimizer)
    HISTORIES[key] = recursion(case.chain, batches, rates, delays, optimizer, case.optimizer.clip_norm)
    return HISTORIES[key]


class Layer(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor, shared: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias, self.shared = nn.Parameter(weight), nn.Parameter(bias), shared

    def forward(self, x: Tensor) -> Tensor:
        return apply_layer(x, self.weight, self.bias, self.shared)


class Replica:
    """One rank's part of a case."""

    def __init__(self, mesh: Mesh, case: Case) -> None:
        self.mesh, self.case, chain = mesh, case, case.chain
        weights = chain.initial_weights()
        shared = nn.Parameter(weights["0.shared"]) if chain.tied else None
        self.pipeline = Pipeline(
            [
                Layer(weights[f"{layer}.weight"], weights[f"{layer}.bias"], shared if chain.shares(layer) else None)
                for layer in range(chain.num_layers)
            ],
            mesh,
            loss=loss_sum,
            sample=torch.empty(ROWS, case.width, dtype=case.dtype),
            microbatches=case.num_microbatches,
            schedule=case.name,
            optimizer=case.optimizer,
            layers_per_stage=case.layers_per_stage,
            count=lambda targets, mask: mask.sum(),
            timeout=20.0,
            **case.options,
        )

    def batch(self, step: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """This rank's inputs, targets and masks of a step."""
        replica, replicas, share = self.mesh.coordinate("data"), self.mesh.size("data"), self.case.num_microbatches
        mine = self.case.batch(step, replicas)[replica * share : (replica + 1) * share]
        inputs, targets, masks = (torch.cat([getattr(each, name) for each in mine]) for name in vars(mine[0]))
        return inputs, (targets, masks)

    def train(self, steps: range) -> list[StepResult]:
        """Train some steps, and drain the pipeline at the end."""
        results: list[StepResult] = []
        for step in steps:
            results += self.pipeline.step(*self.batch(step), learning_rate=learning_rate(step))
            if step in self.case.drain_after:
                results += self.pipeline.drain()
        return [*results, *self.pipeline.drain()]

    def losses(self, step: int) -> list[Tensor]:
        """Each micro-batch's loss sum on the last rank, without training; nothing on the others."""
        header, batch = self.pipeline.schedule.header, self.pipeline._batch(*self.batch(step))
        ranks, units = len(self.case.layers_per_stage), self.case.layers_per_stage
        schedule = build(
            header.name, ranks, len(batch), mode="forward", units_per_stage=units, tied_groups=header.tied_groups
        )
        engine = self.pipeline._assembly.engine(schedule)
        return [loss for (loss,) in engine.run(StepInput(step, batch, ())).outputs]

    def weights(self) -> dict[tuple[str, int], Tensor]:
        """(parameter name, age in updates) -> a copy of its weights, for every version that this rank keeps."""
        return {
            (segment.spec.name, age): state.owned_view(
                state.weights[(state.newest - age) % len(state.weights)], segment
            ).clone()
            for stage in self.pipeline.stages.values()
            for state in stage.states.values()
            for segment in state.table
            for age in range(len(state.weights))
        }


@dataclass(frozen=True)
class Outcome:
    """The results of a rank, and its final weights."""

    results: list[StepResult]
    weights: dict[tuple[str, int], Tensor]


def train(mesh: Mesh, case: Case, steps: int) -> Outcome:
    """Train a case from its start."""
    replica = Replica(mesh, case)
    return Outcome(replica.train(range(steps)), replica.weights())


def train_each(mesh: Mesh, cases: Sequence[Case], steps: int) -> list[Outcome]:
    """One after another in the same processes, which cost more to start than to use."""
    return [train(mesh, case, steps) for case in cases]


def check_bits(case: Case, outcomes: Sequence[Outcome], history: History) -> None:
    """Every rank knows the losses and norms, and is left with all versions of its weights that are still in use."""
    last = slice(case.updates - 1, None, case.updates)
    for stage, outcome in enumerate(outcomes):
        assert [result.step for result in outcome.results] == list(range(len(history.rows) // case.updates))
        assert [result.skipped for result in outcome.results] == history.skipped[last]
        numbers = zip(outcome.results, history.losses(case.updates), history.norms[last], strict=True)
        for result, loss, norm in numbers:
            assert result.skipped or (result.loss, result.gradient_norm) == (loss, norm)
        assert {age for _, age in outcome.weights} == set(range(1 + case.delay(stage)))
        for (name, age), weight in outcome.weights.items():
            assert torch.equal(weight, history.weights[max(0, len(history.rows) - age)][name]), (stage, name, age)
    assert {name for outcome in outcomes for name, _ in outcome.weights} == set(history.weights[0])


def check_each(backend: Backend, pipeline: int, cases: Sequence[Case], steps: int) -> None:
    """Compare every case on a pipeline with its recursion. Clipping clips every step."""
    by_rank = run_mesh({"pipeline": pipeline}, train_each, cases, steps, backend=backend)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        history = serial(case, steps)
        norms = [norm for norm, skipped in zip(history.norms, history.skipped, strict=True) if not skipped]
        assert case.optimizer.clip_norm is None or min(norms) > case.optimizer.clip_norm
        assert [step for step, skipped in enumerate(history.skipped) if skipped] == list(case.poisoned or ())[:1]
        check_bits(case, outcomes, history)


def check_replicas(case: Case, outcomes: Sequence[Outcome], history: History) -> None:
    """Two replicas are the same to the last bit, and what one process gets but for the order of sums."""
    last = slice(case.updates - 1, None, case.updates)
    for outcome in outcomes:
        losses, norms = ([getattr(r, name) for r in outcome.results] for name in ("loss", "gradient_norm"))
        assert losses == pytest.approx(history.losses(case.updates), rel=1e-12)
        assert norms == pytest.approx(history.norms[last], rel=1e-12)
        for (name, age), weight in outcome.weights.items():
            torch.testing.assert_close(weight, history.weights[-1 - age][name], rtol=1e-11, atol=1e-12)
    half = len(outcomes) // 2
    for one, other in zip(outcomes[:half], outcomes[half:], strict=True):
        assert all(torch.equal(weight, other.weights[key]) for key, weight in one.weights.items())
