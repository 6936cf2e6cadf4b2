"""A toy model of plain torch modules for engine tests: a chain of residual layers, then a squared-error loss."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from megapipe.config.optimizer import OptimizerConfig
from megapipe.engine.engine import Engine
from megapipe.engine.reductions import Communicators, Reductions
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.engine.step import StepInput
from megapipe.engine.transfers import LinkPool, connect
from megapipe.layers.split import SplitModule, SplitTape
from megapipe.optim.optimizer import FlatAdamW
from megapipe.optim.scaling import clip_coefficient
from megapipe.parallel.groups import Group
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule, lower, order
from megapipe.schedules.schedule import Mode
from megapipe.spec.parameters import Init, ParameterSpec

WIDTH, ROWS, SEED = 8, 3, 11
SPEC = TensorSpec((ROWS, WIDTH), torch.float32)


@dataclass
class Context:
    """One micro-batch: inputs for the first layer and targets for the loss."""

    inputs: Tensor
    targets: Tensor
    tape: SplitTape | None = None


def contexts(step: int, num_microbatches: int) -> list[Context]:
    """Micro-batches of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    draw = partial(torch.randn, ROWS, WIDTH, generator=generator)
    return [Context(draw(), draw()) for _ in range(num_microbatches)]


class Residual(SplitModule):
    """x + tanh(x) W ; the first layer of the chain reads the context, the last one turns the result into a loss sum.

    The gradient of the product is that of the output, the very tensor: what a pipeline's tapes keep in split mode.
    """

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
        self.first, self.last = first, last

    def forward(self, *inputs: Tensor, context: Context) -> tuple[Tensor, ...]:
        x = context.inputs if self.first else inputs[0]
        y = x + self.product(torch.tanh(x), context.tape)
        return ((y - context.targets).square().sum(),) if self.last else (y,)

    def product(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        if tape is None:
            return x @ self.weight
        record = tape.record(self, x.shape, x)
        record.saved = (x.detach(),)
        return x @ self.weight.detach() + record.probe

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        yield self.weight, saved[0].t() @ gradient


def spec(layer: int) -> ParameterSpec:
    return ParameterSpec(f"layers.{layer}.weight", (WIDTH, WIDTH), None, Init("normal", 0.4), decay=True, matrix=True)


@dataclass
class Toy:
    """One rank's toy replica."""

    engine: Engine
    modules: list[Residual]
    states: list[UnitState]
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


class RecordingAdamW(FlatAdamW):
    """FlatAdamW that keeps what it was given."""

    def __init__(self, config: OptimizerConfig, record: list[dict[str, Tensor]]) -> None:
        super().__init__(config)
        self._record = record

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        self._record.append({state.name: state.gradients[0].clone() for state in states})
        super().update(states, version, learning_rate, coefficient)


def toy(
    mesh: Mesh,
    name: str,
    num_microbatches: int,
    layers_per_stage: Sequence[int],
    *,
    mode: Mode = "train",
    change: Callable[[Schedule], Schedule] = lambda schedule: schedule,
    data_group: Group | None = None,
    timeout: float = 20.0,
) -> Toy:
    """Build this rank's part of a chain of sum(layers_per_stage) layers.

    change: applied to the named schedule before it is lowered. data_group: by default the mesh's.
    timeout: seconds that a link waits.
    """
    compute = order(
        name,
        mesh.size("pipeline"),
        num_microbatches,
        mode=mode,
        units_per_stage=layers_per_stage,
        data_parallel=mesh.size("data") > 1,
    )
    schedule = lower(change(compute))
    rank, total = mesh.coordinate("pipeline"), sum(layers_per_stage)
    stages: dict[int, Stage] = {}
    modules: list[Residual] = []
    for stage in schedule.header.stages_on(rank):
        start = sum(layers_per_stage[:stage])
        units, states = [], {}
        for unit, layer in enumerate(range(start, start + layers_per_stage[stage])):
            module = Residual(first=layer == 0, last=layer == total - 1)
            state = UnitState(f"layers.{layer}", [spec(layer)])
            state.initialize(SEED)
            state.bind(module, {"weight": spec(layer)})
            units.append([module])
            modules.append(module)
            states[unit] = state
        last = stage == len(layers_per_stage) - 1
        stages[stage] = Stage(units, states, (SPEC,) if stage else (), () if last else (SPEC,))
    states_here = [state for stage in stages.values() for state in stage.states.values()]
    gradients: list[dict[str, Tensor]] = []
    reductions = Reductions(
        states_here,
        [spec(layer).name for layer in range(total)],
        Communicators(
            mesh.world,
            mesh.group("data") if data_group is None else data_group,
            {},
            mesh.world if schedule.flushes else mesh.second_world(),
            counts_loss=len(layers_per_stage) - 1 in stages,
            replica=mesh.coordinate("data"),
        ),
        partial(clip_coefficient, limit=0.5),
        RecordingAdamW(OptimizerConfig(), gradients),
        mesh.device,
    )
    transfers = connect(schedule, mesh, stages, LinkPool(mesh, "auto", timeout))
    return Toy(Engine(schedule, rank, stages, transfers, reductions), modules, states_here, gradients)


@dataclass(frozen=True)
class Outcome:
    """The results of a rank: losses and norms by step, gradients by step and layer, final weights by layer."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def train(
    mesh: Mesh,
    name: str,
    num_microbatches: int,
    layers_per_stage: Sequence[int],
    change: Callable[[Schedule], Schedule] = lambda schedule: schedule,
    steps: int = 3,
) -> Outcome:
    """Run a few steps; num_microbatches counts those of one data replica."""
    replica = toy(mesh, name, num_microbatches, layers_per_stage, change=change)
    data, of = mesh.coordinate("data"), mesh.size("data")
    losses, norms = [], []
    for step in range(steps):
        mine = contexts(step, num_microbatches * of)[data * num_microbatches : (data + 1) * num_microbatches]
        result = replica.engine.run(StepInput(step, mine, [float(ROWS)] * num_microbatches, learning_rate=0.01))
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    weights = {state.name: state.master.clone() for state in replica.states}
    return Outcome(losses, norms, replica.gradients, weights)


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of all ranks: losses and norms of the first (they are equal on all), everyone's layers."""
    steps = len(outcomes[0].losses)
    gradients = [{k: v for each in outcomes for k, v in each.gradients[step].items()} for step in range(steps)]
    weights = {k: v for each in outcomes for k, v in each.weights.items()}
    return Outcome(outcomes[0].losses, outcomes[0].norms, gradients, weights)


def reference_gradients(
    step: int, num_microbatches: int, num_layers: int, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """float64 gradients of the mean loss by plain autograd over the whole batch at once."""
    leaves = {
        f"layers.{i}": weights[f"layers.{i}"].double().view(WIDTH, WIDTH).requires_grad_() for i in range(num_layers)
    }
    batch = contexts(step, num_microbatches)
    x = torch.cat([context.inputs for context in batch]).double()
    for leaf in leaves.values():
        x = x + torch.tanh(x) @ leaf
    targets = torch.cat([context.targets for context in batch]).double()
    ((x - targets).square().sum() / (ROWS * num_microbatches)).backward()
    return {name: leaf.grad.view(-1) for name, leaf in leaves.items() if leaf.grad is not None}
