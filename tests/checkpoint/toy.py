"""Unit states of a small model on any layout. Each element is a known function of its global position."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint import RunState, load, save
from megapipe.checkpoint.shards import WEIGHTS, Shard, buffers, earlier_weights, shards_of
from megapipe.checkpoint.storage import DISK, StorageWriter
from megapipe.parallel.in_process import in_process_meshes
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.segments import Segment, Sharding
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import Init, ParameterSpec

MOMENTS = ("first_moment", "second_moment")


@dataclass(frozen=True)
class ToyMoments:
    """Moments that every parameter has."""

    names: Sequence[str] = MOMENTS

    def kinds(self, spec: ParameterSpec) -> Sequence[str]:
        return self.names

    def allocate(self, state: UnitState) -> None:
        for name in self.names:
            state.add_moment(name, slice(0, state.table.num_elements))


def spec(name: str, shape: tuple[int, ...], axis: int | None = 0, padded: bool = False) -> ParameterSpec:
    return ParameterSpec(name, shape, axis, Init("zeros"), decay=len(shape) > 1, matrix=False, padded=padded)


MODEL: dict[str, tuple[ParameterSpec, ...]] = {
    "table": (spec("table", (11, 3), padded=True),),
    "one": (spec("one.qkv", (4, 3, 20)), spec("one.bias", (5,), None), spec("one.output", (3, 8), 1)),
    "two": (spec("two.up", (2, 8, 3), 1), spec("two.norm", (3,), None)),
}
"""Unit -> parameters. `table` is tied: the first and the last pipeline rank both hold it."""


@dataclass(frozen=True)
class Layout:
    """sizes: of the mesh. units: of each pipeline rank. alignment: of padded shards. versions: of each unit.

    stage, count: ZeRO stage, and the number of replicas that shard a unit.
    """

    sizes: Mapping[str, int]
    units: Sequence[Sequence[str]]
    alignment: int = 1
    versions: int = 1
    dtype: torch.dtype = torch.float32
    stage: int = 0
    count: int = 1


ALONE = Layout({}, [list(MODEL)])
PAIR = Layout({"pipeline": 2}, [["table", "one"], ["two", "table"]])


def value(name: str, kind: str, shape: tuple[int, ...], step: int) -> Tensor:
    """Return a whole tensor: all elements, tensors, kinds and steps differ."""
    base = zlib.crc32(f"{name} {kind} {step}".encode()) % 10_000
    return (torch.arange(math.prod(shape), dtype=torch.float32) + base).reshape(shape) / 7


def make_states(mesh: Mesh, layout: Layout) -> list[UnitState]:
    """Return this rank's states, all zero."""
    return [
        UnitState(
            unit,
            MODEL[unit],
            compute_dtype=layout.dtype,
            tensor_rank=mesh.coordinate("tensor"),
            tensor_size=mesh.size("tensor"),
            alignment=layout.alignment,
            num_versions=layout.versions,
            sharding=Sharding(layout.stage, mesh.coordinate("data") % layout.count, layout.count),
        )
        for unit in layout.units[mesh.coordinate("pipeline")]
    ]


def fill(states: Sequence[UnitState], step: int, moments: Sequence[str] = MOMENTS) -> None:
    """Give states the values of a step, as training would."""
    for state in states:
        state.newest = step + len(state.weights) - 1
        state.moments = {kind: torch.zeros_like(state.master) for kind in moments}
    for shard in shards_of(states):
        for kind, buffer in buffers(shard.state).items():
            shard.of(buffer).copy_(expected(shard, kind, step))
    for state in states:
        state.publish()


def expected(shard: Shard, kind: str, step: int) -> Tensor:
    """Return the part of a whole tensor that a shard contains, in one dimension."""
    extent = shard.extent
    return whole_box(shard.segment, kind, step)[extent.start : extent.stop]


def whole_box(segment: Segment, kind: str, step: int) -> Tensor:
    """Return the part of a whole tensor in a segment's box, in one dimension."""
    index = tuple(slice(a, b) for a, b in zip(segment.box.starts, segment.box.stops, strict=True))
    return value(segment.spec.name, kind, segment.spec.shape, step)[index].reshape(-1)


def check(states: Sequence[UnitState], step: int, kinds: Sequence[str] = (WEIGHTS, *MOMENTS)) -> None:
    """Check that states contain the values of a step, and zeros as padding."""
    for state in states:
        assert state.newest == step + len(state.weights) - 1
        actual = buffers(state)
        for kind in kinds:
            whole = torch.zeros_like(actual[kind])
            for shard in shards_of([state]):
                shard.of(whole).copy_(expected(shard, kind, step))
            assert torch.equal(actual[kind], whole), f"{kind} of {state.name}"
        if not state.sharding.weights:
            newest = state.weights[state.newest % len(state.weights)]
            for segment in state.table:
                values = whole_box(segment, WEIGHTS, step).to(newest.dtype)
                assert torch.equal(state.owned_view(newest, segment).reshape(-1), values), f"whole {state.name}"


def run_state(step: int) -> RunState:
    return RunState(step, 8 * step, {"seed": 7}, "fp32", ((step, 1.0 / step),), {"model": {"hidden_size": 3}})


def save_step(mesh: Mesh, layout: Layout, directory: Path, step: int, storage: StorageWriter = DISK) -> Path:
    """Save the known values of a step."""
    states = make_states(mesh, layout)
    fill(states, step)
    return save(directory, states, {state.name: step for state in states}, run_state(step), mesh, storage)


def load_step(mesh: Mesh, layout: Layout, path: Path, step: int, earlier: int = 0) -> None:
    """Load into fresh states and check them. earlier: number of older versions in the checkpoint."""
    states = make_states(mesh, layout)
    applied: dict[str, int] = {}
    loaded = load(path, states, applied, mesh, moments=ToyMoments())
    assert loaded == run_state(step)
    assert applied == {state.name: step for state in states}
    check(states, step, (WEIGHTS, *MOMENTS, *[earlier_weights(age) for age in range(1, earlier + 1)]))


def alone() -> Mesh:
    """Return the mesh of one process."""
    (mesh,) = in_process_meshes({}, "cpu", 10.0)
    return mesh
