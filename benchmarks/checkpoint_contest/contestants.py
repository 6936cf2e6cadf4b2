"""Means of saving and loading a state. Every call is made by all ranks; durable means flushed to the disk."""

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
"""Returns once what was begun is durable."""


class Contestant(ABC):
    """One means. name: for the table."""

    name: str

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def prepare(self, parent: Path, states: Sequence[UnitState]) -> None:  # noqa: B027 (most do nothing)
        """What training does beside its first steps, ahead of the first save into a folder under `parent`."""

    @abstractmethod
    def save(self, folder: Path, states: Sequence[UnitState]) -> Wait:
        """Save into a folder that does not exist, and return as soon as training could go on."""

    @abstractmethod
    def load(self, folder: Path, states: Sequence[UnitState], axis: int) -> None:
        """Overwrite states that are split along `axis` by what a save put there."""

    reshards = True
    """Whether states may be split otherwise than when they were saved."""


class Megapipe(Contestant):
    """Checksums, one rename; between two steps or beside training."""

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
            saver.finish()  # when it is allocated: steps take long enough for that

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
    """`torch.save` of each rank's dictionary, flushed."""

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
        found = torch.load(folder / f"{self.mesh.rank}.pt", weights_only=True)
        for name, tensor in tensors_of(states).items():
            tensor.copy_(found[name])


class DistributedCheckpoint(Contestant):
    """torch's own (torch.distributed.checkpoint), with DTensors over the states' memory and its default writer."""

    def __init__(self, mesh: Mesh, asynchronous: bool) -> None:
        super().__init__(mesh)
        self.name = f"torch DCP, {'asynchronous' if asynchronous else 'synchronous'}"
        self._asynchronous = asynchronous
        self._mesh: DeviceMesh = device_mesh(mesh)
        # Its thread speaks while ours measures: in one group their collectives would meet in no fixed order.
        self._group = dist.new_group()
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        # Keeps its copy's memory from save to save, as ours does.
        self._stager = DefaultStager(options) if asynchronous else None

    def save(self, folder: Path, states: Sequence[UnitState]) -> Wait:
        given = self._distributed(states, 0)
        if not self._asynchronous:
            dcp.save(given, checkpoint_id=folder, process_group=self._group)
            return lambda: None
        future = dcp.async_save(given, checkpoint_id=folder, async_stager=self._stager, process_group=self._group)

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
    """All of them."""
    return [
        Megapipe(mesh, True),
        Megapipe(mesh, False),
        TorchSave(mesh),
        DistributedCheckpoint(mesh, True),
        DistributedCheckpoint(mesh, False),
    ]
