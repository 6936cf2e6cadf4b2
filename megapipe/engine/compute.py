"""Forward and backward of one micro-batch through units: the only place of the engine that speaks to autograd."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.engine.errors import UnitError
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.layers.split import SplitTape

WHOLE = -1
"""Unit column of an action that covers its stage's whole chain of units."""


@dataclass
class Piece:
    """What a forward leaves for its backward: the graph between `inputs` (leaves) and `outputs`."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    tape: SplitTape | None


def as_leaves(tensors: tuple[Tensor, ...], requires_grad: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """Cut the graph: the same storage as new autograd leaves."""
    return tuple(t.detach().requires_grad_(flag) for t, flag in zip(tensors, requires_grad, strict=True))


def requires_grad_flags(specs: tuple[TensorSpec, ...]) -> tuple[bool, ...]:
    """Which tensors of a boundary carry gradients."""
    return tuple(spec.requires_grad for spec in specs)


def run_units(stage: Stage, unit: int, version: int, inputs: tuple[Tensor, ...], context: Any) -> tuple[Tensor, ...]:
    """Run one unit, or all of them when `unit` is WHOLE, at one weight version. Raises UnitError when one fails."""
    for index in range(len(stage.units)) if unit == WHOLE else (unit,):
        try:
            inputs = stage.units[index][version](*inputs, context=context)
        except Exception as error:
            raise UnitError(index) from error
    return inputs


def backward(piece: Piece, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Whole backward: adds into the parameters' `.grad` views and returns the inputs' gradients, None filtered out.

    gradients: one for each output that requires grad, in order.
    """
    outputs = tuple(output for output in piece.outputs if output.requires_grad)
    torch.autograd.backward(outputs, gradients)
    return tuple(leaf.grad for leaf in piece.inputs if leaf.grad is not None)


def backward_input(piece: Piece, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Input half of a split backward; what the weight half needs stays on the piece's tape."""
    assert piece.tape is not None
    outputs = tuple(output for output in piece.outputs if output.requires_grad)
    inputs = tuple(leaf for leaf in piece.inputs if leaf.requires_grad)
    return tuple(g for g in piece.tape.backward_input(outputs, gradients, inputs) if g is not None)
