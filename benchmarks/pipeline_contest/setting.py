"""The setting of a race, which is the same for all contestants."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megapipe.parallel.mesh import Mesh
from pipeline_contest.sleeping import Meter, SleepingStage

Step = Callable[[], None]
"""Runs one step of this rank's part of a schedule."""


@dataclass(frozen=True)
class Setting:
    """Setting of a race. x: one micro-batch, which is also the gradient that the loss returns; shape [1, floats]."""

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
        """Return a stage. All contestants use this kind of stage, with the same meter."""
        return SleepingStage(self.seconds, self.meter)
