"""Methods of saving and loading a state. All ranks make every call. Durable means flushed to the disk."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megapipe.checkpoint import RunState, load, save
from megapipe.checkpoint.background import BackgroundSaver
from megapipe.parallel.launch import device_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState

from .state import Moments, tensors_of

Wait = Callable[[], None]
"""Function that returns once the started save is durable."""


class Contestant(ABC):
    """One method of saving and loading. name: its name in the table."""

    name: str

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def prepare(self, parent: Path, states: Sequence[UnitState]) -> None:  # noqa: B027 (most do nothing)
        """Do what training does in the background of its first steps, before the first save to a folder in
        `parent`."""

    @abstractmethod
    def save(self, folder: Path, states: Sequence[UnitState]) -> Wait:
        """Save into a folder that does not exist, and return as soon as training could continue."""

    @abstractmethod
    def load(self, folder: Path, states: Sequence[UnitState], axis: int) -> None:
        """Load what was saved in `folder` into states that are split along `axis`."""

    reshards = True
    """Whether a load may split states along another axis than the save."""


class Megapipe(Contestant):
    """megapipe, with checksums and one rename. It writes between two steps or, if asynchronous, during training."""

    def __init__(self, mesh: Mesh, asynchronous: bool) -> None:
        super().__init__(mesh)
        self.name = f"megapipe, {'asynchronous' if asynchronous else 'synchronous'}"
        self._asynchronous = asynchronous
        self._savers: dict[Path, BackgroundSaver] = {}

    def prepare(self, parent: Path, states: Sequence[UnitState]) -> None:
        if self._asynchronous:
            saver = self._saver(parent)
            saver.plan(states)
            saver.prepare()
            saver.finish()  # waits for the allocation; the first steps of a run take longer

    def save(self, folder: Path, states: Sequence[UnitState]) -> Wait:
        run = RunState(int(folder.name), 0, {}, "fp32", (), {"model": {}})
        applied = {state.name: 1 for state in states}
        if not self._asynchronous:
            save(folder.parent, states, applied, run, self.mesh)
            return lambda: None
        saver = self._saver(folder.parent)
        saver.start(states, applied, run)
        return saver.finish

    def load(self, folder: Path, states: Sequence[UnitState], axis: int) -> None:
        load(folder.parent / f"step-{int(folder.name):08d}", states, {}, self.mesh, moments=Moments())

    def _saver(self, parent: Path) -> BackgroundSaver:
        return self._savers.setdefault(parent, BackgroundSaver(parent, self.mesh))


class TorchSave(Contestant):
    """`torch.save` of each rank's dictionary of tensors, flushed to the disk."""

    name = "torch.save"
    reshards = False

    def save(self, folder: Path, states: Sequence[UnitState]) -> Wait:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{self.mesh.rank}.pt", "wb") as file:
            torch.save(tensors_of(states), file)
            file.flush()
            os.fsync(file.fileno())
        self.mesh.world.barrier()
        return lambda: None

    def load(self, folder: Path, states: Sequence[UnitState], axis: int) -> None:
        stored = torch.load(folder / f"{self.mesh.rank}.pt", weights_only=True)
        for name, tensor in tensors_of(states).items():
            tensor.copy_(stored[name])


class DistributedCheckpoint(Contestant):
    """torch.distributed.checkpoint (DCP) with its default writer, and with DTensors that use the states' memory."""

    def __init__(self, mesh: Mesh, asynchronous: bool) -> None:
        super().__init__(mesh)
        self.name = f"torch DCP, {'asynchronous' if asynchronous else 'synchronous'}"
        self._asynchronous = asynchronous
        self._mesh: DeviceMesh = device_mesh(mesh)
        # DCP's thread communicates while this thread measures. In one group, their collectives would interleave.
        self._group = dist.new_group()
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        # The stager keeps the memory of its copy between saves, as megapipe does.
        self._stager = DefaultStager(options) if asynchronous else None

    def save(self, folder: Path, states: Sequence[UnitState]) -> Wait:
        tensors = self._distributed(states, 0)
        if not self._asynchronous:
            dcp.save(tensors, checkpoint_id=folder, process_group=self._group)
            return lambda: None
        future = dcp.async_save(tensors, checkpoint_id=folder, async_stager=self._stager, process_group=self._group)

        def wait() -> None:
            future.result()
            self.mesh.world.barrier()

        return wait

    def load(self, folder: Path, states: Sequence[UnitState], axis: int) -> None:
        dcp.load(self._distributed(states, axis), checkpoint_id=folder, process_group=self._group)

    def _distributed(self, states: Sequence[UnitState], axis: int) -> dict[str, DTensor]:
        return {
            name: DTensor.from_local(tensor, self._mesh, [Shard(axis)], run_check=False)
            for name, tensor in tensors_of(states).items()
        }


def contestants(mesh: Mesh) -> list[Contestant]:
    """Return all contestants."""
    return [
        Megapipe(mesh, True),
        Megapipe(mesh, False),
        TorchSave(mesh),
        DistributedCheckpoint(mesh, True),
        DistributedCheckpoint(mesh, False),
    ]
