"""The checkpoints of a run: when to save, how (between steps or in the background), and which one to resume from."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from megapipe.checkpoint.background import BackgroundSaver, EndedSave
from megapipe.checkpoint.directory import (
    DirectoryLock,
    checkpoint_in,
    keep_last,
    make_durable_folder,
    newest_valid,
    quarantine,
    set_aside,
    step_folder,
    steps,
)
from megapipe.checkpoint.fit import RunFit, check_model, check_run, model_differences
from megapipe.checkpoint.frequency import SaveTimer
from megapipe.checkpoint.hugging_face import is_hugging_face, load_hugging_face
from megapipe.checkpoint.manifest import MANIFEST, DataChange, Manifest, RunState, read_manifest
from megapipe.checkpoint.save_and_load import load, load_weights, save
from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError, agreed, explained, on_first_rank
from megapipe.config.run import CheckpointConfig, PretrainConfig
from megapipe.data.identity import DataIdentity, data_identity
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.training.loop.replica import Replica
from megapipe.training.observe.records import print_line

PATIENCE_AFTER_ERROR = 2.0
"""Seconds that a failing run waits for the save in progress, because the ranks that it waits for may be gone."""

PATIENCE_SHARE = 0.5
"""Fraction of the collective timeout after which rank 0 abandons a save to which no rank writes: a rank that waits for
a disk must never appear dead to its peers."""

NOTED_WAIT_SECONDS = 1.0
"""A save that waits longer than this for the previous one prints a note."""


class Saves:
    """One rank's part in the saves of a run.

    Attributes:
        background: writes while training continues.
    """

    def __init__(
        self, config: CheckpointConfig, directory: Path, mesh: Mesh, timeout: float, say: Callable[[str], None]
    ) -> None:
        """timeout: seconds that a collective waits for its peers. say: called with lines for the user."""
        self._config = config
        self._directory = directory
        self._mesh = mesh
        self._first = mesh.rank == 0
        self._say = say
        patience = PATIENCE_SHARE * timeout
        self.background = BackgroundSaver(directory, mesh, patience=patience, after=self.delete_older)
        # Rank 0 decides for all ranks, and its decision is reduced together with the step's sums.
        self._timer = save_timer(config) if self._first else None
        self._ended: list[EndedSave] = []
        self._noted_wait = False

    def is_due(self, step: int, last: bool, stopped: bool = False) -> bool:
        """Return whether the configuration asks for a checkpoint after `step`, on all ranks. last: this is the last
        step. stopped: a signal ends the run here."""
        every, config = self._config.every, self._config
        return (last and config.at_end) or (stopped and config.saves) or (isinstance(every, int) and step % every == 0)

    def requests(self, signaled: bool) -> bool:
        """Return whether this rank asks all ranks to save after the next step. Not a collective call.

        signaled: a signal asked this rank for a save, which a run without checkpoints ignores.
        """
        if signaled and not self._config.saves:
            print_line(
                "note: SIGUSR1 asks for a checkpoint, but this run does "
                "not save: set checkpoint.at_end true, or checkpoint.every"
            )
            return False
        return signaled or (self._timer is not None and self._timer.is_due)

    def plan(self, states: Sequence[UnitState]) -> None:
        """Prepare to save these states, before the first step. A collective call."""
        if self._config.saves_between and self._config.asynchronous:
            self.background.plan(states)

    def step_ended(self, seconds: float) -> None:
        """Record the duration of a step. Not a collective call."""
        self.background.prepare()
        if self._timer is not None:
            self._timer.step(seconds)

    def begin(
        self,
        states: Sequence[UnitState],
        applied: Mapping[str, int],
        run: RunState,
        *,
        last: bool,
        timeout: float | None,
    ) -> Path:
        """Save as configured, and return the checkpoint's folder. A collective call.

        last: `finish` is the next call and states do not change before it, so nothing is copied. timeout: seconds from
        now until the deadline of that `finish`.
        """
        start = time.perf_counter()
        started = False
        try:
            if timeout is not None or self._config.asynchronous:
                by_step = self._config.snapshot == "next_step"
                path = self.background.start(states, applied, run, copied=not last, by_step=by_step, timeout=timeout)
                self._note_wait(self.background.waited)
            else:
                path = save(self._directory, states, applied, run, self._mesh)
                if self._first:
                    self.delete_older()
                self._ended.append(EndedSave(run.step, path, time.perf_counter() - start))
            started = True
        finally:
            if self._timer is not None:
                self._timer.save_started(time.perf_counter() - start)
                # The next attempt is due after another interval, not after the next step.
                if not started:
                    self._timer.save_ended(None)
        return path

    def finish(self, deadline: float | None = None) -> None:
        """Wait until the save in progress is durable; see `BackgroundSaver.finish`. A collective call. deadline: time
        of `time.perf_counter` at which the save is abandoned, None for never."""
        self.background.finish(None if deadline is None else max(0.0, deadline - time.perf_counter()))

    def ended(self) -> list[EndedSave]:
        """Return the saves that ended since the last call, oldest first. Not collective: rank 0 knows the result
        on all ranks, the others only their own."""
        ended = [*self._ended, *self.background.poll()]
        self._ended.clear()
        if self._timer is not None and ended and not self.background.under_way:
            self._timer.save_ended(ended[-1].seconds if ended[-1].error is None else None)
        return ended

    def close(self, failed: bool) -> None:
        """End the last save. A collective call unless the run failed. Raises CheckpointError as `finish` does."""
        if failed:
            self.background.abandon(PATIENCE_AFTER_ERROR)
        else:
            self.background.finish()

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
                f"note: training waited {waited:.1f} s until the previous save was durable; "
                "save less often, or set checkpoint.every auto (this note is printed once)"
            )


def save_timer(config: CheckpointConfig) -> SaveTimer | None:
    """Return the timer that decides when to save; None if the configuration only names steps."""
    if config.every != "auto" and config.every_minutes is None:
        return None
    return SaveTimer(
        max_overhead=config.max_overhead if config.every == "auto" else None,
        seconds_between=None if config.every_minutes is None else 60 * config.every_minutes,
    )


def checkpoint_directory(config: PretrainConfig) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(config.training.directory) / "checkpoints"


@dataclass(eq=False)
class Checkpointer:
    """One rank's view of the checkpoints of a run. Every method is a collective call.

    path: the checkpoint that `restore` will resume from, None for a new run. precision: the checkpoint's training
    precision, which `training.precision: auto` keeps; known before the model is built. data_change: the change of the
    samples that the last `restore` accepted, or None. can_rewind: whether there may be a checkpoint to go back to: one
    was loaded, or a save has started. `settle` returns it, if it exists. The value is the same on all ranks.
    """

    config: PretrainConfig
    mesh: Mesh
    say: Callable[[str], None] = print
    """Called on rank 0 with what a user should know."""
    lock: DirectoryLock | None = None
    """Lock of the run's folder, which rank 0 holds. It is kept if a save is still being written at the end."""

    def __post_init__(self) -> None:
        """Find the checkpoint to continue from.

        Raises:
            CheckpointError: the directory contains checkpoints of another run, or only damaged ones. The same on every
                rank.
        """
        config, mesh = self.config, self.mesh
        self.directory = checkpoint_directory(config)
        on_first_rank(mesh.world, self._prepare_directory)
        self.path = self._newest()
        self._data: DataIdentity | None = None
        self.data_change: DataChange | None = None
        self._data_changes: tuple[DataChange, ...] = ()
        self._saved_step: int | None = None
        self.can_rewind = False
        self.saves = Saves(config.checkpoint, self.directory, mesh, config.parallel.timeout_seconds, self.say)

    @property
    def precision(self) -> str | None:
        """Precision of the checkpoint to resume from."""
        path = self.path
        return None if path is None else on_first_rank(self.mesh.world, lambda: read_manifest(path).run.precision)

    def describe(self, config: PretrainConfig) -> None:
        """Set the configuration that checkpoints store, with every `auto` replaced by its value. Also identify the
        data, before training reads them. A collective call.
        """
        self.config = config
        if config.checkpoint.saves:
            self._data_identity()

    def restore(self, replica: Replica) -> RunState | None:
        """Load the newest complete checkpoint, or else the weights of `init_from`; return None for a new run.

        A checkpoint whose bytes are damaged is set aside, and the previous one is loaded.

        Raises:
            CheckpointError: the checkpoint, or the folder of weights, does not fit the model or the run, or the data
                have changed and checkpoint.accept_other_data is false.
        """
        while self.path is not None:
            try:
                return self._resume(self.path, replica)
            except DamagedCheckpointError as error:
                on_first_rank(self.mesh.world, partial(quarantine, self.path, error, self.say))
                self.path = self._newest()
        if self.config.init_from:
            self._initialize(Path(self.config.init_from), replica)
        return None

    def save(
        self,
        replica: Replica,
        step: int,
        consumed: int,
        losses: Sequence[tuple[int, float]],
        skipped: Sequence[tuple[int, int]] = (),
        *,
        last: bool = False,
        timeout: float | None = None,
    ) -> Path:
        """Save the state after `step`, then delete all but the last few checkpoints.

        With checkpoint.asynchronous this returns once the state is copied, and `finish` returns once the checkpoint is
        durable. A step that is already saved is not saved again.

        Args:
            losses: the last (step, loss) pairs.
            skipped: as in RunState.
            last: `finish` is the next call, so nothing is copied.
            timeout: seconds until the deadline of that `finish`.

        Raises:
            CheckpointError: the checkpoint could not be written. Older checkpoints are untouched, and the run may
                continue.
        """
        if self._saved_step == step:
            return step_folder(self.directory, step)
        states = replica.states()
        run = RunState(
            step=step,
            consumed_samples=consumed,
            random={"seed": self.config.training.seed},
            precision=self.config.training.precision,
            losses=tuple(losses),
            config=asdict(self.config),
            loss_scale={} if replica.loss_scaler is None else replica.loss_scaler.state(),
            skipped=tuple(skipped),
            data=self._data_identity(),
            data_changes=self._data_changes,
        )
        path = self.saves.begin(states, replica.optimizer.applied, run, last=last, timeout=timeout)
        self._saved_step = step
        self.can_rewind = True
        return path

    def finish(self, deadline: float | None = None) -> None:
        """Return once the save in progress is durable. deadline: as in `Saves.finish`.

        Raises CheckpointError when it failed or was abandoned; older checkpoints are untouched, and `save` may try
        this step again.
        """
        try:
            self.saves.finish(deadline)
        except CheckpointError:
            self._saved_step = None
            raise

    def settle(self) -> Path | None:
        """Wait for the save in progress, which may fail, and return the checkpoint that `restore` would load now."""
        with suppress(CheckpointError):  # `ended` reports it
            self.finish()
        newest = on_first_rank(self.mesh.world, lambda: newest_valid(self.directory, self.say))
        self.path = self._on_this_host(newest)
        self.can_rewind = self.path is not None
        return self.path

    def ended(self) -> list[EndedSave]:
        """Return the saves that ended since the last call, oldest first. Only rank 0 knows the result on all ranks."""
        ended = self.saves.ended()
        self.path = next((each.path for each in reversed(ended) if each.error is None), self.path)
        return ended

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.saves.close(failed=kind is not None)
        finally:
            # While a thread still writes, the lock must exclude other jobs until this process ends.
            if self.lock is not None and self.saves.background.under_way:
                self.lock.keep()

    def _prepare_directory(self) -> None:
        """Create the directory if this run writes to it, and check that it may be used."""
        if not self.config.checkpoint.saves:
            return
        try:
            make_durable_folder(self.directory)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.directory}: {explained(error, self.directory)}") from error
        if not self.config.checkpoint.resume and steps(self.directory):
            raise CheckpointError(
                f"{self.directory} contains checkpoints, but checkpoint.resume is "
                "false; choose another training.directory, or move the checkpoints away"
            )

    def _newest(self) -> Path | None:
        if not self.config.checkpoint.resume:
            return None
        return self._on_this_host(on_first_rank(self.mesh.world, self._find_newest))

    def _on_this_host(self, path: Path | None) -> Path | None:
        """Return the path of rank 0's checkpoint on this host, where the folder may have another path."""
        return None if path is None else self.directory / path.name

    def _find_newest(self) -> Path | None:
        newest = newest_valid(self.directory, self.say)
        damaged = set_aside(self.directory)
        if newest is None and damaged:
            raise CheckpointError(
                f"every checkpoint in {self.directory} is damaged, the newest being {damaged[-1].name}; move them "
                "away to start from the beginning, or choose another training.directory"
            )
        return newest

    def _resume(self, path: Path, replica: Replica) -> RunState:
        data = self._data_identity()
        fit = agreed(self.mesh.world, lambda: self._check_fit(path, replica, data))
        run = load(
            path,
            replica.states(),
            replica.optimizer.applied,
            self.mesh,
            moments=replica.optimizer,
            updates_per_step=replica.schedule.header.updates_per_step,
        )
        if replica.loss_scaler is not None:
            replica.loss_scaler.restore(run.loss_scale, run.step)
        self._saved_step = run.step
        self.can_rewind = True
        self.data_change = DataChange(run.step, fit.other_data) if fit.other_data else None
        self._data_changes = run.data_changes + ((self.data_change,) if self.data_change else ())
        if self.mesh.rank == 0:
            self._report(path, run, fit)
        return run

    def _report(self, path: Path, run: RunState, fit: RunFit) -> None:
        self.say(f"resumed from {path} after step {run.step} ({run.consumed_samples:,} samples)")
        for difference in fit.reported:
            self.say(f"note: {difference} in the checkpoint")
        if fit.unknown_data:
            self.say(
                f"warning: {path} does not record which data it was trained on, so megapipe "
                "cannot check that the data are the same; the next checkpoint records them"
            )
        if fit.other_data:
            self.say(
                f"warning: from step {run.step + 1}, the run uses other samples, which "
                f"checkpoint.accept_other_data allows: {'; '.join(fit.other_data)}"
            )

    def _data_identity(self) -> DataIdentity:
        """Return the identity of the run's data, which rank 0 determines at the first call. A collective call."""
        if self._data is None:
            self._data = on_first_rank(self.mesh.world, lambda: data_identity(self.config.data))
        return self._data

    def _check_fit(self, path: Path, replica: Replica, data: DataIdentity) -> RunFit:
        """Raise CheckpointError if the checkpoint belongs to another model, or to a run on other samples."""
        manifest = read_manifest(path)
        fit = check_run(path, manifest, self.config, data)
        self._check_model(path, manifest, replica)
        return fit

    def _check_model(self, path: Path, manifest: Manifest, replica: Replica) -> None:
        specs = [spec for layer in replica.layout.layers for spec in layer.parameters.values()]
        try:
            check_model(manifest, specs, asdict(self.config.model))
        except CheckpointError as error:
            raise CheckpointError(f"{path} does not fit: {error}") from error

    def _initialize(self, folder: Path, replica: Replica) -> None:
        """Load only the weights, from a megapipe checkpoint or a Hugging Face folder."""
        path = folder / on_first_rank(self.mesh.world, lambda: weights_folder(folder).relative_to(folder))
        differences: list[str] = []
        if is_hugging_face(path):
            load_hugging_face(path, replica.states(), self.config.model, self.mesh)
        else:
            agreed(self.mesh.world, lambda: self._check_model(path, read_manifest(path), replica))
            differences = model_differences(load_weights(path, replica.states(), self.mesh), asdict(self.config.model))
        if self.mesh.rank == 0:
            for difference in differences:
                self.say(f"note: {difference}")
            self.say(f"initial weights from {path}")


def weights_folder(folder: Path) -> Path:
    """Return the folder that `init_from` means: a Hugging Face folder itself, otherwise `checkpoint_in` of the folder.

    Raises CheckpointError if there is neither.
    """
    checkpoint = folder if is_hugging_face(folder) else checkpoint_in(folder)
    if checkpoint is None:
        raise CheckpointError(
            f"init_from {folder} is neither a megapipe checkpoint (a folder with {MANIFEST}, "
            "or the folder of a run with complete checkpoints) nor a Hugging "
            "Face model (a folder with config.json and safetensors files)"
            if folder.is_dir()
            else f"init_from {folder} is not a folder"
        )
    return checkpoint
