"""Saving, and loading on any layout.

In a save, every rank writes its part into a hidden folder, which rank 0 completes and renames. The steps are: create
the folder, write and flush the tensor files, write and flush the manifest, rename the folder, flush the directory.
All ranks agree on the result of each step. After a crash at any point, the new checkpoint is complete or absent.

To load, each rank selects the parts of the file tensors that its shards need, checks and copies them. No state changes
before every rank has checked every byte that it will read, so that a damaged checkpoint changes no state.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

import megapipe
from megapipe.checkpoint.directory import discard, partial_folder, remove_leftovers, step_folder
from megapipe.checkpoint.manifest import MANIFEST, Chunk, Manifest, RunState, check_files, encoded, read_manifest
from megapipe.checkpoint.shards import (
    WEIGHTS,
    Extent,
    Overlap,
    Shard,
    earlier_weights,
    overlaps,
    parts_of,
    shards_of,
    shards_to_write,
    tiling_problem,
)
from megapipe.checkpoint.storage import (
    DISK,
    CheckpointError,
    DamagedCheckpointError,
    StorageWriter,
    agreed,
    gathered,
    on_first_rank,
    write_file,
    writing,
)
from megapipe.checkpoint.tensor_file import FileTensor, TensorFile, write_tensors
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import ParameterSpec


@dataclass(frozen=True)
class Content:
    """A part of one tensor that a rank writes, and its description in the manifest.

    name, kind, shape, extent: see `Chunk`. tensor: the elements of the part.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    extent: Extent
    tensor: FileTensor


def save(
    directory: Path,
    states: Sequence[UnitState],
    applied: Mapping[str, int],
    run: RunState,
    mesh: Mesh,
    storage: StorageWriter = DISK,
) -> Path:
    """Save a checkpoint of all ranks' states, durable on return, and return its folder.

    A collective call. Rank 0 must hold the directory's `DirectoryLock`, and all ranks must see the directory.

    Args:
        states: all units of this rank, each tied weight once.
        applied: unit name -> updates that its optimizer applied.

    Raises:
        CheckpointError: the same on every rank; the new files are removed, and older checkpoints are untouched.
    """
    partial = partial_folder(directory, run.step)
    shards = shards_to_write(states, mesh.world)
    contents, part = contents_of(shards), part_without_file(shards, applied, run)
    try:
        on_first_rank(mesh.world, lambda: begin(storage, directory, run.step))
        parts = gathered(mesh.world, lambda: write_rank_file(storage, partial, mesh.rank, part, contents))
        on_first_rank(mesh.world, lambda: finish(storage, directory, parts))
    except CheckpointError:
        if mesh.rank == 0:
            discard(storage, partial)
        raise
    return step_folder(directory, run.step)


def begin(storage: StorageWriter, directory: Path, step: int) -> None:
    """Create the folder of a step's checkpoint under its hidden name. Only for rank 0.

    Raises CheckpointError if the checkpoint already exists or the directory cannot be written.
    """
    partial, complete = partial_folder(directory, step), step_folder(directory, step)
    if complete.exists():
        raise CheckpointError(f"{complete} already exists; a checkpoint is never overwritten: move it away")
    with writing(partial, directory):
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(storage, directory)
        storage.make_folder(partial)


def contents_of(shards: Sequence[Shard]) -> list[Content]:
    """Return the contents of a checkpoint for these shards, as views of the states' buffers."""
    return [
        Content(
            shard.name,
            kind,
            shard.segment.spec.shape,
            shard.extent,
            FileTensor(f"{kind}/{shard.name}", shard.shape, part),
        )
        for shard in shards
        for kind, part in parts_of(shard).items()
    ]


def part_without_file(shards: Sequence[Shard], applied: Mapping[str, int], run: RunState) -> Manifest:
    """Return the manifest of a rank's part before its file is written. applied: number of updates of each unit."""
    counts = {shard.name: applied.get(shard.state.name, 0) for shard in shards}
    return Manifest(megapipe.__version__, run, counts, files={}, chunks=())


def write_rank_file(
    storage: StorageWriter, partial: Path, rank: int, part: Manifest, contents: Sequence[Content]
) -> Manifest:
    """Write a rank's file durably, if it has contents, and return `part` with the file and its chunks."""
    file = f"rank-{rank:05d}.safetensors"
    if not contents:
        return part
    size, checksums = write_tensors(storage, partial / file, [content.tensor for content in contents])
    chunks = tuple(
        Chunk(
            name=content.name,
            kind=content.kind,
            shape=content.shape,
            extent=content.extent,
            file=file,
            key=content.tensor.key,
            dtype=content.tensor.dtype,
            checksums=checksums[content.tensor.key],
        )
        for content in contents
    )
    return replace(part, files={file: size}, chunks=chunks)


def finish(storage: StorageWriter, directory: Path, parts: Sequence[Manifest]) -> None:
    """Write the manifest and rename the folder, which completes the checkpoint. Only for rank 0.

    parts: the manifest of each rank's part, from rank 0 on.
    """
    manifest = replace(
        parts[0],
        applied_updates={name: count for part in parts for name, count in part.applied_updates.items()},
        files={name: size for part in parts for name, size in part.files.items()},
        chunks=tuple(chunk for part in parts for chunk in part.chunks),
    )
    step = manifest.run.step
    partial, complete = partial_folder(directory, step), step_folder(directory, step)
    # This fails if ranks wrote to folders of the same name on different disks.
    check_files(partial, manifest)
    write_file(storage, partial / MANIFEST, encoded(manifest))
    with writing(complete, verb="complete"):
        storage.rename(partial, complete)
        storage.flush_folder(complete.parent)


class Moments(Protocol):
    """State that an optimizer keeps between updates."""

    def kinds(self, spec: ParameterSpec) -> Collection[str]:
        """Return the names of the moments that a parameter has."""

    def allocate(self, state: UnitState) -> None:
        """Allocate the moments of a unit."""


def load(
    path: Path,
    states: Sequence[UnitState],
    applied: dict[str, int],
    mesh: Mesh,
    *,
    moments: Moments,
    updates_per_step: int = 1,
) -> RunState:
    """Load a checkpoint: weights of all versions, moments and update counts of every unit of this rank.

    A collective call; the layout may differ from that of the save. Weights are cast if precisions differ. If the
    checkpoint has fewer weight versions than the states, the missing versions are copies of the newest.

    Args:
        states: all units of this rank; on return they are in the state of the checkpoint.
        applied: unit name -> updates applied; overwritten.
        moments: the optimizer's moments.
        updates_per_step: weight versions that one step of the schedule creates.

    Raises:
        DamagedCheckpointError: the bytes differ from those that were saved.
        CheckpointError: it does not fit the model or the optimizer, or a file is missing. Either error is the same on
            every rank, and states are unchanged.
    """
    manifest, transfers = agreed(mesh.world, lambda: _check(path, states, moments))
    run = manifest.run
    for state in states:
        count = _applied_updates(manifest, state)
        applied[state.name] = count
        state.moments = {}
        if count:
            moments.allocate(state)
    _copy(transfers, states, run.step * updates_per_step, mesh)
    return run


def load_weights(path: Path, states: Sequence[UnitState], mesh: Mesh) -> Manifest:
    """Load only the newest weights of a checkpoint, as initial weights. See `load` for the errors."""
    manifest, transfers = agreed(mesh.world, lambda: _check(path, states, None))
    _copy(transfers, states, 0, mesh)
    return manifest


@dataclass(frozen=True)
class _Transfer:
    """Copies the elements that a file tensor and a shard have in common. source: the file tensor, memory-mapped."""

    shard: Shard
    kind: str
    source: Tensor
    shared: tuple[Overlap, ...]

    def copy(self) -> None:
        """Copy the elements to the shard's part of its state."""
        target = parts_of(self.shard)[self.kind]
        for overlap in self.shared:
            overlap.copy(self.source, target)


def _check(path: Path, states: Sequence[UnitState], moments: Moments | None) -> tuple[Manifest, list[_Transfer]]:
    """Check every byte that `states` need; return the manifest and the transfers. moments: None for weights only."""
    manifest = read_manifest(path)
    files: dict[str, TensorFile] = {}
    transfers = []
    for shard in shards_of(states):
        kinds = [WEIGHTS]
        if moments is not None:
            kinds += _additional_kinds(manifest, shard, moments)
        for kind in kinds:
            for chunk in _chunks(manifest, shard, kind):
                shared = tuple(overlaps(chunk.extent, shard.extent))
                if shared:
                    source = _checked_source(path, files, chunk, [overlap.source.span for overlap in shared])
                    transfers.append(_Transfer(shard, kind, source, shared))
    return manifest, transfers


def _additional_kinds(manifest: Manifest, shard: Shard, moments: Moments) -> Iterator[str]:
    """Yield the kinds that a shard resumes from in addition to the newest weights."""
    stored = manifest.kinds_of(shard.name)
    for age in range(1, len(shard.state.weights)):
        if earlier_weights(age) in stored:
            yield earlier_weights(age)
    if _applied_updates(manifest, shard.state) == 0:
        return
    for kind in moments.kinds(shard.segment.spec):
        if kind not in stored:
            raise CheckpointError(
                f"the checkpoint has {', '.join(sorted(stored))} of {shard.name} but not its "
                f"{kind}: resume with its optimizer, or load only its weights with init_from"
            )
        yield kind


def _applied_updates(manifest: Manifest, state: UnitState) -> int:
    """Return the number of updates that a unit's optimizer applied. It must be the same for all parameters."""
    counts = {segment.spec.name: manifest.applied_updates.get(segment.spec.name, 0) for segment in state.table}
    if len(set(counts.values())) > 1:
        raise CheckpointError(f"the parameters of unit {state.name} have different numbers of updates: {counts}")
    return next(iter(counts.values()), 0)


def _chunks(manifest: Manifest, shard: Shard, kind: str) -> list[Chunk]:
    chunks = manifest.chunks_of(shard.name, kind)
    if not chunks:
        raise CheckpointError(
            f"the checkpoint has no {kind} of {shard.name}, which this model has; "
            "use the model section of the checkpoint's configuration"
        )
    shape = shard.segment.spec.shape
    other_shape = next((chunk.shape for chunk in chunks if chunk.shape != shape), None)
    if other_shape is not None:
        raise CheckpointError(
            f"{shard.name} has shape {other_shape} in the checkpoint and {shape} in this "
            "model; use the model section of the checkpoint's configuration"
        )
    problem = tiling_problem(shape, [chunk.extent for chunk in chunks])
    if problem is not None:
        raise DamagedCheckpointError(f"{kind} of {shard.name}: {problem}", "manifest")
    return chunks


def _checked_source(path: Path, files: dict[str, TensorFile], chunk: Chunk, spans: Iterable[range]) -> Tensor:
    """Return the file tensor of a chunk, after a check of the bytes that contain `spans` of its elements."""
    if chunk.file not in files:
        files[chunk.file] = TensorFile(path / chunk.file)
    source = files[chunk.file].flat(chunk.key, chunk.dtype, chunk.extent.num_elements)
    files[chunk.file].check(chunk.key, source, chunk.checksums, spans)
    return source


def _copy(transfers: Sequence[_Transfer], states: Sequence[UnitState], versions_made: int, mesh: Mesh) -> None:
    """Copy the newest weights to every version, then everything else that is stored to its own buffer."""
    for transfer in transfers:
        if transfer.kind == WEIGHTS:
            transfer.copy()
    for state in states:
        state.restore(versions_made + len(state.weights) - 1)
    for transfer in transfers:
        if transfer.kind != WEIGHTS:
            transfer.copy()
    for state in states:
        state.gather_versions(mesh.shard_group(state.sharding.count))
