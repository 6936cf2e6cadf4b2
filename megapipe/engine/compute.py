"""Forward and backward of one micro-batch through units: the only module of the engine that calls autograd."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megapipe.engine.stage import TensorSpec, UnitForward
from megapipe.layers import split
from megapipe.layers.split import SplitTape, accumulate, gradient_edge

WHOLE = -1
"""Unit column of an action that covers its stage's whole chain of units."""


@dataclass(frozen=True)
class SavedGraph:
    """The autograd graph that a forward leaves for its backward, from `inputs` (leaves) to `edges`.

    edges: the gradient edges of the outputs that require grad. The outputs are not kept, so that they are freed as
    soon as they have been sent.
    """

    inputs: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]
    tape: SplitTape | None

    @classmethod
    def between(cls, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], tape: SplitTape | None) -> "SavedGraph":
        """Return the graph that computed `outputs` from `inputs`."""
        return cls(inputs, tuple([gradient_edge(output) for output in outputs if output.requires_grad]), tape)


def as_leaves(tensors: tuple[Tensor, ...], requires_grad: Sequence[bool]) -> tuple[Tensor, ...]:
    """Cut the graph: return new autograd leaves over the same storage."""
    return tuple([t.detach().requires_grad_(flag) for t, flag in zip(tensors, requires_grad, strict=True)])


def apart(tensors: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return `tensors`, but copies of those that share memory with `received`.

    A stage may return its input or a view of it, and results outlive a receive slot.
    """
    memory = [tensor.untyped_storage().data_ptr() for tensor in received]
    return tuple([t.clone() if t.untyped_storage().data_ptr() in memory else t for t in tensors])


def requires_grad_flags(tensors: Sequence[TensorSpec] | Sequence[Tensor]) -> tuple[bool, ...]:
    """Return, for each tensor of a boundary, whether it has a gradient."""
    return tuple(tensor.requires_grad for tensor in tensors)


def unsplit_parameters(units: Sequence[UnitForward]) -> tuple[nn.Parameter, ...]:
    """Return the parameters whose gradients the input half computes, because their modules cannot split."""
    modules = (unit for unit in units if isinstance(unit, nn.Module))
    return tuple(parameter for module in modules for parameter in split.unsplit_parameters(module))


class UnitError(RuntimeError):
    """The forward of a unit failed; `__cause__` is its error. unit: index in the chain that ran."""

    def __init__(self, unit: int) -> None:
        super().__init__(f"the forward of unit {unit} failed")
        self.unit = unit


def run_units(
    units: Sequence[UnitForward], inputs: tuple[Tensor, ...], context: Any, ready: Callable[[int], None] | None = None
) -> tuple[Tensor, ...]:
    """Run a chain of units. ready: called before each unit. Raises UnitError if one of them fails."""
    for index, unit in enumerate(units):
        try:
            if ready is not None:
                ready(index)
            inputs = unit(*inputs, context=context)
        except Exception as error:
            raise UnitError(index) from error
    return inputs


def backward(piece: SavedGraph, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run a whole backward: add to the parameters' `.grad` views, and return the gradients of inputs that require it.

    gradients: one for each output that requires grad, in order.
    """
    accumulate(piece.edges, gradients)
    return tuple(_or_zeros(leaf.grad, leaf) for leaf in piece.inputs if leaf.requires_grad)


def backward_input(piece: SavedGraph, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run the input half of a split backward. The piece's tape keeps the tensors of the weight half.

    These may be `gradients` themselves: lowering keeps their receive slot until the weight half is done. The returned
    gradients never share memory with them, because they may be sent later; if a unit returns an input unchanged, its
    gradient is copied.
    """
    assert piece.tape is not None
    inputs = tuple(leaf for leaf in piece.inputs if leaf.requires_grad)
    input_gradients = piece.tape.backward_input(piece.edges, gradients, inputs)
    lent = {gradient.untyped_storage()._cdata for gradient in gradients}
    return tuple(_own(_or_zeros(gradient, leaf), lent) for gradient, leaf in zip(input_gradients, inputs, strict=True))


def _own(gradient: Tensor, lent: set[int]) -> Tensor:
    return gradient.clone() if gradient.untyped_storage()._cdata in lent else gradient


def _or_zeros(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    """Return zeros for an unused input, because its sender waits for a gradient."""
    return torch.zeros_like(leaf) if gradient is None else gradient
