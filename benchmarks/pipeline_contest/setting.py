"""What all contestants of a race share."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megapipe.parallel.mesh import Mesh
from pipeline_contest.sleeping import Meter, SleepingStage

Step = Callable[[], None]
"""Runs one step of this rank's part of a schedule."""


@dataclass(frozen=True)
class Setting:
    """Sizes of a race. x: one micro-batch, and the gradient that the loss gives; shape [1, floats]."""

    mesh: Mesh
    num_microbatches: int
    seconds: float
    x: Tensor
    meter: Meter

    @property
    def rank(self) -> int:
        return self.mesh.coordinate("pipeline")

    @property
    def num_ranks(self) -> int:
        return self.mesh.size("pipeline")

    def stage(self) -> SleepingStage:
        """A stage; all contestants have the same kind, and sleep on the same meter."""
        return SleepingStage(self.seconds, self.meter)
