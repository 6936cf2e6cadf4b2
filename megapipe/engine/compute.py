"""Forward and backward of one micro-batch through units: the only place of the engine that speaks to autograd."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megapipe.engine.errors import UnitError
from megapipe.engine.stage import TensorSpec, UnitForward
from megapipe.layers import split
from megapipe.layers.graph import accumulate, gradient_edge
from megapipe.layers.split import SplitTape

WHOLE = -1
"""Unit column of an action that covers its stage's whole chain of units."""


@dataclass(frozen=True)
class SavedGraph:
    """What a forward leaves for its backward: the graph between `inputs` (leaves) and `edges`.

    edges: where the gradients of the outputs enter, one for each output that requires grad. Not the outputs, so that
    these are freed as soon as they have been sent.
    """

    inputs: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]
    tape: SplitTape | None

    @classmethod
    def between(cls, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], tape: SplitTape | None) -> "SavedGraph":
        """The graph that made `outputs` out of `inputs`."""
        return cls(inputs, tuple([gradient_edge(output) for output in outputs if output.requires_grad]), tape)


def as_leaves(tensors: tuple[Tensor, ...], requires_grad: Sequence[bool]) -> tuple[Tensor, ...]:
    """Cut the graph: the same storage as new autograd leaves."""
    return tuple([t.detach().requires_grad_(flag) for t, flag in zip(tensors, requires_grad, strict=True)])


def apart(tensors: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`tensors`, copied where they lie in the memory of `received`.

    For what outlives a receive slot: a stage may pass on what it was given, or a view of it.
    """
    memory = [tensor.untyped_storage().data_ptr() for tensor in received]
    return tuple([t.clone() if t.untyped_storage().data_ptr() in memory else t for t in tensors])


def requires_grad_flags(tensors: Sequence[TensorSpec] | Sequence[Tensor]) -> tuple[bool, ...]:
    """Which tensors of a boundary carry gradients."""
    return tuple(tensor.requires_grad for tensor in tensors)


def unsplit_parameters(units: Sequence[UnitForward]) -> tuple[nn.Parameter, ...]:
    """Parameters whose gradients the input half computes: their modules cannot split."""
    modules = (unit for unit in units if isinstance(unit, nn.Module))
    return tuple(parameter for module in modules for parameter in split.unsplit_parameters(module))


def run_units(
    units: Sequence[UnitForward], inputs: tuple[Tensor, ...], context: Any, ready: Callable[[int], None] | None = None
) -> tuple[Tensor, ...]:
    """Run a chain of units. ready: called ahead of each. Raises UnitError from what one of them raises."""
    for index, unit in enumerate(units):
        try:
            if ready is not None:
                ready(index)
            inputs = unit(*inputs, context=context)
        except Exception as error:
            raise UnitError(index) from error
    return inputs


def backward(piece: SavedGraph, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Whole backward: adds into the parameters' `.grad` views; returns gradients of inputs that require grad.

    gradients: one for each output that requires grad, in order.
    """
    accumulate(piece.edges, gradients)
    return tuple(_or_zeros(leaf.grad, leaf) for leaf in piece.inputs if leaf.requires_grad)


def backward_input(piece: SavedGraph, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Input half of a split backward; what the weight half needs stays on the piece's tape.

    That may be `gradients` themselves: lowering keeps their receive slot until the weight half is done. What is
    returned is never their memory, as the gradient of an input that passes through would be: it may be sent later.
    """
    assert piece.tape is not None
    inputs = tuple(leaf for leaf in piece.inputs if leaf.requires_grad)
    found = piece.tape.backward_input(piece.edges, gradients, inputs)
    lent = {gradient.untyped_storage()._cdata for gradient in gradients}
    return tuple(_own(_or_zeros(gradient, leaf), lent) for gradient, leaf in zip(found, inputs, strict=True))


def _own(gradient: Tensor, lent: set[int]) -> Tensor:
    return gradient.clone() if gradient.untyped_storage()._cdata in lent else gradient


def _or_zeros(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    """The sender of an input waits for its gradient, also where nothing came of the input."""
    return torch.zeros_like(leaf) if gradient is None else gradient
