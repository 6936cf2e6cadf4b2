"""The engine's view of a model: stages of units, with tuples of tensors between them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.config.memory import RecomputedPart
from megapipe.parallel.groups import Group
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.dtypes import ContextAttention


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that crosses a stage boundary, known at build time, so that no handshake is needed.

    slices: tokens (axis 1) of each slice of a sample, if these differ; `shape` is that of the largest slice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    slices: tuple[int, ...] = ()

    def of_slice(self, number: int) -> tuple[int, ...]:
        """Return the shape of the message of a slice."""
        return (self.shape[0], self.slices[number], *self.shape[2:]) if self.slices else self.shape

    def within(self, buffer: Tensor, number: int) -> Tensor:
        """Return a view for the message of a slice, in a buffer that fits the largest slice."""
        shape = self.of_slice(number)
        return buffer if shape == self.shape else buffer.flatten()[: math.prod(shape)].view(shape)

    def allocate(self, device: torch.device) -> Tensor:
        """Return an uninitialized buffer of this shape and type."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def described(tensors: Sequence[TensorSpec] | Sequence[Tensor]) -> str:
    """Return shapes and dtypes as text: `[4, 8] float32, [4] int64`."""
    return ", ".join(f"{list(each.shape)} {short(each.dtype)}" for each in tensors) or "nothing"


class UnitForward(Protocol):
    """The forward of one weight version of a unit: it takes tensors and a micro-batch's context, and returns a tuple
    of tensors."""

    def __call__(self, *inputs: Tensor, context: Any) -> tuple[Tensor, ...]: ...


class BlockModule(Protocol):
    """A layer of kind "block" that supports the options of a run."""

    def share_samples(self, group: Group, kind: ContextAttention) -> None:
        """Let attention see the tokens of all ranks of a group, each of which holds a part of every sample."""

    def recompute(self, parts: Collection[RecomputedPart]) -> None:
        """Recompute these parts in the backward instead of saving them; the bits are the same."""


@dataclass
class Stage:
    """The units that one rank runs between two transfers.

    units[u][v]: unit u at physical weight version v (one module per version).
    states: state unit id -> UnitState; ids from len(units) on are tied weights (see schedules).
    inputs, outputs: tensors that arrive from the previous stage and leave to the next; empty at the ends.
    The last stage's only output is the loss summed over the micro-batch's tokens: a scalar, or [terms] for a loss of
    several terms.
    """

    units: Sequence[Sequence[UnitForward]]
    states: dict[int, UnitState]
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    @property
    def newest(self) -> int:
        """The newest weight version of its states; between steps it is the same for all of them."""
        return next((state.newest for state in self.states.values()), 0)


def unit_states(stages: Mapping[int, Stage]) -> list[UnitState]:
    """Return the states of a rank's stages, each tied state once."""
    unique = {id(state): state for stage in stages.values() for state in stage.states.values()}
    return list(unique.values())
