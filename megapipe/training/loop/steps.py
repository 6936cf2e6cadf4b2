"""The training loop: step, report, evaluate, save, stop."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from megapipe.checkpoint.manifest import RunState
from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import Counts, StepInput, StepResult, tensor_on
from megapipe.layout.batch_plan import BatchPlan
from megapipe.optim.scaling import learning_rate
from megapipe.parallel.mesh import Mesh
from megapipe.spec.layers import load_variations
from megapipe.training.loop.batches import Samples, open_loader
from megapipe.training.loop.checkpoints import Checkpointer
from megapipe.training.loop.loader import SKIPPED_EVENT, Loader, Range, SkippingPlan, StepBatch
from megapipe.training.loop.replica import Replica
from megapipe.training.observe.display import UtilisationMeter
from megapipe.training.observe.listeners import Listeners
from megapipe.training.observe.records import SAVE_WAIT, EvaluationRecord, StepRecord
from megapipe.training.observe.traces import Profiler
from megapipe.training.resilience.failures import out_of_memory_reported
from megapipe.training.resilience.guards import Guards, Spike, spike_limit
from megapipe.training.resilience.signals import SignalRequests


def start_any_rank(mesh: Mesh, flag: bool) -> Callable[[], bool]:
    """Start to reduce a flag over all ranks; a collective call, between steps. The returned function waits for the
    other ranks and returns whether any of them set it."""
    total = tensor_on(np.array([flag], np.float32), mesh.device)
    work = mesh.world.all_reduce(total, "max", async_op=True)

    def answer() -> bool:
        work.wait()
        return bool(total)

    return answer


def any_rank(mesh: Mesh, flag: bool) -> bool:
    """Return whether any rank sets the flag. A collective call, between steps."""
    return start_any_rank(mesh, flag)()


class Evaluator:
    """Evaluates the newest weights without dropout, on the same validation samples in the same order every time.

    samples: the validation split. The first `evaluation.samples` of it are used, rounded up to whole batches of
    `batch.global_size`, so that every layout uses the same ones.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh, replica: Replica, samples: Samples) -> None:
        """A collective call."""
        size = config.batch.global_size
        self._num_batches = math.ceil(min(config.evaluation.samples, len(samples)) / size)
        self._mesh = mesh
        self._term_names = config.loss_terms
        self._engine = replica.forward_engine()
        self._loader = open_loader(config, mesh, replica, samples, BatchPlan(size, size, 0), training=False)
        last = replica.schedule.header.num_routed - 1 in replica.stages
        self._counts_loss = last and mesh.coordinate("tensor") == 0

    def rehearse(self) -> None:
        """Run every kernel of an evaluation; see `Engine.rehearse`. A collective call."""
        batch = self._loader.load(consumed=0)
        result = self._engine.rehearse(StepInput(0, batch.contexts, batch.token_counts))
        if self._counts_loss:
            batch_sums(result, batch.token_counts)

    def run(
        self,
        step: int,
        stop: Callable[[], bool] = lambda: False,
        report: Callable[[float], None] = lambda _: None,
    ) -> EvaluationRecord | None:
        """Evaluate after `step` steps. A collective call; every rank gets the same losses.

        stop: called after every batch; when it returns True on any rank, all ranks stop evaluating one batch later
        and return None.
        report: called after every batch with the fraction of batches that is done.

        The mean is over tokens, not over batches. The fp32 sums of micro-batches are added in float64. This is exact
        for sums of similar size, so their order, which depends on the layout, does not matter.
        """
        start = time.perf_counter()
        # Rows and columns as in batch_sums.
        totals = torch.zeros(3, len(self._term_names), dtype=torch.float64, device=self._mesh.device)
        stopped = start_any_rank(self._mesh, stop())
        with self._loader.steps(consumed=0) as batches:
            for done, batch in enumerate(itertools.islice(batches, self._num_batches), 1):
                result = self._engine.run(StepInput(step, batch.contexts, batch.token_counts))
                if self._counts_loss:
                    totals += batch_sums(result, batch.token_counts)
                report(done / self._num_batches)
                # The answer is awaited one batch later, so that the first stage does not wait for the last one.
                if stopped():
                    return None
                stopped = start_any_rank(self._mesh, stop())
        if stopped():
            return None
        self._mesh.world.all_reduce(totals)
        losses, counts, correct = totals.tolist()
        terms = tuple(total / max(count, 1.0) for total, count in zip(losses, counts, strict=True))
        accuracies = {
            name: total / max(count, 1.0)
            for name, total, count in zip(self._term_names, correct, counts, strict=True)
            if not math.isnan(total)
        }
        return EvaluationRecord(
            step=step,
            loss=sum(terms),
            perplexity=perplexity(terms[0]),
            loss_tokens=int(counts[0]),
            seconds=time.perf_counter() - start,
            terms=by_term(self._term_names, terms),
            accuracies=accuracies,
        )


def by_term(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return the value of each term of the loss by its name; empty if the loss has a single term."""
    return dict(zip(names, values, strict=True)) if len(names) > 1 else {}


def perplexity(loss: float) -> float:
    """Return e to the power of the loss; infinite if that overflows a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def batch_sums(result: StepResult, token_counts: Sequence[Counts]) -> torch.Tensor:
    """Return the sums over a batch's micro-batches as float64 of shape [3, loss terms], on the outputs' device.

    Rows: losses, loss tokens, correct predictions. Correct predictions are NaN if the model does not count them, also
    after the sum over ranks.
    """
    sums = [torch.stack(each).double().sum(0) for each in zip(*result.outputs, strict=True)]
    losses = torch.atleast_1d(sums[0])
    totals = np.array(token_counts, np.float64).reshape(len(token_counts), -1).sum(0)
    counts = tensor_on(totals, losses.device)
    correct = torch.atleast_1d(sums[1]) if len(sums) > 1 else torch.full_like(losses, torch.nan)
    return torch.stack([losses, counts, correct])


LOSSES_KEPT = 100
"""Number of last losses that a checkpoint stores."""

RETRY_PAUSE_SECONDS = 5.0
"""Seconds between two attempts to save at the end of a run."""


@dataclass
class Position:
    """The progress of a run: completed steps, consumed samples, the last losses as (step, loss), and the samples that
    were skipped because of a loss spike."""

    step: int = 0
    consumed: int = 0
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))
    skipped: tuple[Range, ...] = ()

    @classmethod
    def of(cls, run: RunState | None) -> "Position":
        """Return the position of a checkpoint; without a checkpoint, the start of the run."""
        if run is None:
            return cls()
        return cls(run.step, run.consumed_samples, deque(run.losses, maxlen=LOSSES_KEPT), run.skipped)


@dataclass(frozen=True)
class _FedStep:
    """A step that the engine has started but not finished. consumed: samples consumed after this step, including
    skipped ones."""

    samples: int
    consumed: int
    learning_rate: float
    loss_scale: float | None
    data_seconds: float


@dataclass(eq=False)
class TrainingLoop:
    """Runs a replica from a position to the end of the run, on every rank; only rank 0 has listeners."""

    config: PretrainConfig
    mesh: Mesh
    replica: Replica
    loader: Loader
    evaluation: Evaluator | None
    checkpointer: Checkpointer
    meter: UtilisationMeter
    listeners: Listeners
    profiler: Profiler
    guards: Guards

    def __post_init__(self) -> None:
        self._engine = self.replica.engine
        self._engine_samples = self.config.batch.global_size
        self._plan = SkippingPlan(BatchPlan.of(self.config.batch))
        self._spike: Spike | None = None
        self._fed: deque[_FedStep] = deque()
        self._clock = 0.0
        self._save_requested = False
        self._save_failed = False
        self._unsaved: set[int] = set()

    def run(self, position: Position) -> int:
        """Train until the last step or until a signal stops the run, advance `position`, and return the exit status.

        A schedule that never flushes always has a step in progress; it is drained when something has to happen between
        two steps.
        """
        self.checkpointer.saves.plan(self.replica.states())
        with out_of_memory_reported(self.replica.stages), SignalRequests() as signals:
            while True:
                status = self._run_until_spike(position, signals)
                if self._spike is None:
                    return status
                self._rewind(position, self._spike)

    def _run_until_spike(self, position: Position, signals: SignalRequests) -> int:
        configured = [(first, last) for first, last in self.config.reliability.skip_samples]
        self._plan = SkippingPlan(BatchPlan.of(self.config.batch), (*configured, *position.skipped))
        with self.loader.steps(position.consumed, self._plan) as batches:
            while position.step < self.config.training.last_step:
                stopped = self._feed(position, batches, signals)
                self._report_saves()
                pauses = self._save_requested or self._save_failed or self._pauses_after(position)
                if stopped or pauses or self._spike is not None:
                    stopped |= self._report(position, self._engine.drain())
                if self._spike is not None:
                    return 0
                if not self._fed:
                    stopped = self._pause(position, stopped, signals)
                if stopped:
                    return signals.end()
        return 0

    def _rewind(self, position: Position, spike: Spike) -> None:
        """Go back to the last checkpoint, and skip the samples at which the loss jumped up."""
        self._spike, self._save_requested, self._save_failed = None, False, False
        self.guards.heartbeat.outside("going back to a checkpoint")
        path = self.checkpointer.settle()
        self._report_saves()
        if path is None:
            self.listeners.say(
                f"warning: the loss jumped up to {spike.loss:.4f} at step {spike.step}, "
                "but no save of this run has succeeded yet, so the run cannot go back"
            )
            return
        restored = Position.of(self.checkpointer.restore(self.replica))
        self.guards.rewinds.count(restored.step, spike.step, spike.loss)
        first, stop = self._plan.last_batches(restored.consumed, spike.consumed, self.config.spikes.skip_batches)
        position.step, position.consumed, position.losses = restored.step, restored.consumed, restored.losses
        position.skipped = tuple(sorted({*position.skipped, *restored.skipped, (first, stop)}))
        self.listeners.event(
            "rewind", step=restored.step, spiked=spike.step, loss=spike.loss, limit=spike.limit, first=first, stop=stop
        )
        self.listeners.say(
            f"the loss jumped up to {spike.loss:.4f} at step {spike.step} (limit {spike.limit:.4f}): back to {path} "
            f"after step {restored.step}, without samples {first} to {stop - 1}"
        )

    def _pauses_after(self, position: Position) -> bool:
        """Return whether the run has to pause between the step that was fed last and the next one."""
        step, consumed = position.step + len(self._fed), self._consumed(position)
        last = step == self.config.training.last_step
        resized = self._plan.size(consumed) != self._engine_samples
        saves = self.checkpointer.saves.is_due(step, last)
        return last or resized or saves or self._evaluates(step, last) or self.guards.compares(step)

    def _consumed(self, position: Position) -> int:
        """Return the samples consumed after the step that was fed last."""
        return self._fed[-1].consumed if self._fed else position.consumed

    def _pause(self, position: Position, stopped: bool, signals: SignalRequests) -> bool:
        """Do what is due between two steps, and return whether any rank asked to stop."""
        at_end = position.step == self.config.training.last_step
        last = stopped or at_end
        if self._save_failed:
            self._save_failed = False
            self._end_save()
        self.guards.compare(self.replica, position.step)
        if self.evaluation is not None and not stopped and self._evaluates(position.step, last):
            self.guards.heartbeat.outside("evaluation")
            evaluated = self.evaluation.run(position.step, lambda: signals.stop)
            stopped = evaluated is None
            if evaluated is not None:
                self.listeners.evaluation(evaluated)
        if self._save_requested or self.checkpointer.saves.is_due(position.step, at_end, stopped):
            self._save(position, last or stopped, stopped)
            # A signal that arrived during the save must not wait for another step and another save.
            if not (last or stopped) and any_rank(self.mesh, signals.stop):
                stopped = True
                self._save(position, stopped, stopped)
        elif at_end:
            self.guards.heartbeat.outside("saving")
            self._end_save()
        return stopped

    def _end_save(self) -> None:
        """Wait for the background save, if there is one, and report how it ended. All ranks learn why it failed, and
        rank 0 stops waiting for the rank that failed."""
        with suppress(CheckpointError):
            self.checkpointer.finish()
        self._report_saves()

    def _evaluates(self, step: int, last: bool) -> bool:
        every = self.config.evaluation.every
        return every is not None and (last or step % every == 0)

    def _save(self, position: Position, last: bool, stopped: bool) -> None:
        """Save. A failed save is only a warning, because the next one may succeed. It is retried if the run has to end
        with a checkpoint: after a signal, and after the last step with checkpoint.at_end.

        last: the run ends here. stopped: a signal ends it, which leaves less time. Raises CheckpointError if the run
        has to end with a checkpoint and no attempt succeeds in time.
        """
        self._save_requested = False
        start = time.monotonic()
        required = last and (stopped or self.config.checkpoint.at_end)
        state = position.step, position.consumed, tuple(position.losses), position.skipped
        deadline = self.config.checkpoint.signal_deadline_seconds if stopped else None
        patience = self.config.checkpoint.retry_seconds
        give_up = start + (patience if deadline is None else min(patience, deadline))
        remaining = deadline
        while True:
            self.guards.heartbeat.outside("saving")
            self.listeners.retry()
            save_deadline = None if remaining is None else time.perf_counter() + remaining
            try:
                self.checkpointer.save(self.replica, *state, last=last, timeout=remaining)
                if last:
                    self.checkpointer.finish(save_deadline)
                break
            except CheckpointError as error:
                out_of_time = required and any_rank(self.mesh, time.monotonic() + RETRY_PAUSE_SECONDS > give_up)
                if out_of_time:
                    raise
                retry = f"; trying again every {RETRY_PAUSE_SECONDS:g} s" if required else ""
                self._warn_of_save(position.step, f"{error}{retry}")
                if not required:
                    break
                time.sleep(RETRY_PAUSE_SECONDS)
                remaining = None if deadline is None else max(0.0, give_up - time.monotonic())
        self.listeners.event(SAVE_WAIT, step=position.step, seconds=time.monotonic() - start)
        self._report_saves()

    def _report_saves(self) -> None:
        """Report saves that have ended. Background saves may end at any time."""
        for save in self.checkpointer.ended():
            if save.error is None:
                self.listeners.event("checkpoint", step=save.step, path=str(save.path))
                if save.step in self._unsaved:
                    self._unsaved.remove(save.step)
                    self.listeners.say(f"note: the checkpoint after step {save.step} is saved now: {save.path}")
            else:
                self._warn_of_save(save.step, str(save.error))

    def _warn_of_save(self, step: int, reason: str) -> None:
        """Warn once per step that there is no checkpoint."""
        if step not in self._unsaved:
            self._unsaved.add(step)
            self.listeners.say(f"warning: no checkpoint after step {step}: {reason}")

    def _feed(self, position: Position, batches: Iterator[StepBatch], signals: SignalRequests) -> bool:
        """Give the engine its next step, report the steps that ended, and return whether any rank asked to stop."""
        if not self._fed:
            self._clock = time.perf_counter()
        step = position.step + len(self._fed)
        self.guards.heartbeat.step(step, "loading its samples")
        requested = time.perf_counter()
        batch = next(batches)
        data_seconds = time.perf_counter() - requested
        rate = learning_rate(self.config.optimizer, step + 1, self.config.training.steps)
        self._use_engine_for(batch.num_samples)
        self.profiler.before(step, self._engine)
        self.guards.stragglers.before(step, self._engine, busy=self.profiler.recording)
        scaler = self.replica.loss_scaler
        scale = None if scaler is None else scaler.scale(step)
        consumed = self._next_consumed(position, step)
        self._fed.append(_FedStep(batch.num_samples, consumed, rate, scale, data_seconds))
        saves = self.checkpointer.saves
        step_input = StepInput(
            step=step,
            contexts=batch.contexts,
            token_counts=batch.token_counts,
            learning_rate=rate,
            stop=signals.stop,
            loss_scale=1.0 if scale is None else scale,
            save=saves.requests(signaled=signals.take_save()),
            save_failed=saves.background.failed,
            snapshot=saves.background.take_snapshot(),
        )
        return self._report(position, self._engine.feed(step_input))

    def _next_consumed(self, position: Position, step: int) -> int:
        """Return the samples consumed after the next step (number `step`, from 0), and report the samples that it
        skips."""
        consumed = self._consumed(position)
        begin = self._plan.begin(consumed)
        if begin > consumed:
            self.listeners.event(SKIPPED_EVENT, step=step + 1, first=consumed, stop=begin)
        return self._plan.end(consumed)

    def _report(self, position: Position, results: Sequence[StepResult]) -> bool:
        """Advance `position` over steps that ended, and return whether any rank asked to stop in one of them."""
        for result in results:
            fed = self._fed.popleft()
            position.step += 1
            position.consumed = fed.consumed
            self._check_for_spike(position, result.loss)
            position.losses.append((position.step, result.loss))
            now = time.perf_counter()
            self.listeners.step(self._record(position, result, fed, now - self._clock))
            self.checkpointer.saves.step_ended(now - self._clock)
            self._clock = now
            if self.replica.loss_scaler is not None:
                self.replica.loss_scaler.observe(result.step, result.skipped)
            self.guards.non_finite.observe(result)
        self._save_requested |= any(result.save for result in results)
        self._save_failed |= any(result.save_failed for result in results)
        return any(result.stop for result in results)

    def _check_for_spike(self, position: Position, loss: float) -> None:
        """Record a spike of the loss in the last step of `position`, if there may be a checkpoint to go back to."""
        if self._spike is None and self.config.spikes.watched and self.checkpointer.can_rewind:
            limit = spike_limit(self.config.spikes, [each for _, each in position.losses])
            if limit < loss < math.inf:
                self._spike = Spike(position.step, position.consumed, loss, limit)

    def _use_engine_for(self, num_samples: int) -> None:
        """Select the engine for a batch of `num_samples`. Batches only grow during a ramp, so only the last engine is
        kept."""
        if num_samples == self._engine_samples:
            return
        full = num_samples == self.config.batch.global_size
        self._engine = self.replica.engine if full else self.replica.engine_for(num_samples)
        self._engine_samples = num_samples

    def _record(self, position: Position, result: StepResult, fed: _FedStep, seconds: float) -> StepRecord:
        """Return the record of a step. seconds: since the previous step ended, or since an idle engine was fed."""
        tokens = fed.samples * self.config.data.sequence_length
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
            data_seconds=fed.data_seconds,
            mfu=self.meter.mfu(tokens, seconds),
            terms=by_term(self.config.loss_terms, result.loss_terms),
            loss_scale=fed.loss_scale,
            expert_load_variations=load_variations(
                self.config.model, result.squared_loads, tokens // self._engine.schedule.header.updates_per_step
            ),
        )
