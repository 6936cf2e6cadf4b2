"""The state that every contestant saves: fp32 weights and two moments of square matrices, split over the ranks."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import Init, ParameterSpec

WIDTH = 2048
MOMENTS = ("first_moment", "second_moment")
KINDS = 1 + len(MOMENTS)


@dataclass(frozen=True)
class Moments:
    """Two moments of every parameter."""

    def kinds(self, spec: ParameterSpec) -> Sequence[str]:
        """See `megapipe.checkpoint.save_and_load.Moments`."""
        return MOMENTS

    def allocate(self, state: UnitState) -> None:
        """See `megapipe.checkpoint.save_and_load.Moments`."""
        for name in MOMENTS:
            state.add_moment(name, slice(0, state.table.num_elements))


def num_matrices(gigabytes: float) -> int:
    """Return the number of matrices of a state of this size, at least two."""
    return max(2, round(gigabytes * 1e9 / (KINDS * 4 * WIDTH**2)))


def state_bytes(matrices: int) -> int:
    """Return the bytes of the state, over all ranks."""
    return matrices * KINDS * 4 * WIDTH**2


def make_states(mesh: Mesh, matrices: int, axis: int) -> list[UnitState]:
    """Return this rank's states, filled with zeros. The matrices are split along `axis`."""
    states = []
    for number in range(matrices):
        spec = ParameterSpec(
            f"blocks.{number}.weight", (WIDTH, WIDTH), axis, Init("zeros"), decay=True, matrix=True, padded=False
        )
        state = UnitState(
            f"block{number}", [spec], tensor_rank=mesh.coordinate("tensor"), tensor_size=mesh.size("tensor")
        )
        Moments().allocate(state)
        states.append(state)
    return states


def tensors_of(states: Sequence[UnitState]) -> dict[str, Tensor]:
    """Return this rank's part of each matrix by name, as views of the states' memory."""
    return {
        f"{kind}/{segment.spec.name}": state.owned_view(buffer, segment)
        for state in states
        for segment in state.table
        for kind, buffer in {"weights": state.master, **state.moments}.items()
    }


def fill(states: Sequence[UnitState], axis: int, rank: int, size: int) -> None:
    """Set every element to a value that depends on its position in the whole matrix; see `expected`."""
    for name, tensor in tensors_of(states).items():
        tensor.copy_(expected(name, axis, rank, size))


def expected(name: str, axis: int, rank: int, size: int) -> Tensor:
    """Return a rank's part of a matrix whose elements are whole numbers below 2^24, which fp32 represents exactly."""
    return _places().chunk(size, axis)[rank] + zlib.crc32(name.encode()) % 1_000_000


@cache
def _places() -> Tensor:
    return torch.arange(WIDTH**2, dtype=torch.float32).view(WIDTH, WIDTH)
