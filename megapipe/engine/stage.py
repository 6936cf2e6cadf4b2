"""Stages of units, with tuples of tensors between them, and the forward and backward of one micro-batch through units.

The engine calls autograd only here. A unit may run its module under torch.compile, with a fused or a split backward.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megapipe.config.memory import RecomputedPart
from megapipe.layers import split
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.split import SplitTape, Tensors, accumulate, gradient_edge
from megapipe.parallel.groups import Group
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.ops import ContextAttention


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


Specs = tuple[TensorSpec, ...]


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def described(tensors: Sequence[TensorSpec] | Sequence[Tensor]) -> str:
    """Return shapes and dtypes as text: `[4, 8] float32, [4] int64`."""
    return ", ".join(f"{list(each.shape)} {short(each.dtype)}" for each in tensors) or "nothing"


class UnitForward(Protocol):
    """The forward of one weight version of a unit: it takes tensors and a micro-batch's context, and returns a tuple
    of tensors."""

    def __call__(self, *inputs: Tensor, context: Any) -> Tensors: ...


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
    inputs: Specs = ()
    outputs: Specs = ()

    @property
    def newest(self) -> int:
        """The newest weight version of its states; between steps it is the same for all of them."""
        return next((state.newest for state in self.states.values()), 0)


def unit_states(stages: Mapping[int, Stage]) -> list[UnitState]:
    """Return the states of a rank's stages, each tied state once."""
    unique = {id(state): state for stage in stages.values() for state in stage.states.values()}
    return list(unique.values())


WHOLE = -1
"""Unit column of an action that covers its stage's whole chain of units."""


@dataclass(frozen=True)
class SavedGraph:
    """The autograd graph that a forward leaves for its backward, from `inputs` (leaves) to `edges`.

    edges: the gradient edges of the outputs that require grad. The outputs are not kept, so that they are freed as
    soon as they have been sent.
    """

    inputs: Tensors
    edges: tuple[GradientEdge, ...]
    tape: SplitTape | None

    @classmethod
    def between(cls, inputs: Tensors, outputs: Tensors, tape: SplitTape | None) -> Self:
        """Return the graph that computed `outputs` from `inputs`."""
        return cls(inputs, tuple([gradient_edge(output) for output in outputs if output.requires_grad]), tape)


def graph_nodes(ends: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of an autograd graph from its ends to its leaves. ends: nodes; None is ignored."""
    seen = {None, *ends}
    waiting = list(seen - {None})
    while waiting:
        node = waiting.pop()
        yield node
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        waiting += new


def as_leaves(tensors: Tensors, requires_grad: Sequence[bool]) -> Tensors:
    """Cut the graph: return new autograd leaves over the same storage."""
    return tuple([t.detach().requires_grad_(flag) for t, flag in zip(tensors, requires_grad, strict=True)])


def apart(tensors: Tensors, received: Tensors) -> Tensors:
    """Return `tensors`, but copies of those that share memory with `received`.

    A stage may return its input or a view of it, and results outlive a receive slot.
    """
    lent = [tensor.untyped_storage().data_ptr() for tensor in received]
    return tuple([t.clone() if t.untyped_storage().data_ptr() in lent else t for t in tensors])


def requires_grad_flags(tensors: Sequence[TensorSpec] | Sequence[Tensor]) -> tuple[bool, ...]:
    """Return, for each tensor of a boundary, whether it has a gradient."""
    return tuple(tensor.requires_grad for tensor in tensors)


def unsplit_parameters(units: Sequence[UnitForward]) -> tuple[nn.Parameter, ...]:
    """Return the parameters whose gradients the input half computes, because their modules cannot split."""
    modules = (unit for unit in units if isinstance(unit, nn.Module))
    return tuple(each for module in modules for each in split.unsplit_parameters(module))


class UnitError(RuntimeError):
    """The forward of a unit failed; `__cause__` is its error. unit: index in the chain that ran."""

    def __init__(self, unit: int) -> None:
        super().__init__(f"the forward of unit {unit} failed")
        self.unit = unit


def run_units(
    units: Sequence[UnitForward], inputs: Tensors, context: Any, ready: Callable[[int], None] | None = None
) -> Tensors:
    """Run a chain of units. ready: called before each unit. Raises UnitError if one of them fails."""
    for index, unit in enumerate(units):
        try:
            if ready is not None:
                ready(index)
            inputs = unit(*inputs, context=context)
        except Exception as error:
            raise UnitError(index) from error
    return inputs


def backward(piece: SavedGraph, gradients: Tensors) -> Tensors:
    """Run a whole backward: add to the parameters' `.grad` views, and return the gradients of inputs that require it.

    gradients: one for each output that requires grad, in order.
    """
    accumulate(piece.edges, gradients)
    return tuple(_or_zeros(leaf.grad, leaf) for leaf in piece.inputs if leaf.requires_grad)


def backward_input(piece: SavedGraph, gradients: Tensors) -> Tensors:
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


def _forward(module: nn.Module, inputs: Tensors, context: MicrobatchContext) -> Tensors:
    outputs: Tensors = module(*inputs, context=context)
    return outputs


class CompiledForward:
    """Runs modules through one torch.compile. Layers of the same shapes, including modules for several weight
    versions, share one compiled frame.

    options: for torch.compile, such as backend and mode.
    """

    def __init__(self, **options: Any) -> None:
        self._compiled = torch.compile(_forward, **options)
        self._blanks: WeakKeyDictionary[nn.Module, dict[tuple[torch.Size, ...], SplitTape]] = WeakKeyDictionary()

    def __call__(self, module: nn.Module, inputs: Tensors, context: MicrobatchContext) -> Tensors:
        """Return the module's outputs. Records for a split backward are appended to the context's tape."""
        if context.tape is None:
            with _gradients_aside(module):
                return self._compiled(module, inputs, context)
        # Use a separate tape: with a tape that has other modules' records, the compiler would recompile for each
        # layer.
        tape = SplitTape()
        tape.provide(self._blank(module, inputs, context).fresh_probes())
        with _gradients_aside(module):
            outputs = self._compiled(module, inputs, replace(context, tape=tape))
        context.tape.extend(tape)
        return outputs

    def _blank(self, module: nn.Module, inputs: Tensors, context: MicrobatchContext) -> SplitTape:
        """Return a tape with the probes of one forward, cached by shape: probes must exist before a compiled forward
        runs.

        Their shapes come from one uncompiled run of the module, because predicted shapes could be wrong.
        """
        tensors = (*inputs, context.tokens, context.labels)
        shapes = tuple(tensor.shape for tensor in tensors if tensor is not None)
        known = self._blanks.setdefault(module, {})
        if shapes not in known:
            tape = SplitTape()
            with torch.no_grad():
                _forward(module, inputs, replace(context, tape=tape))
            known[shapes] = tape.emptied()
        return known[shapes]


class CompiledUnit(nn.Module):
    """A unit of a pipeline stage that runs a module through a compiled forward."""

    def __init__(self, module: nn.Module, compiled: CompiledForward) -> None:
        super().__init__()
        self.module = module
        self._compiled = compiled

    def forward(self, *inputs: Tensor, context: MicrobatchContext) -> Tensors:
        """Return the module's outputs."""
        return self._compiled(self.module, inputs, context)


@contextmanager
def _gradients_aside(module: nn.Module) -> Iterator[None]:
    """Hide gradients within the block: torch.compile refuses a bf16 parameter with an fp32 gradient, even if it never
    reads the gradient."""
    kept = [
        (parameter, parameter.grad)
        for parameter in module.parameters()
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype
    ]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
