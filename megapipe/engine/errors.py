"""Errors of the engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapipe.engine.step import StepState
    from megapipe.schedules.actions import Action


class EngineError(RuntimeError):
    """A step failed. The message names the rank, the step and the action, and the peer that it waited for, if any.

    action: the action that failed. states: state of each step in progress. unit: index, in the action's stage, of the
    unit whose forward failed. None or empty if there is none.
    """

    def __init__(
        self,
        message: str,
        action: "Action | None" = None,
        states: "Sequence[StepState]" = (),
        unit: int | None = None,
    ) -> None:
        super().__init__(message)
        self.action = action
        self.states = tuple(states)
        self.unit = unit


class UnitError(RuntimeError):
    """The forward of a unit failed; `__cause__` is its error. unit: index in the chain that ran."""

    def __init__(self, unit: int) -> None:
        super().__init__(f"the forward of unit {unit} failed")
        self.unit = unit


class HalfError(RuntimeError):
    """The second action of a pair failed; `__cause__` is its error."""


class PipelineError(ValueError):
    """Modules, data or settings that a Pipeline cannot run; the message names the value, the rule, and how to fix
    it."""
