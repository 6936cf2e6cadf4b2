"""When a run saves, where that happens, between two steps or beside them, and what became of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megapipe.checkpoint.background import BackgroundSaver, EndedSave
from megapipe.checkpoint.directory import keep_last
from megapipe.checkpoint.frequency import SaveTimer
from megapipe.checkpoint.manifest import RunState
from megapipe.config.between_steps import CheckpointConfig
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState

PATIENCE_AFTER_ERROR = 2.0
"""Seconds that a run which fails leaves the save under way: the ranks that it waits for may be gone."""

TOLD_WAIT_SECONDS = 1.0
"""A save that waits longer for the one before it is worth a remark."""


class Saves:
    """The saves of one run, seen from every rank."""

    def __init__(
        self, config: CheckpointConfig, directory: Path, mesh: Mesh, patience: float, say: Callable[[str], None]
    ) -> None:
        """Nothing is saved yet.

        patience: seconds that rank 0 waits while no rank writes anything. say: told on rank 0 of what a user should
        know.
        """
        self._config = config
        self._directory = directory
        self._first = mesh.rank == 0
        self._say = say
        self._background = BackgroundSaver(directory, mesh, patience=patience, after=self.delete_older)
        # Rank 0 decides for all, and the others learn of it along with a step's sums.
        self._timer = save_timer(config) if self._first else None
        self._ended: list[EndedSave] = []
        self._told_of_wait = False
        self._deadline: float | None = None

    @property
    def under_way(self) -> bool:
        """Whether this rank still writes."""
        return self._background.under_way

    def is_due(self, step: int, last: bool) -> bool:
        """Whether the configuration asks for a checkpoint after `step`, on all ranks. last: the run ends here."""
        every = self._config.every
        return self._config.saves and (last or (isinstance(every, int) and step % every == 0))

    def wishes(self, asked: bool) -> bool:
        """Whether this rank asks all ranks to save after the step that comes next. No collective.

        asked: whether a signal asked this rank for a save, which a run that saves nothing leaves unanswered.
        """
        if asked and not self._config.saves:
            print("note: SIGUSR1 asks for a checkpoint, but this run saves none: set checkpoint.every", flush=True)
            return False
        return asked or (self._timer is not None and self._timer.is_due)

    def plan(self, states: Sequence[UnitState]) -> None:
        """Hear of what will be saved, before the first step. A collective call."""
        if self._config.saves and self._config.asynchronous:
            self._background.plan(states)

    def step_ended(self, seconds: float) -> None:
        """Hear of a step's duration. No collective."""
        self._background.prepare()
        if self._timer is not None:
            self._timer.step(seconds)

    def begin(
        self,
        states: Sequence[UnitState],
        applied: Mapping[str, int],
        run: RunState,
        between_steps: Callable[[], Path],
        *,
        within: float | None,
    ) -> Path:
        """Save as configured, and return where. A collective call.

        between_steps: saves durably, for runs that are not asynchronous. within: seconds from now after which
        `finish`, which comes next, gives up; states stay as they are until then, so nothing is copied.
        """
        begun = time.perf_counter()
        self.give_up_after(within)
        if within is not None or self._config.asynchronous:
            path = self._background.start(states, applied, run, copied=within is None, within=within)
            self._remark_on(self._background.waited)
        else:
            path = between_steps()
            if self._first:
                self.delete_older()
            self._ended.append(EndedSave(run.step, path, time.perf_counter() - begun))
        if self._timer is not None:
            self._timer.begun(time.perf_counter() - begun)
        return path

    def give_up_after(self, seconds: float | None) -> None:
        """Have `finish` give up the save under way so long from now; None: never. No collective."""
        self._deadline = None if seconds is None else time.perf_counter() + seconds

    def finish(self) -> None:
        """Return once the save under way is durable; see `BackgroundSaver.finish`. A collective call."""
        deadline = self._deadline
        self._background.finish(None if deadline is None else max(0.0, deadline - time.perf_counter()))

    def ended(self) -> list[EndedSave]:
        """What became of saves since the last call, oldest first. No collective: rank 0 knows of all, others of their
        own share."""
        ended = [*self._ended, *self._background.poll()]
        self._ended.clear()
        if self._timer is not None and ended and not self._background.under_way:
            self._timer.ended(ended[-1].seconds if ended[-1].error is None else None)
        return ended

    def close(self, failed: bool) -> None:
        """End with the run. A collective call, unless it failed. Raises CheckpointError as `finish` does."""
        if failed:
            self._background.abandon(PATIENCE_AFTER_ERROR)
        else:
            self._background.finish()

    def delete_older(self) -> None:
        """Delete what need not be kept. A deletion that fails costs space alone, so the run goes on."""
        if self._config.keep_last is None:
            return
        try:
            keep_last(self._directory, self._config.keep_last, keep_every=self._config.keep_every)
        except OSError as error:
            self._say(f"warning: an old checkpoint in {self._directory} could not be deleted: {error}")

    def _remark_on(self, waited: float) -> None:
        if self._first and waited > TOLD_WAIT_SECONDS and not self._told_of_wait:
            self._told_of_wait = True
            self._say(
                f"note: training stood still for {waited:.1f} s until the save before this one was durable; save "
                "less often, or with checkpoint.every auto (told once)"
            )


def save_timer(config: CheckpointConfig) -> SaveTimer | None:
    """What decides when to save out of what it measures; None where the configuration names steps alone."""
    if config.every != "auto" and config.every_minutes is None:
        return None
    return SaveTimer(
        max_overhead=config.max_overhead if config.every == "auto" else None,
        seconds_between=None if config.every_minutes is None else 60 * config.every_minutes,
    )
