"""megapipe's engine as a contestant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megapipe.engine.engine import Engine
from megapipe.engine.reductions import Communicators, Reductions
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.engine.step import StepInput
from megapipe.engine.transfers import LinkPool, connect
from megapipe.layers.split import SplitTape
from megapipe.optim.scaling import clip_coefficient
from megapipe.parallel.groups import SoloGroup
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule
from megapipe.spec.parameters import Init, ParameterSpec
from pipeline_contest.setting import Setting
from pipeline_contest.sleeping import SleepingStage, sleeping_loss


@dataclass
class Context:
    """A micro-batch. x: input of the first stage, and also the gradient that the loss returns."""

    x: Tensor
    tape: SplitTape | None = None


class Unit:
    """A sleeping stage as a unit of the engine. last: the unit also computes the loss."""

    def __init__(self, module: SleepingStage, last: bool) -> None:
        self._module = module
        self._last = last

    def __call__(self, *inputs: Tensor, context: Context) -> tuple[Tensor, ...]:
        y = self._module(inputs[0] if inputs else context.x, context.tape)
        return (sleeping_loss(y, context.x) if self._last else y,)


class NoOptimizer:
    """An optimizer that counts versions and does not change weights."""

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        for state in states:
            state.begin_update(version)


class Feed:
    """An engine, and functions that run its next step. contexts: the micro-batches, which are the same in every
    step."""

    def __init__(self, engine: Engine, contexts: Sequence[Any]) -> None:
        self._engine = engine
        self._contexts = contexts
        self._counts = [1.0] * len(contexts)
        self._next = 0

    def run(self) -> None:
        """Run one whole step."""
        self.feed()
        self.drain()

    def feed(self) -> None:
        """Start the next step, and run it as far as possible before the step after it."""
        self._engine.feed(StepInput(self._next, self._contexts, self._counts))
        self._next += 1

    def drain(self) -> None:
        """Finish the step in progress."""
        self._engine.drain()


def sleeping(setting: Setting, schedule: Schedule, pool: LinkPool) -> Feed:
    """Return an engine with sleeping stages."""
    stages = sleeping_stages(setting, schedule)
    return fed(setting.mesh, schedule, stages, [Context(setting.x)] * setting.num_microbatches, pool)


def fed(mesh: Mesh, schedule: Schedule, stages: Mapping[int, Stage], contexts: Sequence[Any], pool: LinkPool) -> Feed:
    """Return an engine with these stages. It reduces nothing over ranks and changes no weights, like the peer."""
    states = [state for stage in stages.values() for state in stage.states.values()]
    alone = SoloGroup("alone")
    reductions = Reductions(
        states,
        [segment.spec.name for state in states for segment in state.table],
        Communicators(alone, alone, {}, alone, alone),
        partial(clip_coefficient, limit=1.0),
        NoOptimizer(),
        mesh.device,
        hidden=not schedule.flushes,
    )
    transfers = connect(schedule, mesh, stages, pool)
    return Feed(Engine(schedule, mesh.coordinate("pipeline"), stages, transfers, reductions), contexts)


def sleeping_stages(setting: Setting, schedule: Schedule) -> dict[int, Stage]:
    """Return stages with one sleeping unit each, which has a copy for each weight version."""
    header = schedule.header
    spec = TensorSpec(tuple(setting.x.shape), setting.x.dtype)
    stages: dict[int, Stage] = {}
    for index in header.stages_on(setting.rank):
        parameter = ParameterSpec(f"stages.{index}.weight", (1,), None, Init("zeros"), decay=False, matrix=False)
        copies, buffers = header.versions_per_stage[index], header.gradient_buffers
        state = UnitState(f"stages.{index}", [parameter], num_versions=copies, gradient_buffers=buffers)
        last = index == len(header.stages) - 1
        twins = []
        for copy in range(copies):
            module = setting.stage()
            state.bind(module, {"weight": parameter}, copy=copy)
            twins.append(Unit(module, last))
        stages[index] = Stage([twins], {0: state}, (spec,) if index else (), () if last else (spec,))
    return stages
