"""What the engine raises."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapipe.engine.step import StepState
    from megapipe.schedules.actions import Action


class EngineError(RuntimeError):
    """A step failed. The message names the rank, the step and the action, and the peer that it waited for, if any.

    action: that failed. state: what was alive then. unit: whose forward failed, by its place in the action's stage.
    None where there is none.
    """

    def __init__(
        self, message: str, action: "Action | None" = None, state: "StepState | None" = None, unit: int | None = None
    ) -> None:
        super().__init__(message)
        self.action = action
        self.state = state
        self.unit = unit


class UnitError(RuntimeError):
    """A unit's forward failed, by the error that this one is raised from. unit: its place in the chain that ran."""

    def __init__(self, unit: int) -> None:
        super().__init__(f"the forward of unit {unit} failed")
        self.unit = unit
