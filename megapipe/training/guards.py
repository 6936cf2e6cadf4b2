"""The checks of a run between its steps."""

from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepResult
from megapipe.parallel.mesh import Mesh
from megapipe.training.consistency import check_replicas
from megapipe.training.listeners import Listeners
from megapipe.training.replica import Replica
from megapipe.training.spikes import Rewinds
from megapipe.training.stragglers import StragglerWatch
from megapipe.training.watchdog import Heartbeat


class NonFiniteError(RuntimeError):
    """Steps in a row had a loss or gradients that are not finite."""


class NonFiniteCount:
    """Counts consecutive skipped steps; the count is the same on every rank, as is the decision to skip."""

    def __init__(self, config: PretrainConfig) -> None:
        self._skips = config.reliability.skip_non_finite
        # An fp16 run skips many steps while it finds its scale: its scaler has the limit.
        scaled = config.training.precision == "fp16"
        self._patience = None if scaled else config.reliability.non_finite_patience
        self._count = 0

    def observe(self, result: StepResult) -> None:
        """Count a step. Raises NonFiniteError when too many steps were skipped."""
        self._count = self._count + 1 if result.skipped else 0
        if not result.skipped:
            return
        values = f"loss {result.loss}, gradient norm {result.gradient_norm}"
        if not self._skips:
            raise NonFiniteError(
                f"step {result.step + 1} is not finite ({values}), and reliability.skip_non_finite is false; the "
                "weights are those before that step: look at its samples, or lower optimizer.learning_rate"
            )
        if self._patience is not None and self._count >= self._patience:
            raise NonFiniteError(
                f"{self._count} steps in a row, up to step {result.step + 1}, were not finite ({values}); continue "
                "from an earlier checkpoint, with a lower optimizer.learning_rate or without these samples "
                "(reliability.skip_samples)"
            )


class Guards:
    """The guards of a run on one rank. Every rank makes the same calls."""

    def __init__(self, config: PretrainConfig, mesh: Mesh, heartbeat: Heartbeat, listeners: Listeners) -> None:
        self.heartbeat = heartbeat
        self.non_finite = NonFiniteCount(config)
        self.rewinds = Rewinds(config.spikes.patience)
        self.stragglers = StragglerWatch(config.reliability, mesh, listeners.say, listeners.event)
        self._compare_every = config.reliability.compare_every if mesh.world_size > 1 else None
        self._world = mesh.world

    def compares(self, step: int) -> bool:
        """Return whether ranks compare their state after `step`."""
        return self._compare_every is not None and step % self._compare_every == 0

    def compare(self, replica: Replica, step: int) -> None:
        """Compare the ranks' state, if it is due. Raises ReplicasDifferError."""
        if self.compares(step):
            self.heartbeat.outside("comparing replicas")
            check_replicas(replica.states(), self._world, step)
