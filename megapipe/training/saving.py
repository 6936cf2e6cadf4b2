"""Decide when a run saves, save between two steps or in the background, and collect the result of each save."""

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
"""Seconds that a failing run waits for the save in progress, because the ranks that it waits for may be gone."""

PATIENCE_SHARE = 0.5
"""Fraction of the timeout of collectives after which rank 0 gives up a save to which no rank writes: a rank that waits
for a disk must never look lost to its peers."""

NOTED_WAIT_SECONDS = 1.0
"""A save that waits longer than this for the previous one prints a note."""


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
        # Rank 0 decides for all ranks, and its decision is reduced together with the step's sums.
        self._timer = save_timer(config) if self._first else None
        self._ended: list[EndedSave] = []
        self._noted_wait = False
        self._deadline: float | None = None

    @property
    def under_way(self) -> bool:
        """Whether this rank is still writing."""
        return self._background.under_way

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank, and other ranks may not know yet."""
        return self._background.failed

    def is_due(self, step: int, last: bool, stopped: bool = False) -> bool:
        """Return whether the configuration asks for a checkpoint after `step`, on all ranks. last: this is the last
        step. stopped: a signal ends the run here."""
        every, config = self._config.every, self._config
        return (last and config.at_end) or (stopped and config.saves) or (isinstance(every, int) and step % every == 0)

    def requests(self, asked: bool) -> bool:
        """Return whether this rank asks all ranks to save after the next step. Not a collective call.

        asked: a signal asked this rank for a save, which a run without checkpoints ignores.
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
        """Record the duration of a step. Not a collective call."""
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

        between_steps: saves durably, for runs that are not asynchronous. last: `finish` is the next call and states do
        not change before it, so nothing is copied. within: seconds from now after which that `finish` gives up.
        """
        start = time.perf_counter()
        self.give_up_after(within)
        started = False
        try:
            if within is not None or self._config.asynchronous:
                path = self._background.start(states, applied, run, copied=not last, within=within)
                self._note_wait(self._background.waited)
            else:
                path = between_steps()
                if self._first:
                    self.delete_older()
                self._ended.append(EndedSave(run.step, path, time.perf_counter() - start))
            started = True
        finally:
            if self._timer is not None:
                self._timer.begun(time.perf_counter() - start)
                if not started:  # the next attempt is due after another interval, not after the next step
                    self._timer.ended(None)
        return path

    def give_up_after(self, seconds: float | None) -> None:
        """Set the seconds after which `finish` gives up the save in progress, None for never. Not collective."""
        self._deadline = None if seconds is None else time.perf_counter() + seconds

    def finish(self) -> None:
        """Wait until the save in progress is durable; see `BackgroundSaver.finish`. A collective call."""
        deadline = self._deadline
        self._background.finish(None if deadline is None else max(0.0, deadline - time.perf_counter()))

    def ended(self) -> list[EndedSave]:
        """Return the saves that ended since the last call, oldest first. Not collective: rank 0 knows the result
        on all ranks, the others only their own."""
        ended = [*self._ended, *self._background.poll()]
        self._ended.clear()
        if self._timer is not None and ended and not self._background.under_way:
            self._timer.ended(ended[-1].seconds if ended[-1].error is None else None)
        return ended

    def close(self, failed: bool) -> None:
        """End the last save. A collective call unless the run failed. Raises CheckpointError as `finish` does."""
        if failed:
            self._background.abandon(PATIENCE_AFTER_ERROR)
        else:
            self._background.finish()

    def delete_older(self) -> None:
        """Delete old checkpoints. If a deletion fails, the run continues, because that costs only space."""
        if self._config.keep_last is None:
            return
        try:
            keep_last(self._directory, self._config.keep_last, keep_every=self._config.keep_every)
        except OSError as error:
            self._say(f"warning: an old checkpoint in {self._directory} could not be deleted: {error}")

    def _note_wait(self, waited: float) -> None:
        if self._first and waited > NOTED_WAIT_SECONDS and not self._noted_wait:
            self._noted_wait = True
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
