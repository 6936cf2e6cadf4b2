"""The chain of `serial_recursion` on the engine, for schedules that never flush: fp64, versions, a tied weight."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config.optimizer import OptimizerConfig
from megapipe.engine.engine import Engine
from megapipe.engine.reductions import Communicators, Reductions
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.engine.step import StepInput, StepResult
from megapipe.engine.transfers import LinkPool, connect
from megapipe.optim.muon import make_optimizer
from megapipe.optim.optimizer import FlatOptimizer
from megapipe.optim.scaling import clip_coefficient
from megapipe.parallel.groups import Group
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule, build
from megapipe.schedules.registry import Options
from megapipe.schedules.schedule import Mode
from megapipe.spec.parameters import Init, ParameterSpec
from tests.engine.serial_recursion import (
    ROWS,
    Chain,
    History,
    Microbatch,
    Weights,
    apply_layer,
    learning_rate,
    loss_sum,
    recursion,
)

SHARED = "shared.weight"


@dataclass(frozen=True)
class Case:
    """A model and how it is trained. layers_per_stage: one stage a pipeline rank. num_microbatches: of one replica.

    poisoned: (step, micro-batch of the global batch) whose targets hold an infinity.
    """

    name: str
    layers_per_stage: tuple[int, ...]
    num_microbatches: int
    optimizer: OptimizerConfig
    tied: bool = False
    options: Options = field(default_factory=Options)
    poisoned: tuple[int, int] | None = None
    width: int = 8
    dtype: torch.dtype = torch.float64

    @property
    def chain(self) -> Chain:
        return Chain(sum(self.layers_per_stage), self.tied, self.width, self.dtype)

    def batch(self, step: int, replicas: int = 1) -> list[Microbatch]:
        """The global batch of a step."""
        batch = self.chain.batch(step, self.num_microbatches * replicas)
        if self.poisoned is not None and self.poisoned[0] == step:
            batch[self.poisoned[1]].targets[0, 0] = torch.inf
        return batch


def expected(case: Case, steps: int, delays: Sequence[int], *, each: bool = False, replicas: int = 1) -> History:
    """The serial recursion of a case. delays: by layer. each: an update for each micro-batch of a replica."""
    batches: list[Sequence[Microbatch]] = []
    rates = []
    for step in range(steps):
        batch = case.batch(step, replicas)
        shares = [batch[index :: case.num_microbatches] for index in range(case.num_microbatches)] if each else [batch]
        batches += shares
        rates += [learning_rate(step)] * len(shares)
    return recursion(case.chain, batches, rates, delays, partial(torchs, case.optimizer), case.optimizer.clip_norm)


def torchs(config: OptimizerConfig, decayed: list[Tensor], others: list[Tensor]) -> torch.optim.Optimizer:
    """torch's own optimizer of that configuration."""
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=config.momentum, foreach=False)
    return torch.optim.AdamW(groups, lr=1.0, betas=config.betas, eps=config.epsilon, foreach=False)


class Layer(nn.Module):
    """One layer of the chain. The first one reads the context; the last one turns the result into a loss sum."""

    shared: nn.Parameter | None

    def __init__(self, chain: Chain, layer: int) -> None:
        super().__init__()
        empty = partial(torch.empty, device="meta", dtype=chain.dtype)
        self.weight, self.bias = nn.Parameter(empty(chain.width, chain.width)), nn.Parameter(empty(chain.width))
        self.shared = nn.Parameter(empty(chain.width, chain.width)) if chain.shares(layer) else None
        self.first, self.last = layer == 0, layer == chain.num_layers - 1

    def forward(self, *inputs: Tensor, context: Microbatch) -> tuple[Tensor, ...]:
        x = context.inputs if self.first else inputs[0]
        y = apply_layer(x, self.weight, self.bias, self.shared)
        return (loss_sum(y, context),) if self.last else (y,)


def specs(chain: Chain, layer: int) -> dict[str, ParameterSpec]:
    """Attribute -> spec of a layer's parameters."""
    width, start = chain.width, Init("zeros")
    found = {
        "weight": ParameterSpec(f"layers.{layer}.weight", (width, width), None, start, decay=True, matrix=True),
        "bias": ParameterSpec(f"layers.{layer}.bias", (width,), None, start, decay=False, matrix=False),
    }
    if chain.shares(layer):
        found["shared"] = ParameterSpec(SHARED, (width, width), None, start, decay=True, matrix=True)
    return found


class Replica:
    """One rank's part of a case. scalars: the group of the sums that run alongside its actions."""

    def __init__(self, mesh: Mesh, case: Case, scalars: Group | None = None) -> None:
        self.mesh, self.case, self.chain = mesh, case, case.chain
        self.schedule = lowered(case, mesh.size("data"))
        self.rank = mesh.coordinate("pipeline")
        self.shared: UnitState | None = None
        self.stage = self._stage()
        self.states = list(self.stage.states.values())
        self.optimizer: FlatOptimizer = make_optimizer(case.optimizer)
        for state in self.states:
            take_weights(state, self.chain.initial_weights())
        self._links = LinkPool(mesh, "auto", 20.0)
        self.engine = self._engine(self.schedule, self._reductions(scalars))

    def _engine(self, schedule: Schedule, reductions: Reductions) -> Engine:
        stages = {self.rank: self.stage}
        transfers = connect(schedule, self.mesh, stages, self._links)
        return Engine(schedule, self.rank, stages, transfers, reductions)

    def _stage(self) -> Stage:
        layers = self.case.layers_per_stage
        first = sum(layers[: self.rank])
        mine = range(first, first + layers[self.rank])
        uses = [layer for layer in mine if self.chain.shares(layer)]
        if uses:
            self.shared = self._state("shared", [specs(self.chain, uses[0])["shared"]], len(uses))
        units: list[list[Layer]] = []
        states: dict[int, UnitState] = {}
        for unit, layer in enumerate(mine):
            parameters = specs(self.chain, layer)
            own = [spec for spec in parameters.values() if spec.name != SHARED]
            states[unit] = self._state(f"layers.{layer}", own, 1)
            units.append([Layer(self.chain, layer) for _ in range(self.schedule.header.weight_versions[self.rank])])
            for copy, twin in enumerate(units[-1]):
                states[unit].bind(twin, parameters, copy=copy)
                if self.shared is not None and layer in uses:
                    self.shared.bind(twin, parameters, copy=copy, use=uses.index(layer))
        if self.shared is not None:
            states[len(units)] = self.shared
        boundary = (TensorSpec((ROWS, self.chain.width), self.chain.dtype),)
        inputs, outputs = boundary if self.rank else (), () if self.rank == len(layers) - 1 else boundary
        return Stage(units, states, inputs, outputs)

    def _state(self, name: str, parameters: list[ParameterSpec], num_uses: int) -> UnitState:
        header = self.schedule.header
        return UnitState(
            name,
            parameters,
            compute_dtype=self.chain.dtype,
            num_versions=header.weight_versions[self.rank],
            num_uses=num_uses,
            gradient_buffers=header.gradient_buffers,
        )

    def _reductions(self, scalars: Group | None) -> Reductions:
        mesh, schedule, limit = self.mesh, self.schedule, self.case.optimizer.clip_norm
        tied: dict[int, Group] = {}
        for group, stages in enumerate(schedule.header.tied_groups):
            members = mesh.stage_group(tuple(sorted(set(stages))))
            if members is not None:
                tied[group] = members
        counts_shared = self.rank == 0
        names = [spec.name for layer in range(self.chain.num_layers) for spec in specs(self.chain, layer).values()]
        return Reductions(
            [state for state in self.states if state is not self.shared or counts_shared],
            names,
            Communicators(
                mesh.world,
                mesh.group("data"),
                tied,
                mesh.second_world() if scalars is None else scalars,
                counts_loss=self.rank == len(self.case.layers_per_stage) - 1,
                replica=mesh.coordinate("data"),
            ),
            torch.ones_like if limit is None else partial(clip_coefficient, limit=limit),
            self.optimizer,
            mesh.device,
            hidden=not schedule.flushes,
        )

    def losses(self, step: int) -> list[Tensor]:
        """Each micro-batch's loss sum on the last rank, without training; nothing on the others."""
        engine = self._engine(lowered(self.case, mode="forward"), self._reductions(None))
        return [loss for (loss,) in engine.run(self.step_input(step)).outputs]

    def step_input(self, step: int) -> StepInput:
        """This rank's part of a step."""
        replica, replicas, share = self.mesh.coordinate("data"), self.mesh.size("data"), self.case.num_microbatches
        mine = self.case.batch(step, replicas)[replica * share : (replica + 1) * share]
        return StepInput(step, mine, [microbatch.tokens for microbatch in mine], learning_rate(step))

    def train(self, steps: range, drain_after: Collection[int] = ()) -> list[StepResult]:
        """Feed `steps`; the pipeline is drained after those of `drain_after` and at the end."""
        results: list[StepResult] = []
        for step in steps:
            results += self.engine.feed(self.step_input(step))
            if step in drain_after:
                results += self.engine.drain()
        return [*results, *self.engine.drain()]

    def weights(self) -> dict[tuple[str, int], Tensor]:
        """(parameter name, age in updates) -> a copy of its weights, for every version that this rank keeps."""
        return {
            (segment.spec.name, age): state.owned_view(
                state.weights[(state.newest - age) % len(state.weights)], segment
            ).clone()
            for state in self.states
            for segment in state.table
            for age in range(len(state.weights))
        }


def lowered(case: Case, replicas: int = 1, mode: Mode = "train") -> Schedule:
    """The schedule of a case. Raises ScheduleError where there is none."""
    num_ranks = len(case.layers_per_stage)
    return build(
        case.name,
        num_ranks,
        case.num_microbatches,
        mode=mode,
        units_per_stage=case.layers_per_stage,
        tied_groups=[sorted({0, num_ranks - 1})] if case.tied else [],
        data_parallel=replicas > 1,
        **case.options,
    )


def take_weights(state: UnitState, weights: Weights) -> None:
    """Give every version of a state these weights, as before a first step."""
    for segment in state.table:
        state.owned_view(state.master, segment).copy_(weights[segment.spec.name])
    state.restore(state.newest)


def with_options(case: Case, **options: Any) -> Case:
    """The same case with other options of its schedule."""
    return replace(case, options=Options(**options))  # type: ignore[typeddict-item]
