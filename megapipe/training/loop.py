"""The loop: step, tell, evaluate, save, stop."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest import RunState
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput, StepResult
from megapipe.optim.learning_rate import learning_rate
from megapipe.training.batch_plan import BatchPlan
from megapipe.training.evaluation import Evaluation
from megapipe.training.loader import Loader, StepBatch
from megapipe.training.memory_report import out_of_memory_told
from megapipe.training.profile import Profiler
from megapipe.training.records import Listener, StepRecord
from megapipe.training.replica import Replica
from megapipe.training.resume import Checkpointer
from megapipe.training.signals import StopRequest
from megapipe.training.throughput import UtilisationMeter

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


@dataclass(frozen=True)
class _FedStep:
    """A step that the engine was given and has not ended."""

    samples: int
    learning_rate: float
    loss_scale: float | None


class TrainingLoop:
    """Runs a replica from a position to the end of the run. Every rank runs it; rank 0's listener tells of it."""

    def __init__(
        self,
        config: PretrainConfig,
        replica: Replica,
        loader: Loader,
        evaluation: Evaluation | None,
        checkpointer: Checkpointer,
        meter: UtilisationMeter,
        listener: Listener,
        profiler: Profiler,
    ) -> None:
        self._config = config
        self._replica = replica
        self._loader = loader
        self._evaluation = evaluation
        self._checkpointer = checkpointer
        self._meter = meter
        self._listener = listener
        self._profiler = profiler
        self._engine = replica.engine
        self._engine_samples = config.batch.global_size
        self._plan = BatchPlan.of(config.batch)
        self._fed: deque[_FedStep] = deque()
        self._clock = 0.0
        self._save_asked = False

    def run(self, position: Position) -> int:
        """Advance `position` to the last step, or to where a signal stopped the run; returns the exit status.

        A schedule that never flushes has a step under way while the loop turns; it is drained where something has to
        happen between two steps.
        """
        steps = self._config.training.last_step
        told = out_of_memory_told(self._replica.stages)
        with told, StopRequest() as stop, self._loader.steps(position.consumed) as batches:
            while position.step < steps:
                stopped = self._feed(position, batches, stop.requested)
                self._tell_saves()
                if stopped or self._save_asked or self._pauses_behind(position):
                    stopped |= self._tell(position, self._engine.drain())
                if not self._fed:
                    self._pause(position, stopped)
                if stopped:
                    return stop.status
        return 0

    def _pauses_behind(self, position: Position) -> bool:
        """Whether something happens between the step that was fed last and the one after it."""
        step, consumed = position.step + len(self._fed), position.consumed + sum(fed.samples for fed in self._fed)
        last = step == self._config.training.last_step
        resized = self._plan.size(consumed) != self._engine_samples
        return last or resized or self._evaluates(step, last) or self._checkpointer.is_due(step, last)

    def _pause(self, position: Position, stopped: bool) -> None:
        """What is due between two steps."""
        last = stopped or position.step == self._config.training.last_step
        if self._evaluation is not None and not stopped and self._evaluates(position.step, last):
            self._listener.evaluation(self._evaluation.run(position.step))
        if self._save_asked or self._checkpointer.is_due(position.step, last):
            self._save(position, last, stopped)

    def _evaluates(self, step: int, last: bool) -> bool:
        every = self._config.evaluation.every
        return every is not None and (last or step % every == 0)

    def _save(self, position: Position, last: bool, stopped: bool) -> None:
        """Save. When that fails on the way, a full disk say, the run goes on: the next save may succeed."""
        self._save_asked = False
        state = position.step, position.consumed, tuple(position.losses)
        try:
            deadline = self._config.checkpoint.signal_deadline_seconds if stopped else None
            self._checkpointer.save(self._replica, *state, within=deadline)
            if last:
                self._checkpointer.finish()
        except CheckpointError as error:
            if last:
                raise
            self._listener.say(f"warning: no checkpoint after step {position.step}: {error}")
        self._tell_saves()

    def _tell_saves(self) -> None:
        """Tell of saves that have ended, which those beside training do at any time."""
        for save in self._checkpointer.ended():
            if save.error is None:
                self._listener.event("checkpoint", step=save.step, path=str(save.path))
            else:
                self._listener.say(f"warning: no checkpoint after step {save.step}: {save.error}")

    def _feed(self, position: Position, batches: Iterator[StepBatch], stop: bool) -> bool:
        """Give the engine its next step and tell of those that ended; whether some rank wants to stop."""
        if not self._fed:
            self._clock = time.perf_counter()
        step = position.step + len(self._fed)
        batch = next(batches)
        rate = learning_rate(self._config.optimizer, step + 1, self._config.training.steps)
        self._use_engine_for(batch.num_samples)
        self._profiler.before(step, self._engine)
        scaler = self._replica.loss_scaler
        scale = None if scaler is None else scaler.scale(step)
        self._fed.append(_FedStep(batch.num_samples, rate, scale))
        given = StepInput(
            step=step,
            contexts=batch.contexts,
            token_counts=batch.token_counts,
            learning_rate=rate,
            stop=stop,
            loss_scale=1.0 if scale is None else scale,
            save=self._checkpointer.saves.wishes(),
        )
        return self._tell(position, self._engine.feed(given))

    def _tell(self, position: Position, results: Sequence[StepResult]) -> bool:
        """Advance `position` over steps that ended; whether some rank wanted to stop in one of them."""
        for result in results:
            fed = self._fed.popleft()
            position.step += 1
            position.consumed += fed.samples
            position.losses.append((position.step, result.loss))
            now = time.perf_counter()
            self._listener.step(self._record(position, result, fed, now - self._clock))
            self._checkpointer.saves.step_ended(now - self._clock)
            self._clock = now
            if self._replica.loss_scaler is not None:
                self._replica.loss_scaler.observe(result.step, result.skipped)
        self._save_asked |= any(result.save for result in results)
        return any(result.stop for result in results)

    def _use_engine_for(self, num_samples: int) -> None:
        """Take the engine for a batch of that size. A ramp never goes back, so the last one is all that is kept."""
        if num_samples == self._engine_samples:
            return
        full = num_samples == self._config.batch.global_size
        self._engine = self._replica.engine if full else self._replica.engine_for(num_samples)
        self._engine_samples = num_samples

    def _record(self, position: Position, result: StepResult, fed: _FedStep, seconds: float) -> StepRecord:
        """What is told of a step. seconds: since the step before it ended, or since it was fed to an idle engine."""
        tokens = fed.samples * self._config.data.sequence_length
        return StepRecord(
            step=position.step,
            loss=result.loss,
            learning_rate=fed.learning_rate,
            gradient_norm=result.gradient_norm,
            skipped=result.skipped,
            samples=fed.samples,
            consumed_samples=position.consumed,
            tokens=tokens,
            loss_tokens=int(result.token_count),
            seconds=seconds,
            mfu=self._meter.mfu(tokens, seconds),
            terms=self._replica.family.named(result.loss_terms),
            loss_scale=fed.loss_scale,
        )
