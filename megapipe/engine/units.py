"""Any torch module as a unit: what a micro-batch carries, and a wrapper that knows the module's place in the model."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.layers.adopted import recording
from megapipe.layers.adoption import adopted_modules
from megapipe.layers.split import SplitTape

Loss = Callable[..., Tensor]
"""(the last layer's outputs, then the micro-batch's targets) -> loss summed over the micro-batch, 0-dim."""


@dataclass(frozen=True)
class Microbatch:
    """One micro-batch: the first layer's inputs and the loss's targets, each empty where this rank does not need them.

    tape: collects a split backward.
    """

    inputs: tuple[Tensor, ...] = ()
    targets: tuple[Tensor, ...] = ()
    tape: SplitTape | None = None


class ModuleUnit(nn.Module):
    """A module as the engine calls it.

    first: takes the micro-batch's inputs. loss: this is the last layer; its outputs go into the loss.
    """

    def __init__(self, module: nn.Module, *, first: bool, loss: Loss | None) -> None:
        super().__init__()
        self.module = module
        self._first = first
        self._loss = loss
        self._adopted = tuple(adopted_modules(module))

    def forward(self, *inputs: Tensor, context: Microbatch) -> tuple[Tensor, ...]:
        """Run the module; raises ValueError where the loss is not a sum, or cannot be minimised."""
        with recording(self._adopted, context.tape):
            outputs = as_tuple(self.module(*(context.inputs if self._first else inputs)))
        if self._loss is None:
            return outputs
        loss = self._loss(*outputs, *context.targets)
        if loss.dim() != 0:
            raise ValueError(
                f"the loss has shape {list(loss.shape)}; it must be one number, the sum over the micro-batch"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError("the loss depends on no parameter by a differentiable path; there is nothing to minimise")
        return (loss,)

    def share(self, original: nn.Module, paths: Iterable[str]) -> None:
        """Put the parameters that were bound at `paths` wherever else the module has the original's: under a second
        path, or in an attribute that torch does not know of, such as a list."""
        kept = {id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}
        bound = {id(original.get_parameter(path)): self.module.get_parameter(path) for path in paths}
        self.module = copy.deepcopy(self.module, kept | bound)
        self._adopted = tuple(adopted_modules(self.module))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """What a module returned as a tuple of tensors. Raises TypeError for anything else."""
    found = (outputs,) if isinstance(outputs, Tensor) else outputs
    if not isinstance(found, tuple | list) or not all(isinstance(each, Tensor) for each in found):
        raise TypeError(f"a layer returned {type(outputs).__name__}; it must return a tensor or a tuple of tensors")
    return tuple(found)
