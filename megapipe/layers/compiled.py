"""The forward of a module under torch.compile, with a fused or a split backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megapipe.layers.context import MicrobatchContext
from megapipe.layers.split import SplitTape


def _forward(module: nn.Module, inputs: Sequence[Tensor], context: MicrobatchContext) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = module(*inputs, context=context)
    return outputs


class CompiledForward:
    """Runs modules through one torch.compile. Layers of the same shapes, including modules for several weight
    versions, share one compiled frame.

    options: for torch.compile, such as backend and mode.
    """

    def __init__(self, **options: Any) -> None:
        self._compiled = torch.compile(_forward, **options)
        self._blanks: WeakKeyDictionary[nn.Module, dict[tuple[torch.Size, ...], SplitTape]] = WeakKeyDictionary()

    def __call__(self, module: nn.Module, inputs: Sequence[Tensor], context: MicrobatchContext) -> tuple[Tensor, ...]:
        """Return the module's outputs. Records for a split backward are appended to the context's tape."""
        if context.tape is None:
            with _gradients_aside(module):
                return self._compiled(module, tuple(inputs), context)
        # Use a separate tape: with a tape that has other modules' records, the compiler would recompile for each
        # layer.
        tape = SplitTape()
        tape.provide(self._blank(module, inputs, context).fresh_probes())
        with _gradients_aside(module):
            outputs = self._compiled(module, tuple(inputs), replace(context, tape=tape))
        context.tape.extend(tape)
        return outputs

    def _blank(self, module: nn.Module, inputs: Sequence[Tensor], context: MicrobatchContext) -> SplitTape:
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

    def forward(self, *inputs: Tensor, context: MicrobatchContext) -> tuple[Tensor, ...]:
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
