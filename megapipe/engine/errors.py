"""Errors of the engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapipe.engine.step import StepState
    from megapipe.schedules.actions import Action


class EngineError(RuntimeError):
    """A step failed. The message names the rank, the step and the action, and the peer that it waited for, if any.

    action: that failed. states: what was alive then, one for each step under way. unit: whose forward failed, by its
    place in the action's stage. None and empty where there is none.
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
    """A unit's forward failed, by the error that this one is raised from. unit: its place in the chain that ran."""

    def __init__(self, unit: int) -> None:
        super().__init__(f"the forward of unit {unit} failed")
        self.unit = unit


class HalfError(RuntimeError):
    """The second action of a pair failed, by the error that this one is raised from."""


class PipelineError(ValueError):
    """Modules, data or settings that a Pipeline cannot run; the message names the value, the rule and the way out."""
