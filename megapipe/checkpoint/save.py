"""Saving: every rank writes its share into a hidden folder, which rank 0 completes and renames.

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
from megapipe.checkpoint.manifest import Chunk, Manifest, RunState
from megapipe.checkpoint.manifest_file import MANIFEST, check_files, encoded
from megapipe.checkpoint.shards import Shard, parts_of, shards_to_write
from megapipe.checkpoint.storage import DISK, StorageWriter, explained, remove_tree, write_file
from megapipe.checkpoint.tensor_file import FileTensor, write_tensors
from megapipe.parallel.groups import Group
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState


@dataclass(frozen=True)
class _Written:
    """One rank's share: its file (none where it had nothing to write), what is in it, and its units' update counts."""

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
    partial, whole = partial_folder(directory, run.step), step_folder(directory, run.step)
    shards = shards_to_write(states, mesh.world)
    try:
        on_first_rank(mesh.world, lambda: _begin(storage, directory, partial, whole))
        written = gathered(mesh.world, lambda: _write_share(storage, partial, shards, applied, mesh.world))
        on_first_rank(mesh.world, lambda: _finish(storage, partial, whole, run, written))
    except CheckpointError:
        if mesh.rank == 0:
            _discard(storage, partial)
        raise
    return whole


def _begin(storage: StorageWriter, directory: Path, partial: Path, whole: Path) -> None:
    if whole.exists():
        raise CheckpointError(f"{whole} exists already; a checkpoint is never written over: move it away")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(storage, directory)
        storage.make_folder(partial)
    except OSError as error:
        raise CheckpointError(f"cannot write {partial}: {explained(error, directory)}") from error


def _write_share(
    storage: StorageWriter, partial: Path, shards: Sequence[Shard], applied: Mapping[str, int], world: Group
) -> _Written:
    file = f"rank-{world.rank:05d}.safetensors"
    contents = [
        (shard, kind, FileTensor(f"{kind}/{shard.name}", shard.shape, part))
        for shard in shards
        for kind, part in parts_of(shard).items()
    ]
    if not contents:
        return _Written({}, (), {})
    size, checksums = write_tensors(storage, partial / file, [tensor for _, _, tensor in contents])
    chunks = tuple(
        Chunk(
            name=shard.name,
            kind=kind,
            shape=shard.segment.spec.shape,
            extent=shard.extent,
            file=file,
            key=tensor.key,
            dtype=tensor.dtype,
            checksums=checksums[tensor.key],
        )
        for shard, kind, tensor in contents
    )
    counts = {shard.name: applied.get(shard.state.name, 0) for shard in shards}
    return _Written({file: size}, chunks, counts)


def _finish(storage: StorageWriter, partial: Path, whole: Path, run: RunState, written: Sequence[_Written]) -> None:
    """The manifest, and the name that makes the checkpoint exist."""
    manifest = Manifest(
        code_version=megapipe.__version__,
        run=run,
        applied_updates={name: count for share in written for name, count in share.applied.items()},
        files={name: size for share in written for name, size in share.files.items()},
        chunks=tuple(chunk for share in written for chunk in share.chunks),
    )
    # Fails where ranks wrote to folders of the same name on different disks.
    check_files(partial, manifest)
    write_file(storage, partial / MANIFEST, [memoryview(encoded(manifest))])
    try:
        storage.rename(partial, whole)
        storage.flush_folder(whole.parent)
    except OSError as error:
        raise CheckpointError(f"cannot complete {whole}: {explained(error, whole.parent)}") from error


def _discard(storage: StorageWriter, partial: Path) -> None:
    """Give back the space of a save that failed; where even that fails, the next save tries again."""
    try:
        if partial.exists():
            remove_tree(storage, partial)
    except OSError:
        return
