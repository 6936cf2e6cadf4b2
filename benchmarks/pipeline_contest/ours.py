"""megapipe's engine over sleeping stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from megapipe.costs.parameters import Init, ParameterSpec
from megapipe.engine.engine import Engine
from megapipe.engine.reductions import Communicators, Reductions
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.engine.step import StepInput
from megapipe.engine.wiring import LinkPool, connect
from megapipe.layers.split import SplitTape
from megapipe.optim.clipping import clip_coefficient
from megapipe.parallel.groups.solo import SoloGroup
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule
from pipeline_contest.setting import Setting, Step
from pipeline_contest.sleeping import SleepingStage, sleeping_loss


@dataclass
class Context:
    """A micro-batch: what the first stage takes, and the gradient that the loss gives."""

    x: Tensor
    tape: SplitTape | None = None


class _Unit:
    """A sleeping stage as the engine's unit."""

    def __init__(self, module: SleepingStage, last: bool) -> None:
        self._module = module
        self._last = last

    def __call__(self, *inputs: Tensor, context: Context) -> tuple[Tensor, ...]:
        y = self._module(inputs[0] if inputs else context.x, context.tape)
        return (sleeping_loss(y, context.x) if self._last else y,)


class _NoOptimizer:
    """Counts versions and leaves the weights as they are."""

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        for state in states:
            state.begin_update(version)


class Feed:
    """An engine and the steps to give it, one after the other."""

    def __init__(self, runs: Engine, setting: Setting) -> None:
        self._engine = runs
        self._contexts = [Context(setting.x)] * setting.num_microbatches
        self._counts = [1.0] * setting.num_microbatches
        self._next = 0

    def run(self) -> None:
        """One whole step."""
        self.feed()
        self.drain()

    def feed(self) -> None:
        """The next step, as far as it goes without its successor."""
        self._engine.feed(StepInput(self._next, self._contexts, self._counts))
        self._next += 1

    def drain(self) -> None:
        """End what is under way."""
        self._engine.drain()


def megapipe(setting: Setting, schedule: Schedule, pool: LinkPool) -> Step:
    """One step of megapipe."""
    return engine(setting, schedule, pool).run


def engine(setting: Setting, schedule: Schedule, pool: LinkPool) -> Feed:
    """The engine over sleeping stages. Sums over ranks stay on the rank, as the peer has none."""
    header, rank = schedule.header, setting.rank
    spec = TensorSpec(tuple(setting.x.shape), setting.x.dtype)
    stages: dict[int, Stage] = {}
    for index in header.stages_on(rank):
        parameter = ParameterSpec(f"stages.{index}.weight", (1,), None, Init("zeros"), decay=False, matrix=False)
        copies = header.versions_per_stage[index]
        state = UnitState(f"stages.{index}", [parameter], num_versions=copies, gradient_buffers=header.gradient_buffers)
        last = index == len(header.stages) - 1
        twins = []
        for copy in range(copies):
            module = setting.stage()
            state.bind(module, {"weight": parameter}, copy=copy)
            twins.append(_Unit(module, last))
        stages[index] = Stage([twins], {0: state}, (spec,) if index else (), () if last else (spec,))
    alone = SoloGroup("alone")
    reductions = Reductions(
        [state for stage in stages.values() for state in stage.states.values()],
        [f"stages.{index}.weight" for index in range(len(header.stages))],
        Communicators(alone, alone, {}, alone),
        partial(clip_coefficient, limit=1.0),
        _NoOptimizer(),
        setting.mesh.device,
        hidden=not schedule.flushes,
    )
    return Feed(Engine(schedule, rank, stages, connect(schedule, setting.mesh, stages, pool), reductions), setting)
