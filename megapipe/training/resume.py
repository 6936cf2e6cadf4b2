"""A run's checkpoints: resume from the newest, load initial weights from elsewhere, save, keep the last few."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from megapipe.checkpoint.agreement import agreed, on_first_rank
from megapipe.checkpoint.background import EndedSave
from megapipe.checkpoint.directory import newest_valid, newest_whole, quarantine, set_aside, step_folder, steps
from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.fit import RunFit, check_model, check_run, model_differences
from megapipe.checkpoint.hugging_face import is_hugging_face, load_hugging_face
from megapipe.checkpoint.load import load, load_weights
from megapipe.checkpoint.lock import DirectoryLock, make_durable_folder
from megapipe.checkpoint.manifest import DataChange, Manifest, RunState
from megapipe.checkpoint.manifest_file import MANIFEST, read_manifest
from megapipe.checkpoint.save import save
from megapipe.checkpoint.storage import explained
from megapipe.config.run import PretrainConfig
from megapipe.data.identity import DataIdentity, data_identity
from megapipe.parallel.mesh import Mesh
from megapipe.training.replica import Replica
from megapipe.training.saving import Saves

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def checkpoint_directory(config: PretrainConfig) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(config.training.directory) / "checkpoints"


class Checkpointer:
    """The checkpoints of one run, seen from every rank. Every method is a collective call.

    path: the checkpoint that `restore` will resume from, None for a run that starts. precision: the one that it was
    trained in, which `training.precision: auto` keeps; known before the model is built. data_change: the change of the
    samples that the last `restore` accepted, or None.
    """

    def __init__(
        self,
        config: PretrainConfig,
        mesh: Mesh,
        say: Callable[[str], None] = print,
        lock: DirectoryLock | None = None,
    ) -> None:
        """Find the checkpoint to continue from.

        Args:
            say: called on rank 0 with what a user should know.
            lock: lock of the run's folder, which rank 0 holds. It is kept if a save is still being written at the end.

        Raises:
            CheckpointError: the directory contains checkpoints of another run, or only damaged ones. The same on every
                rank.
        """
        self._config = config
        self._mesh = mesh
        self._say = say
        self._lock = lock
        self.directory = checkpoint_directory(config)
        on_first_rank(mesh.world, self._prepare_directory)
        self.path = self._newest()
        self._data: DataIdentity | None = None
        self.data_change: DataChange | None = None
        self._data_changes: tuple[DataChange, ...] = ()
        self._saved_step: int | None = None
        self._can_rewind = False
        self.saves = Saves(config.checkpoint, self.directory, mesh, config.parallel.timeout_seconds, say)

    @property
    def precision(self) -> str | None:
        """Precision of the checkpoint to resume from."""
        path = self.path
        return None if path is None else on_first_rank(self._mesh.world, lambda: read_manifest(path).run.precision)

    def describe(self, config: PretrainConfig) -> None:
        """Store this configuration in checkpoints, in which `auto` is replaced by the choice that was made.

        The data are identified now, before training reads them. A collective call.
        """
        self._config = config
        if config.checkpoint.saves:
            self._data_identity()

    def restore(self, replica: Replica) -> RunState | None:
        """Load the newest complete checkpoint, or else the weights of `init_from`; return None for a run that starts.

        A checkpoint whose bytes are damaged is set aside, and the previous one is loaded.

        Raises:
            CheckpointError: the checkpoint, or the folder of weights, does not fit the model or the run, or the data
                have changed and checkpoint.accept_other_data is false.
        """
        while self.path is not None:
            try:
                return self._resume(self.path, replica)
            except DamagedCheckpointError as error:
                self._set_aside(self.path, error)
                self.path = self._newest()
        if self._config.init_from:
            self._initialize(Path(self._config.init_from), replica)
        return None

    def is_due(self, step: int, last: bool = False, stopped: bool = False) -> bool:
        """Whether the configuration asks for a checkpoint after `step`; arguments as of `Saves.is_due`."""
        return self.saves.is_due(step, last, stopped)

    def save(
        self,
        replica: Replica,
        step: int,
        consumed: int,
        losses: Sequence[tuple[int, float]],
        skipped: Sequence[tuple[int, int]] = (),
        *,
        last: bool = False,
        within: float | None = None,
    ) -> Path:
        """Save the state after `step`, then delete all but the last few checkpoints.

        With checkpoint.asynchronous this returns once the state is copied, and `finish` once it is durable. A step
        that is saved already is not saved again.

        Args:
            losses: the last (step, loss) pairs.
            skipped: as in RunState.
            last: `finish` comes next, so that nothing is copied.
            within: seconds after which that `finish` gives the save up.

        Raises:
            CheckpointError: it could not be written. Older checkpoints are untouched, and the run may continue.
        """
        if self._saved_step == step:
            self.saves.give_up_after(within)
            return step_folder(self.directory, step)
        states = replica.states()
        run = RunState(
            step=step,
            consumed_samples=consumed,
            random={"seed": self._config.training.seed},
            precision=PRECISIONS[states[0].weights[0].dtype],
            losses=tuple(losses),
            config=asdict(self._config),
            loss_scale={} if replica.loss_scaler is None else replica.loss_scaler.state(),
            skipped=tuple(skipped),
            data=self._data_identity(),
            data_changes=self._data_changes,
        )
        applied = replica.optimizer.applied
        path = self.saves.begin(
            states,
            applied,
            run,
            lambda: save(self.directory, states, applied, run, self._mesh),
            last=last,
            within=within,
        )
        self._saved_step = step
        self._can_rewind = True
        return path

    def finish(self) -> None:
        """Return once the save in progress is durable.

        Raises CheckpointError when it failed or was given up; older checkpoints are untouched, and `save` may try this
        step again.
        """
        try:
            self.saves.finish()
        except CheckpointError:
            self._saved_step = None
            raise

    @property
    def can_rewind(self) -> bool:
        """Whether there may be a checkpoint to go back to: one was loaded, or a save has started. `settle` finds out.
        The same on all ranks."""
        return self._can_rewind

    def settle(self) -> Path | None:
        """Wait for the save in progress, which may fail, and return the checkpoint that `restore` would load now."""
        with suppress(CheckpointError):  # `ended` reports it
            self.finish()
        self.path = self._on_this_host(
            on_first_rank(self._mesh.world, lambda: newest_valid(self.directory, self._say))
        )
        self._can_rewind = self.path is not None
        return self.path

    def ended(self) -> list[EndedSave]:
        """Return the saves that ended since the last call, oldest first. Only rank 0 knows the result on all ranks."""
        ended = self.saves.ended()
        self.path = next((each.path for each in reversed(ended) if each.error is None), self.path)
        return ended

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.saves.close(failed=kind is not None)
        finally:
            # While a thread still writes, the lock must exclude other jobs until this process ends.
            if self._lock is not None and self.saves.under_way:
                self._lock.keep()

    def _prepare_directory(self) -> None:
        """Create the directory if this run writes to it, and check that it may be used."""
        if not self._config.checkpoint.saves:
            return
        try:
            make_durable_folder(self.directory)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.directory}: {explained(error, self.directory)}") from error
        if not self._config.checkpoint.resume and steps(self.directory):
            raise CheckpointError(
                f"{self.directory} contains checkpoints, but checkpoint.resume is false; choose another "
                "training.directory, or move the checkpoints away"
            )

    def _newest(self) -> Path | None:
        if not self._config.checkpoint.resume:
            return None
        return self._on_this_host(on_first_rank(self._mesh.world, self._find_newest))

    def _on_this_host(self, path: Path | None) -> Path | None:
        """Return the path of rank 0's checkpoint on this host, which may have the folder at another path."""
        return None if path is None else self.directory / path.name

    def _find_newest(self) -> Path | None:
        found = newest_valid(self.directory, self._say)
        damaged = set_aside(self.directory)
        if found is None and damaged:
            raise CheckpointError(
                f"every checkpoint in {self.directory} is damaged, the newest being {damaged[-1].name}; move them "
                "away to start from the beginning, or choose another training.directory"
            )
        return found

    def _set_aside(self, path: Path, error: DamagedCheckpointError) -> None:
        on_first_rank(self._mesh.world, lambda: quarantine(path, error, self._say))

    def _resume(self, path: Path, replica: Replica) -> RunState:
        data = self._data_identity()
        fit = agreed(self._mesh.world, lambda: self._check_fit(path, replica, data))
        run = load(
            path,
            replica.states(),
            replica.optimizer.applied,
            self._mesh,
            moments=replica.optimizer,
            updates_per_step=replica.schedule.header.updates_per_step,
        )
        if replica.loss_scaler is not None:
            replica.loss_scaler.restore(run.loss_scale, run.step)
        self._saved_step = run.step
        self._can_rewind = True
        self.data_change = DataChange(run.step, fit.other_data) if fit.other_data else None
        self._data_changes = (*run.data_changes, *([self.data_change] if self.data_change else []))
        if self._mesh.rank == 0:
            self._report(path, run, fit)
        return run

    def _report(self, path: Path, run: RunState, fit: RunFit) -> None:
        self._say(f"resumed from {path} after step {run.step} ({run.consumed_samples:,} samples)")
        for difference in fit.reported:
            self._say(f"note: {difference} in the checkpoint")
        if fit.unknown_data:
            self._say(
                f"warning: {path} does not record which data it was trained on, so megapipe cannot check that the "
                "data are the same; the next checkpoint records them"
            )
        if fit.other_data:
            self._say(
                f"warning: from step {run.step + 1}, the run uses other samples, which checkpoint.accept_other_data "
                f"allows: {'; '.join(fit.other_data)}"
            )

    def _data_identity(self) -> DataIdentity:
        """Return the identity of the run's data, as rank 0 saw it when it was first asked for. A collective call."""
        if self._data is None:
            self._data = on_first_rank(self._mesh.world, lambda: data_identity(self._config.data))
        return self._data

    def _check_fit(self, path: Path, replica: Replica, data: DataIdentity) -> RunFit:
        """Raise CheckpointError when the checkpoint is of another model or of a run on other samples."""
        manifest = read_manifest(path)
        fit = check_run(path, manifest, self._config, data)
        self._check_model(path, manifest, replica)
        return fit

    def _check_model(self, path: Path, manifest: Manifest, replica: Replica) -> None:
        specs = [spec for layer in replica.layout.layers for spec in layer.parameters.values()]
        try:
            check_model(manifest, specs, asdict(self._config.model))
        except CheckpointError as error:
            raise CheckpointError(f"{path} does not fit: {error}") from error

    def _initialize(self, folder: Path, replica: Replica) -> None:
        """Load the weights alone, from a megapipe checkpoint or a Hugging Face folder."""
        path = folder / on_first_rank(self._mesh.world, lambda: weights_folder(folder).relative_to(folder))
        differences: list[str] = []
        if is_hugging_face(path):
            load_hugging_face(path, replica.states(), self._config.model, self._mesh)
        else:
            agreed(self._mesh.world, lambda: self._check_model(path, read_manifest(path), replica))
            differences = model_differences(
                load_weights(path, replica.states(), self._mesh), asdict(self._config.model)
            )
        if self._mesh.rank == 0:
            for difference in differences:
                self._say(f"note: {difference}")
            self._say(f"initial weights from {path}")


def weights_folder(folder: Path) -> Path:
    """Return the folder that `init_from` means: itself, or the newest checkpoint of a run's folder.

    Raises CheckpointError where there is neither.
    """
    if (folder / MANIFEST).is_file() or is_hugging_face(folder):
        return folder
    found = newest_whole(folder) or newest_whole(folder / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"init_from {folder} is neither a megapipe checkpoint (a folder with {MANIFEST}, or the folder of a run "
            "with complete checkpoints) nor a Hugging Face model (a folder with config.json and safetensors files)"
            if folder.is_dir()
            else f"init_from {folder} is not a folder"
        )
    return found
