"""The loop: step, tell, evaluate, save, stop."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest import RunState
from megapipe.config.run import PretrainConfig
from megapipe.engine.engine import Engine
from megapipe.engine.step import StepInput, StepResult
from megapipe.optim.learning_rate import learning_rate
from megapipe.training.batches import BatchLoader, StepBatch
from megapipe.training.evaluation import Evaluation
from megapipe.training.memory_report import out_of_memory_told
from megapipe.training.records import Listener, StepRecord
from megapipe.training.replica import Replica
from megapipe.training.resume import Checkpointer
from megapipe.training.signals import StopRequest
from megapipe.training.throughput import UtilisationMeter

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""

LOSSES_KEPT = 100
"""Last losses that a checkpoint stores."""


@dataclass
class Position:
    """Where a run stands: steps done, samples they took, their last losses as (step, loss)."""

    step: int = 0
    consumed: int = 0
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))

    @classmethod
    def of(cls, run: RunState | None) -> "Position":
        """Where a checkpoint was made; the beginning without one."""
        if run is None:
            return cls()
        return cls(run.step, run.consumed_samples, deque(run.losses, maxlen=LOSSES_KEPT))


class TrainingLoop:
    """Runs a replica from a position to the end of the run. Every rank runs it; rank 0's listener tells of it."""

    def __init__(
        self,
        config: PretrainConfig,
        replica: Replica,
        loader: BatchLoader,
        evaluation: Evaluation | None,
        checkpointer: Checkpointer,
        meter: UtilisationMeter,
        listener: Listener,
    ) -> None:
        self._config = config
        self._replica = replica
        self._loader = loader
        self._evaluation = evaluation
        self._checkpointer = checkpointer
        self._meter = meter
        self._listener = listener
        self._engine = replica.engine
        self._engine_samples = config.batch.global_size

    def run(self, position: Position) -> int:
        """Advance `position` to the last step, or to where Ctrl-C stopped the run; returns the exit status."""
        steps = self._config.training.last_step
        told = out_of_memory_told(self._replica.stages)
        with told, StopRequest() as stop, self._loader.steps(position.consumed) as batches:
            while position.step < steps:
                stopped = self._step(position, batches, stop.requested)
                last = stopped or position.step == steps
                if self._evaluation is not None and not stopped and self._is_due(position, last):
                    self._listener.evaluation(self._evaluation.run(position.step))
                if self._checkpointer.is_due(position.step, last):
                    self._save(position, last)
                if stopped:
                    return INTERRUPTED
        return 0

    def _is_due(self, position: Position, last: bool) -> bool:
        every = self._config.evaluation.every
        return every is not None and (last or position.step % every == 0)

    def _save(self, position: Position, last: bool) -> None:
        """Save. When that fails on the way, a full disk say, the run goes on: the next save may succeed."""
        try:
            path = self._checkpointer.save(self._replica, position.step, position.consumed, tuple(position.losses))
        except CheckpointError as error:
            if last:
                raise
            self._listener.say(f"warning: no checkpoint after step {position.step}: {error}")
        else:
            self._listener.event("checkpoint", step=position.step, path=str(path))

    def _step(self, position: Position, batches: Iterator[StepBatch], stop: bool) -> bool:
        """Run the next step and tell of it; whether some rank wants to stop."""
        start = time.perf_counter()
        batch = next(batches)
        rate = learning_rate(self._config.optimizer, position.step + 1, self._config.training.steps)
        engine = self._engine_for(batch.num_samples)
        result = engine.run(StepInput(position.step, batch.contexts, batch.token_count, rate, stop))
        position.step += 1
        position.consumed += batch.num_samples
        position.losses.append((position.step, result.loss))
        self._listener.step(self._record(position, result, batch.num_samples, rate, time.perf_counter() - start))
        return result.stop

    def _engine_for(self, num_samples: int) -> Engine:
        """The engine for a batch of that size. A ramp never goes back, so the last one is all that is kept."""
        if num_samples == self._config.batch.global_size:
            return self._replica.engine
        if num_samples != self._engine_samples:
            self._engine, self._engine_samples = self._replica.engine_for(num_samples), num_samples
        return self._engine

    def _record(self, position: Position, result: StepResult, samples: int, rate: float, seconds: float) -> StepRecord:
        tokens = samples * self._config.data.sequence_length
        return StepRecord(
            step=position.step,
            loss=result.loss,
            learning_rate=rate,
            gradient_norm=result.gradient_norm,
            skipped=result.skipped,
            samples=samples,
            consumed_samples=position.consumed,
            tokens=tokens,
            loss_tokens=int(result.token_count),
            seconds=seconds,
            mfu=self._meter.mfu(tokens, seconds),
        )
