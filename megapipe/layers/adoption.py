"""Adopting foreign modules: torch's own layers inside any module are given a backward that splits."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from megapipe.layers.adopted import Adopted, SplitEmbedding, SplitLayerNorm, SplitLinear, SplitRMSNorm
from megapipe.layers.split import SplitModule

Module = TypeVar("Module", bound=nn.Module)

SPLIT_TYPES: dict[type[nn.Module], type[Adopted]] = {
    nn.Linear: SplitLinear,
    nn.Embedding: SplitEmbedding,
    nn.LayerNorm: SplitLayerNorm,
    nn.RMSNorm: SplitRMSNorm,
}
"""What can be adopted, and what it becomes."""


@dataclass(frozen=True)
class AdoptionReport:
    """Which modules split their backward, and which do not.

    split: path -> name of the type, e.g. `blocks.0.out` -> `Linear`. whole: path -> why the gradients of the module's
    own parameters are computed in one go with its input's. Modules without parameters of their own are in neither.
    """

    split: dict[str, str]
    whole: dict[str, str]

    def __str__(self) -> str:
        lines = [f"split: {len(self.split)} modules; not split: {len(self.whole)}"]
        return "\n".join(lines + [f"  {path or '(the module itself)'}: {why}" for path, why in self.whole.items()])


def adopt(module: Module) -> Module:
    """Give every nn.Linear, nn.Embedding, nn.LayerNorm and nn.RMSNorm inside `module` a backward that splits.

    They change their type in place: they are the same objects with the same parameters, names and hooks, so shared
    modules and tied weights stay so, and their numbers stay the same bit for bit, forward and backward. Subclasses
    come along unless they have a forward of their own. Returns `module`; `report` tells what was done.

    Modules without parameters, and all other types, are left alone and work under every schedule; where a schedule
    splits the backward, their parameters' gradients are computed together with their input's.
    """
    for part in module.modules():
        base = _base(part)
        if base is not None and not isinstance(part, Adopted) and _obstacle(part, base) is None:
            part.__class__ = _split_type(type(part), base)  # type: ignore[arg-type]
    return module


def report(module: nn.Module) -> AdoptionReport:
    """What is split and what is not inside `module`, by path."""
    split, whole = {}, {}
    for path, part in module.named_modules():
        if not any(True for _ in part.parameters(recurse=False)):
            continue
        base = _base(part)
        if isinstance(part, SplitModule):
            split[path] = type(part).__name__ if base is None else base.__name__
        elif base is None:
            whole[path] = f"{type(part).__name__} is not one of {', '.join(each.__name__ for each in SPLIT_TYPES)}"
        else:
            whole[path] = _obstacle(part, base) or f"{type(part).__name__} has not been adopted"
    return AdoptionReport(split, whole)


def adopted_modules(module: nn.Module) -> Iterator[Adopted]:
    """The adopted layers inside `module`, each once."""
    return (part for part in module.modules() if isinstance(part, Adopted))


def _base(module: nn.Module) -> type[nn.Module] | None:
    """The type of `SPLIT_TYPES` that the module is, or None."""
    return next((base for base in SPLIT_TYPES if isinstance(module, base)), None)


def _obstacle(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Why a module of type `base` cannot be adopted; None when it can."""
    kind = type(module).__name__
    if type(module).forward is not base.forward or "forward" in vars(module):
        return f"{kind} has a forward of its own"
    weight = module._parameters.get("weight")
    if weight is None or set(module._parameters) - {"weight", "bias"}:
        return f"{kind} computes its weight from other tensors"
    if is_lazy(weight):
        return f"{kind} does not know its shape before its first forward"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return f"{kind} renormalises its weight in the forward (max_norm)"
    if isinstance(module, nn.Embedding) and module.sparse:
        return f"{kind} has sparse gradients"
    return None


@cache
def _split_type(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """The split form of `kind`, a subclass of `base` or `base` itself."""
    split = SPLIT_TYPES[base]
    return split if kind is base else type(kind.__name__, (split, kind), {"__doc__": kind.__doc__})
