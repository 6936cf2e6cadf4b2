"""The engine: a flat loop over a rank's actions, compiled to closures once.

Nothing here knows what a schedule is called. Every action of the lowered Schedule becomes one closure; a step runs
them in order. GPipe (1811.06965), PipeDream-Flush (2006.09503 section 3.2) and their kin differ in data alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megapipe.engine.compute import WHOLE
from megapipe.engine.errors import EngineError, UnitError
from megapipe.engine.program import Program
from megapipe.engine.reductions import Reductions
from megapipe.engine.stage import Stage
from megapipe.engine.step import StepInput, StepResult, StepState, finished
from megapipe.engine.transfers import Transfers
from megapipe.schedules.actions import Action
from megapipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Instruction:
    """One compiled action and, for messages, the rows it came from."""

    run: Callable[[StepState], None]
    action: Action


class Engine:
    """Runs one rank's part of a schedule.

    schedule: lowered, mode "train" or "forward". rank: pipeline rank. stages: stage id -> Stage, exactly the stages
    that the schedule places on this rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        transfers: Transfers,
        reductions: Reductions,
    ) -> None:
        """Compile the schedule. Raises EngineError when stages and schedule do not belong together."""
        expected = set(schedule.header.stages_on(rank))
        if set(stages) != expected:
            raise EngineError(
                f"schedule {schedule.header.name} places stages {sorted(expected)} on pipeline rank {rank}, "
                f"but stages {sorted(stages)} were given"
            )
        if not schedule.flushes:
            raise EngineError(
                f"schedule {schedule.header.name} never flushes (it has a prologue); this engine runs schedules that "
                "flush every step, such as gpipe and 1f1b"
            )
        self._name = schedule.header.name
        self._rank = rank
        self._stages = stages
        self._transfers = transfers
        program = Program(schedule, rank, stages, transfers, reductions)
        self._instructions = [Instruction(run, action) for run, action in program.compile("body")]

    def run(self, step_input: StepInput) -> StepResult:
        """Run one step (train mode: through the optimizer update) and return what every rank knows of it.

        Raises EngineError naming rank, step and action around whatever went wrong.
        """
        state = StepState(step_input)
        for position, instruction in enumerate(self._instructions):
            try:
                instruction.run(state)
            except UnitError as error:
                raise self._failure(position, state, error.__cause__, error.unit) from error.__cause__
            except Exception as error:
                raise self._failure(position, state, error) from error
        try:
            self._transfers.drain()
        except Exception as error:
            place = f"pipeline rank {self._rank}, step {step_input.step}, behind the last action of {self._name}"
            raise EngineError(f"{place}: {error}", state=state) from error
        return finished(state)

    def _failure(
        self, position: int, state: StepState, error: BaseException | None, unit: int | None = None
    ) -> EngineError:
        action = self._instructions[position].action
        if unit is not None and action.unit != WHOLE:
            unit += action.unit
        name = "" if unit is None else f", unit {self._unit_name(action.stage, unit)}"
        return EngineError(self._place(position, state.input.step) + f"{name}: {error}", action, state, unit)

    def _unit_name(self, stage: int, unit: int) -> str:
        states = self._stages[stage].states
        return states[unit].name if unit in states else str(unit)

    def _place(self, position: int, step: int) -> str:
        action = self._instructions[position].action
        fields = [f"{name} {value}" for name, value in action._asdict().items() if name != "kind" and value >= 0]
        return (
            f"pipeline rank {self._rank}, step {step}, action {position} of {self._name}: "
            f"{action.kind.name} {' '.join(fields)}".rstrip()
        )
