"""Loading on any layout: each rank selects the parts of the file tensors that its shards need, checks and copies them.

No state changes before every rank has checked every byte that it is about to read, so that a damaged checkpoint leaves
all states as they were.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megapipe.checkpoint.agreement import agreed
from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.extents import Overlap, overlaps, tiling_problem
from megapipe.checkpoint.manifest import WEIGHTS, Chunk, Manifest, RunState, earlier_weights
from megapipe.checkpoint.manifest_file import read_manifest
from megapipe.checkpoint.shards import Shard, parts_of, shards_of
from megapipe.checkpoint.tensor_file import TensorFile
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import ParameterSpec


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

    A collective call; the layout need not be the one that saved. Weights are cast where precisions differ. Where the
    checkpoint has fewer weight versions than the states, the missing ones are equal to the newest.

    Args:
        states: all units of this rank; on return they are as they were when the checkpoint was saved.
        applied: unit name -> updates applied; overwritten.
        moments: those of the optimizer.
        updates_per_step: weight versions that one step of the schedule creates.

    Raises:
        DamagedCheckpointError: bytes are not those that were saved.
        CheckpointError: it does not fit the model or the optimizer, or a file is missing. Either error is the same on
            every rank, and states are unchanged.
    """
    manifest, transfers = agreed(mesh.world, lambda: _checked(path, states, moments))
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
    """Load the newest weights of a checkpoint alone, as the weights before a first step. Otherwise as `load`."""
    manifest, transfers = agreed(mesh.world, lambda: _checked(path, states, None))
    _copy(transfers, states, 0, mesh)
    return manifest


@dataclass(frozen=True)
class _Transfer:
    """The elements that a file tensor and a shard share. source: the file tensor's elements, mapped, not copied."""

    shard: Shard
    kind: str
    source: Tensor
    shared: tuple[Overlap, ...]

    def copy(self) -> None:
        """Copy them to the shard's place in its state."""
        target = parts_of(self.shard)[self.kind]
        for overlap in self.shared:
            overlap.copy(self.source, target)


def _checked(path: Path, states: Sequence[UnitState], moments: Moments | None) -> tuple[Manifest, list[_Transfer]]:
    """Return everything that `states` need, with every byte checked. moments: None for weights alone."""
    manifest = read_manifest(path)
    files: dict[str, TensorFile] = {}
    transfers = []
    for shard in shards_of(states):
        kinds = [WEIGHTS]
        if moments is not None:
            kinds += _further_kinds(manifest, shard, moments)
        for kind in kinds:
            for chunk in _chunks(manifest, shard, kind):
                shared = tuple(overlaps(chunk.extent, shard.extent))
                if shared:
                    source = _checked_source(path, files, chunk, [overlap.source.span for overlap in shared])
                    transfers.append(_Transfer(shard, kind, source, shared))
    return manifest, transfers


def _further_kinds(manifest: Manifest, shard: Shard, moments: Moments) -> Iterator[str]:
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
                f"the checkpoint has {', '.join(sorted(stored))} of {shard.name} but not its {kind}: "
                "resume with the optimizer that saved it, or load only its weights with init_from"
            )
        yield kind


def _applied_updates(manifest: Manifest, state: UnitState) -> int:
    """Return the number of updates that a unit's optimizer applied: the same for all its parameters."""
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
    different = next((chunk.shape for chunk in chunks if chunk.shape != shape), None)
    if different is not None:
        raise CheckpointError(
            f"{shard.name} has shape {different} in the checkpoint and {shape} in this model; "
            "use the model section of the checkpoint's configuration"
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
