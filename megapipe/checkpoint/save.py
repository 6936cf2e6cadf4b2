"""Saving: every rank writes its part into a hidden folder, which rank 0 completes and renames.

Order of a save, each step agreed by all ranks: make the folder, write and flush the tensor files, write and flush the
manifest, rename the folder, flush the directory. A crash at any point leaves the new checkpoint whole or not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import megapipe
from megapipe.checkpoint.agreement import gathered, on_first_rank
from megapipe.checkpoint.directory import partial_folder, remove_leftovers, step_folder
from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.extents import Extent
from megapipe.checkpoint.manifest import Chunk, Manifest, RunState
from megapipe.checkpoint.manifest_file import MANIFEST, check_files, encoded
from megapipe.checkpoint.shards import Shard, parts_of, shards_to_write
from megapipe.checkpoint.storage import DISK, StorageWriter, explained, remove_tree, write_file
from megapipe.checkpoint.tensor_file import FileTensor, write_tensors
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState


@dataclass(frozen=True)
class Content:
    """A part of a parameter's tensors that one rank writes, and its description in the manifest.

    name, kind, shape, extent: as in `Chunk`. tensor: its elements.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    extent: Extent
    tensor: FileTensor


@dataclass(frozen=True)
class Written:
    """What one rank wrote: its file (none if it had nothing to write), the file's contents, and update counts."""

    files: Mapping[str, int]
    chunks: tuple[Chunk, ...]
    applied: Mapping[str, int]


def save(
    directory: Path,
    states: Sequence[UnitState],
    applied: Mapping[str, int],
    run: RunState,
    mesh: Mesh,
    storage: StorageWriter = DISK,
) -> Path:
    """Save a checkpoint of all ranks' states, durable on return, and return its folder.

    A collective call. The caller owns the directory (`DirectoryLock` on rank 0), which all ranks see.

    Args:
        states: everything this rank holds, each tied weight once.
        applied: unit name -> updates that its optimizer applied.

    Raises:
        CheckpointError: the same on every rank; what was written is removed and older checkpoints are untouched.
    """
    partial = partial_folder(directory, run.step)
    shards = shards_to_write(states, mesh.world)
    contents, counts = contents_of(shards), counts_of(shards, applied)
    try:
        on_first_rank(mesh.world, lambda: begin(storage, directory, run.step))
        written = gathered(mesh.world, lambda: write_share(storage, partial, mesh.rank, contents, counts))
        on_first_rank(mesh.world, lambda: finish(storage, directory, run, written))
    except CheckpointError:
        if mesh.rank == 0:
            discard(storage, partial)
        raise
    return step_folder(directory, run.step)


def begin(storage: StorageWriter, directory: Path, step: int) -> None:
    """Make the folder that a step's checkpoint is written into. For rank 0 only.

    Raises CheckpointError when the checkpoint exists already or the directory cannot be written.
    """
    partial, whole = partial_folder(directory, step), step_folder(directory, step)
    if whole.exists():
        raise CheckpointError(f"{whole} already exists; a checkpoint is never overwritten: move it away")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(storage, directory)
        storage.make_folder(partial)
    except OSError as error:
        raise CheckpointError(f"cannot write {partial}: {explained(error, directory)}") from error


def contents_of(shards: Sequence[Shard]) -> list[Content]:
    """Return what a checkpoint stores of shards: views of the states' buffers, not copies."""
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


def counts_of(shards: Sequence[Shard], applied: Mapping[str, int]) -> dict[str, int]:
    """Return parameter -> updates applied. applied: unit -> updates applied."""
    return {shard.name: applied.get(shard.state.name, 0) for shard in shards}


def write_share(
    storage: StorageWriter, partial: Path, rank: int, contents: Sequence[Content], counts: Mapping[str, int]
) -> Written:
    """Write a rank's file, durably. counts: parameter -> updates applied."""
    file = f"rank-{rank:05d}.safetensors"
    if not contents:
        return Written({}, (), {})
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
    return Written({file: size}, chunks, counts)


def manifest_of(run: RunState, written: Sequence[Written]) -> Manifest:
    """Return the manifest of what ranks have written."""
    return Manifest(
        code_version=megapipe.__version__,
        run=run,
        applied_updates={name: count for share in written for name, count in share.applied.items()},
        files={name: size for share in written for name, size in share.files.items()},
        chunks=tuple(chunk for share in written for chunk in share.chunks),
    )


def finish(storage: StorageWriter, directory: Path, run: RunState, written: Sequence[Written]) -> None:
    """Write the manifest and give the folder the name that makes the checkpoint exist. For rank 0 only."""
    partial, whole = partial_folder(directory, run.step), step_folder(directory, run.step)
    manifest = manifest_of(run, written)
    # Fails where ranks wrote to folders of the same name on different disks.
    check_files(partial, manifest)
    write_file(storage, partial / MANIFEST, [memoryview(encoded(manifest))])
    try:
        storage.rename(partial, whole)
        storage.flush_folder(whole.parent)
    except OSError as error:
        raise CheckpointError(f"cannot complete {whole}: {explained(error, whole.parent)}") from error


def discard(storage: StorageWriter, partial: Path) -> None:
    """Free the space of a save that failed; if even that fails, the next save tries again."""
    try:
        if partial.exists():
            remove_tree(storage, partial)
    except OSError:
        return
