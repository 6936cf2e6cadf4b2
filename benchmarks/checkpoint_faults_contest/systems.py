"""megapipe and DCP as two systems for checkpoints, whose process can be killed at any operation on the disk."""

import io
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch._dynamo  # DTensor needs it; importing it here saves the import in every forked process
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megapipe.checkpoint import DamagedCheckpointError, RunState, load_weights, newest_valid, save
from megapipe.checkpoint.directory import quarantine
from megapipe.checkpoint.storage import StorageWriter
from megapipe.config.parallel import MeshShape
from megapipe.parallel.in_process import in_process_meshes
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import Init, ParameterSpec

SHAPE = (32, 96)
NAMES = ("first", "second", "third")
TIMEOUT_SECONDS = 60.0
"""Time that ranks wait for each other."""


def whole(name: str, step: int) -> Tensor:
    """Return a matrix as it is after a step. All elements of all matrices and steps are different numbers."""
    count = SHAPE[0] * SHAPE[1]
    return (torch.arange(count).reshape(SHAPE) + count * (10 * NAMES.index(name) + step)).float()


class Death:
    """Counts operations, and kills the process at operation `at`, from 0; None never kills it."""

    def __init__(self, at: int | None) -> None:
        self._at = at
        self.count = 0

    def here(self, half: Callable[[], object] | None = None) -> None:
        """Count an operation that is about to run, or kill the process. half: runs half of the operation before the
        kill."""
        if self.count == self._at:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


class System(Protocol):
    """A system for checkpoints: `save` runs on every rank, `load` in one process."""

    name: str

    def save(self, rank: int, ranks: int, directory: Path, step: int, death: Death) -> None:
        """Save the matrices of a step."""

    def newest(self, directory: Path) -> Path:
        """Return the folder of step 2."""

    def load(self, directory: Path) -> dict[str, Tensor]:
        """Return the matrices from which a run would resume."""


class DeadlyStorage(StorageWriter):
    """megapipe's interface to the disk, which counts operations."""

    def __init__(self, death: Death) -> None:
        self._death = death

    def make_folder(self, path: Path) -> None:
        self._death.here()
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._death.here()
        return super().create(path)

    def write(self, descriptor: int, content: memoryview) -> int:
        self._death.here(lambda: os.write(descriptor, content[: len(content) // 2]))
        return super().write(descriptor, content)

    def flush(self, descriptor: int) -> None:
        self._death.here()
        super().flush(descriptor)

    def flush_folder(self, path: Path) -> None:
        self._death.here()
        super().flush_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._death.here()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._death.here()
        super().remove(path)


class Megapipe:
    """megapipe, with a folder for each step."""

    name = "megapipe"

    def save(self, rank: int, ranks: int, directory: Path, step: int, death: Death) -> None:
        mesh = connected_mesh(MeshShape({"tensor": ranks}), torch.device("cpu"), TIMEOUT_SECONDS)
        states = _states(mesh)
        for state in states:
            for segment in state.table:
                rows = slice(segment.box.starts[0], segment.box.stops[0])
                state.in_shard(state.master, segment).copy_(whole(state.name, step)[rows].reshape(-1))
            state.publish()
        run = RunState(step, step, {"seed": 0}, "fp32", ((step, 1.0),), {"model": {}})
        save(directory, states, {}, run, mesh, DeadlyStorage(death))

    def newest(self, directory: Path) -> Path:
        return directory / "step-00000002"

    def load(self, directory: Path) -> dict[str, Tensor]:
        (mesh,) = in_process_meshes({})
        states = _states(mesh)
        while (path := newest_valid(directory, _say_nothing)) is not None:
            try:
                load_weights(path, states, mesh)
            except DamagedCheckpointError as error:
                quarantine(path, error, _say_nothing)
            else:
                return {state.name: state.master[: SHAPE[0] * SHAPE[1]].reshape(SHAPE) for state in states}
        raise ValueError("there is no whole checkpoint")


def _say_nothing(line: str) -> None:
    pass


def _states(mesh: Mesh) -> list[UnitState]:
    specs = {name: ParameterSpec(name, SHAPE, 0, Init("zeros"), decay=True, matrix=True) for name in NAMES}
    return [
        UnitState(
            name,
            [spec],
            compute_dtype=torch.float32,
            tensor_rank=mesh.coordinate("tensor"),
            tensor_size=mesh.size("tensor"),
        )
        for name, spec in specs.items()
    ]


class DeadlyFile(io.FileIO):
    """The unbuffered file below the buffer of a file that is open for writing, as in Python's `open`."""

    def __init__(self, path: Path, death: Death) -> None:
        death.here()
        super().__init__(path, "wb")
        self._death = death

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._death.here(lambda: os.write(self.fileno(), view[: len(view) // 2]))
        return super().write(view)


class DeadlyFileSystem(FileSystem):
    """DCP's interface to the disk, which counts operations."""

    def __init__(self, death: Death) -> None:
        self._death = death

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with io.BufferedWriter(DeadlyFile(Path(path), self._death)) as stream:
            yield cast(io.IOBase, stream)

    def mkdir(self, path: str | os.PathLike) -> None:
        self._death.here()
        super().mkdir(path)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        self._death.here()
        super().rename(path, new_path)

    def rm_file(self, path: str | os.PathLike) -> None:
        self._death.here()
        super().rm_file(path)


@dataclass(frozen=True)
class Dcp:
    """DCP's FileSystemWriter with its defaults.

    overwrite: whether all steps are saved to one folder. If not, each step has a folder, and the newest folder with a
    `.metadata` is loaded.
    """

    overwrite: bool

    @property
    def name(self) -> str:
        """Name in the table."""
        return "DCP, over the last checkpoint" if self.overwrite else "DCP, a folder a step"

    def _folder(self, directory: Path, step: int) -> Path:
        return directory / ("newest" if self.overwrite else f"step-{step}")

    def save(self, rank: int, ranks: int, directory: Path, step: int, death: Death) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        rows = SHAPE[0] // ranks
        parts = {name: whole(name, step)[rank * rows : (rank + 1) * rows] for name in NAMES}
        state = {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in parts.items()}
        writer = dcp.FileSystemWriter(self._folder(directory, step))
        writer.fs = DeadlyFileSystem(death)
        fsync = os.fsync

        def deadly_fsync(descriptor: int) -> None:
            death.here()
            fsync(descriptor)

        os.fsync = deadly_fsync  # the process does nothing else
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=writer)

    def newest(self, directory: Path) -> Path:
        return self._folder(directory, 2)

    def load(self, directory: Path) -> dict[str, Tensor]:
        folders = [self._folder(directory, step) for step in (2, 1)]
        folder = next((each for each in folders if (each / ".metadata").exists()), folders[0])
        state = {name: torch.zeros(SHAPE) for name in NAMES}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state


SYSTEMS: tuple[System, ...] = (Megapipe(), Dcp(overwrite=False), Dcp(overwrite=True))
