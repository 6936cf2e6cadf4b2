"""Measure how long the copy of the state delays a step: before the step, or unit by unit in its background.

Two pipeline ranks are threads, and their stages and copies sleep. The copies of all units take the same time and run
one after another, as on a GPU's copy engine. `BackgroundSaver` starts the saves, the engine runs the steps, and
`simulate` predicts them. All contestants take turns; a time is the median over the rounds, from a barrier to the last
rank's end.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from pipeline_contest.ours import Context, NoOptimizer, Unit
from pipeline_contest.sleeping import Meter, SleepingStage

from megapipe.checkpoint import RunState
from megapipe.checkpoint.background import BackgroundSaver, StateSnapshot
from megapipe.engine.engine import Engine
from megapipe.engine.host_memory import Move, Swaps, ThreadCopies
from megapipe.engine.reductions import Communicators, Reductions
from megapipe.engine.stage import Stage, TensorSpec, unit_states
from megapipe.engine.step import StepInput
from megapipe.engine.transfers import LinkPool, connect
from megapipe.optim.scaling import clip_coefficient
from megapipe.parallel.groups import SoloGroup
from megapipe.parallel.in_process import in_process_meshes, run_in_process
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule, build, rank_costs, simulate
from megapipe.schedules.memory import with_snapshots
from megapipe.spec.parameters import Init, ParameterSpec

from .state import Moments

RANKS, MICROBATCHES, UNITS = 2, 4, 4
FORWARD_SECONDS = 0.02
"""Time of a rank's forward over all its units; a backward takes twice as long."""
COPIES = (0.5, 1.0, 1.25, 1.5, 2.0)
"""Times of a rank's copy, as multiples of its forwards and backwards in a step."""
X = torch.zeros(1, 16)


@dataclass(frozen=True)
class Stall:
    """Seconds of a rank's copy, and the seconds by which a step is delayed.

    between_steps, next_step: measured, if the copy is made before the step or in its background. predicted: predicted
    for the latter, from the measured times of an ordinary step and of the copy.
    """

    copy: float
    between_steps: float
    next_step: float
    predicted: float


class SleepingCopies(ThreadCopies):
    """Copies, each of which takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__("snapshot")
        self._seconds = seconds

    def copy(self, moves: Sequence[Move]) -> None:
        """Sleep, then copy the few bytes."""
        time.sleep(self._seconds)
        super().copy(moves)


def stalls(rounds: int, folder: Path) -> list[Stall]:
    """Measure every time of `COPIES`."""
    return [_stall(multiple, rounds, folder) for multiple in COPIES]


def _stall(multiple: float, rounds: int, folder: Path) -> Stall:
    schedule = build("1f1b", RANKS, MICROBATCHES, units_per_stage=[UNITS] * RANKS)
    copy = multiple * MICROBATCHES * 3 * FORWARD_SECONDS
    with tempfile.TemporaryDirectory(dir=folder) as place:
        meshes = in_process_meshes({"pipeline": RANKS}, "cpu", 60.0)
        ranks = run_in_process(meshes, _measure, schedule, copy / UNITS, rounds, Path(place))
    plain, before_step, in_background = (
        statistics.median(column) for column in zip(*map(_slowest, zip(*ranks, strict=True)), strict=True)
    )
    # Sleeps last longer than requested. Compute and copies have many of them, so both are predicted as measured.
    oversleeping = plain / simulate(schedule, rank_costs(schedule.header, forward=FORWARD_SECONDS)).finish
    costs = rank_costs(schedule.header, forward=FORWARD_SECONDS * oversleeping, snapshot=before_step - plain)
    predicted = simulate(with_snapshots(schedule), costs).finish - plain
    return Stall(copy, before_step - plain, in_background - plain, predicted)


def _slowest(ranks: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the seconds of the slowest rank, for each contestant of a round."""
    return tuple(map(max, zip(*ranks, strict=True)))


def _measure(
    mesh: Mesh, schedule: Schedule, seconds: float, rounds: int, folder: Path
) -> list[tuple[float, float, float]]:
    """Return for each round the seconds of a step without a save, with a copy before the step, and with a copy in its
    background."""
    lane = SleepingCopies(seconds)
    stages = _stages(mesh, schedule)
    engine = _engine(mesh, schedule, stages, Swaps(mesh.device, lane))
    states = unit_states(stages)
    saver = BackgroundSaver(folder, mesh)
    saver.plan(states)
    saver.prepare()
    steps = iter(range(10**6))

    def run(saves: bool, prepare: Callable[[StateSnapshot | None], StateSnapshot | None]) -> float:
        step = next(steps)
        if saves:
            saver.start(states, {}, RunState(step, 0, {}, "fp32", (), {"model": {}}), by_step=True)
        copies = saver.take_snapshot()
        mesh.world.barrier()
        start = time.perf_counter()
        contexts = [Context(X)] * MICROBATCHES
        engine.run(StepInput(step, contexts, [1.0] * MICROBATCHES, snapshot=prepare(copies)))
        elapsed = time.perf_counter() - start
        saver.finish()
        return elapsed

    def between(copies: StateSnapshot | None) -> None:
        assert copies is not None
        for state in states:
            copies.start(state, lane)
        for state in states:
            copies.wait(state)

    run(True, lambda copies: copies)
    return [(run(False, lambda _: None), run(True, between), run(True, lambda copies: copies)) for _ in range(rounds)]


def _stages(mesh: Mesh, schedule: Schedule) -> dict[int, Stage]:
    stages, spec = {}, TensorSpec(tuple(X.shape), X.dtype)
    for index in schedule.header.stages_on(mesh.coordinate("pipeline")):
        last = index == len(schedule.header.stages) - 1
        states, units = {}, []
        for unit in range(UNITS):
            name = f"stages.{index}.{unit}.weight"
            parameter = ParameterSpec(name, (1,), None, Init("zeros"), decay=False, matrix=False)
            state = states[unit] = UnitState(f"stages.{index}.{unit}", [parameter])
            Moments().allocate(state)
            module = SleepingStage(FORWARD_SECONDS / UNITS, Meter())
            state.bind(module, {"weight": parameter}, copy=0)
            units.append([Unit(module, last and unit == UNITS - 1)])
        stages[index] = Stage(units, states, (spec,) if index else (), () if last else (spec,))
    return stages


def _engine(mesh: Mesh, schedule: Schedule, stages: dict[int, Stage], swaps: Swaps) -> Engine:
    states, alone = unit_states(stages), SoloGroup("alone")
    reductions = Reductions(
        states,
        [segment.spec.name for state in states for segment in state.table],
        Communicators(mesh.world, alone, {}, mesh.world, mesh.group("tensor")),
        partial(clip_coefficient, limit=1.0),
        NoOptimizer(),
        mesh.device,
        hidden=False,
    )
    transfers = connect(schedule, mesh, stages, LinkPool(mesh, "auto", 60.0))
    return Engine(schedule, mesh.coordinate("pipeline"), stages, transfers, reductions, swaps)
