"""When a run saves, whether between two steps or in the background, and what became of each save."""

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
from megapipe.training.output import print_line

PATIENCE_AFTER_ERROR = 2.0
"""Seconds that a failing run gives the save under way: the ranks that it waits for may be gone."""

PATIENCE_SHARE = 0.5
"""Part of the time that collectives wait, after which rank 0 gives up a save that nobody writes for: a rank must never
look lost to its peers while it waits for a disk."""

REMARKABLE_WAIT_SECONDS = 1.0
"""A save that waits longer than this for the one before it causes a remark."""


class Saves:
    """The saves of one run, seen from every rank."""

    def __init__(
        self, config: CheckpointConfig, directory: Path, mesh: Mesh, timeout: float, say: Callable[[str], None]
    ) -> None:
        """Save nothing yet.

        timeout: seconds that a collective waits for its peers. say: called with lines for the user.
        """
        self._config = config
        self._directory = directory
        self._first = mesh.rank == 0
        self._say = say
        patience = PATIENCE_SHARE * timeout
        self._background = BackgroundSaver(directory, mesh, patience=patience, after=self.delete_older)
        # Rank 0 decides for all; the others learn its decision with a step's sums.
        self._timer = save_timer(config) if self._first else None
        self._ended: list[EndedSave] = []
        self._remarked = False
        self._deadline: float | None = None

    @property
    def under_way(self) -> bool:
        """Whether this rank still writes."""
        return self._background.under_way

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank, and other ranks may not know yet."""
        return self._background.failed

    def is_due(self, step: int, last: bool, stopped: bool = False) -> bool:
        """Whether the configuration asks for a checkpoint after `step`, on all ranks. last: this is the last step.
        stopped: a signal ends the run here."""
        every, config = self._config.every, self._config
        return (last and config.at_end) or (stopped and config.saves) or (isinstance(every, int) and step % every == 0)

    def requests(self, asked: bool) -> bool:
        """Whether this rank asks all ranks to save after the next step. No collective.

        asked: whether a signal asked this rank for a save, which a run that saves nothing does not make.
        """
        if asked and not self._config.saves:
            print_line(
                "note: SIGUSR1 asks for a checkpoint, but this run does not save: set checkpoint.at_end true, or "
                "checkpoint.every"
            )
            return False
        return asked or (self._timer is not None and self._timer.is_due)

    def plan(self, states: Sequence[UnitState]) -> None:
        """Prepare to save these states, before the first step. A collective call."""
        if self._config.saves_between and self._config.asynchronous:
            self._background.plan(states)

    def step_ended(self, seconds: float) -> None:
        """Take note of a step's duration. No collective."""
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
        last: bool,
        within: float | None,
    ) -> Path:
        """Save as configured, and return the checkpoint's folder. A collective call.

        between_steps: saves durably, for runs that are not asynchronous. last: `finish` comes next, and states do not
        change before, so that nothing is copied. within: seconds from now after which that `finish` gives up.
        """
        begun = time.perf_counter()
        self.give_up_after(within)
        started = False
        try:
            if within is not None or self._config.asynchronous:
                path = self._background.start(states, applied, run, copied=not last, within=within)
                self._remark_on(self._background.waited)
            else:
                path = between_steps()
                if self._first:
                    self.delete_older()
                self._ended.append(EndedSave(run.step, path, time.perf_counter() - begun))
            started = True
        finally:
            if self._timer is not None:
                self._timer.begun(time.perf_counter() - begun)
                if not started:  # the next attempt is due after another interval, not after the next step
                    self._timer.ended(None)
        return path

    def give_up_after(self, seconds: float | None) -> None:
        """Have `finish` give up the save under way after so many seconds; None: never. No collective."""
        self._deadline = None if seconds is None else time.perf_counter() + seconds

    def finish(self) -> None:
        """Return once the save under way is durable; see `BackgroundSaver.finish`. A collective call."""
        deadline = self._deadline
        self._background.finish(None if deadline is None else max(0.0, deadline - time.perf_counter()))

    def ended(self) -> list[EndedSave]:
        """Return the saves that ended since the last call, oldest first. No collective: rank 0 knows all of them,
        other ranks their own part."""
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
        """Delete checkpoints that are not to be kept. A deletion that fails costs only space, so the run continues."""
        if self._config.keep_last is None:
            return
        try:
            keep_last(self._directory, self._config.keep_last, keep_every=self._config.keep_every)
        except OSError as error:
            self._say(f"warning: an old checkpoint in {self._directory} could not be deleted: {error}")

    def _remark_on(self, waited: float) -> None:
        if self._first and waited > REMARKABLE_WAIT_SECONDS and not self._remarked:
            self._remarked = True
            self._say(
                f"note: training waited {waited:.1f} s until the previous save was durable; save less often, or set "
                "checkpoint.every auto (this note is printed once)"
            )


def save_timer(config: CheckpointConfig) -> SaveTimer | None:
    """Return the timer that decides when to save; None where the configuration only names steps."""
    if config.every != "auto" and config.every_minutes is None:
        return None
    return SaveTimer(
        max_overhead=config.max_overhead if config.every == "auto" else None,
        seconds_between=None if config.every_minutes is None else 60 * config.every_minutes,
    )
