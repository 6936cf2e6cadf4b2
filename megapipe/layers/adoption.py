"""Adoption of modules from elsewhere: torch's own layers inside any module get a split backward.

Without a tape, the forward of an adopted layer is torch's own. With a tape, it runs on leaves that share the
parameters' memory, so that autograd computes the input's gradient as usual and stops there; the weight halves then use
the same arithmetic as torch's backward, which gives the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from megapipe.layers.split import SplitModule, SplitTape, Tensors, WeightGradients


class Adopted(SplitModule):
    """Base of the adopted layers.

    tape: records the uses of the forward in progress; None runs torch's own forward. Other modules may use the
    parameters too, as `nn.MultiheadAttention` uses those of its output layer; autograd handles these uses.
    """

    exclusive: ClassVar[bool] = False
    tape: SplitTape | None = None

    def splits(self) -> bool:
        """Whether this forward is recorded: only without autocast to another dtype, and without a compiler."""
        return (
            not torch.compiler.is_compiling()
            and self.tape is not None
            and torch.is_grad_enabled()
            and not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))
            and all(own.requires_grad for own in self.parameters(recurse=False))
        )

    def record(self, output: Tensor, *saved: Tensor) -> Tensor:
        """Store the tensors that the weight half needs on the tape; return `output`."""
        assert self.tape is not None
        self.tape.record_output(self, output, tuple(tensor.detach() for tensor in saved))
        return output


def _leaf(parameter: nn.Parameter) -> Tensor:
    """Return a leaf that represents a parameter in the graph: torch takes the same paths as with the parameter."""
    return parameter.detach().requires_grad_()


def _leaf_or_none(parameter: nn.Parameter | None) -> Tensor | None:
    return None if parameter is None else _leaf(parameter)


class SplitLinear(Adopted, nn.Linear):
    """`nn.Linear` with a split backward."""

    weight: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        if not self.splits():
            return super().forward(input)
        output = functional.linear(input, _leaf(self.weight), _leaf_or_none(self.bias))
        return self.record(output, input)

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        rows = gradient.reshape(-1, self.out_features)
        yield self.weight, rows.t() @ saved[0].reshape(-1, self.in_features)
        if self.bias is not None:
            yield self.bias, rows.sum(0)


class SplitEmbedding(Adopted, nn.Embedding):
    """`nn.Embedding` with a split backward; without max_norm and sparse gradients."""

    weight: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Map indices [...] to [..., embedding_dim]."""
        if not self.splits():
            return super().forward(input)
        output = functional.embedding(
            input, _leaf(self.weight), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return self.record(output, input)

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        padding = -1 if self.padding_idx is None else self.padding_idx
        yield (
            self.weight,
            torch.ops.aten.embedding_dense_backward(
                gradient, saved[0], self.num_embeddings, padding, self.scale_grad_by_freq
            ),
        )


class SplitLayerNorm(Adopted, nn.LayerNorm):
    """`nn.LayerNorm` with a split backward."""

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., *normalized_shape]` to the same shape."""
        if not self.splits():
            return super().forward(input)
        weight, bias = _leaf(self.weight), _leaf_or_none(self.bias)
        output, mean, deviation = torch.native_layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return self.record(output, input, mean, deviation)

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        has_bias = self.bias is not None
        # The gradient does not depend on the weight's values, which may be on other replicas between the halves.
        unread = torch.empty_like(self.weight)
        _, weight, bias = torch.ops.aten.native_layer_norm_backward(
            gradient,
            saved[0],
            self.normalized_shape,
            *saved[1:],
            unread,
            unread if has_bias else None,
            [False, True, has_bias],
        )
        yield self.weight, weight
        if has_bias:
            yield self.bias, bias


class SplitRMSNorm(Adopted, nn.RMSNorm):
    """`nn.RMSNorm` with a split backward. Its weight half recomputes the normalisation, because torch does not save
    the statistics."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., *normalized_shape]` to the same shape."""
        if not self.splits():
            return super().forward(x)
        return self.record(functional.rms_norm(x, self.normalized_shape, _leaf(self.weight), self.eps), x)

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        with torch.enable_grad():
            # Its values do not matter, as in SplitLayerNorm.
            leaf = torch.ones_like(self.weight).requires_grad_()
            output = functional.rms_norm(saved[0], self.normalized_shape, leaf, self.eps)
        yield self.weight, torch.autograd.grad(output, leaf, gradient)[0]


@contextmanager
def recording(modules: Sequence[Adopted], tape: SplitTape | None) -> Iterator[None]:
    """Let the adopted `modules` record their uses on `tape` inside the block."""
    for module in modules:
        module.tape = tape
    try:
        yield
    finally:
        for module in modules:
            module.tape = None


Module = TypeVar("Module", bound=nn.Module)

SPLIT_TYPES: dict[type[nn.Module], type[Adopted]] = {
    nn.Linear: SplitLinear,
    nn.Embedding: SplitEmbedding,
    nn.LayerNorm: SplitLayerNorm,
    nn.RMSNorm: SplitRMSNorm,
}
"""Types that can be adopted, and their replacements."""


@dataclass(frozen=True)
class AdoptionReport:
    """Modules with a split backward, and modules without.

    split: path -> name of the type, e.g. `blocks.0.out` -> `Linear`. whole: path -> why the gradients of the module's
    own parameters are computed together with its input's. Modules without their own parameters are in neither.
    """

    split: dict[str, str]
    whole: dict[str, str]

    def __str__(self) -> str:
        lines = [f"split: {len(self.split)} modules; not split: {len(self.whole)}"]
        lines += [f"  {path or '(the module itself)'}: {why}" for path, why in self.whole.items()]
        return "\n".join(lines)


def adopt(module: Module) -> Module:
    """Give every nn.Linear, nn.Embedding, nn.LayerNorm and nn.RMSNorm inside `module` a split backward.

    They change their type in place: they are the same objects with the same parameters, names and hooks, so modules
    stay shared and weights stay tied, and results are the same bit for bit, forward and backward. Subclasses are
    included unless they override forward. Returns `module`; `report` lists the result.

    All other modules are unchanged and work under every schedule; if a schedule splits the backward, the gradients of
    their parameters are computed together with their input's.

    Example:
        >>> import torch
        >>> from megapipe import adopt
        >>> type(adopt(torch.nn.Linear(2, 2))).__name__
        'SplitLinear'
    """
    for part in module.modules():
        base = _base(part)
        if base is not None and not isinstance(part, Adopted) and _obstacle(part, base) is None:
            part.__class__ = _split_type(type(part), base)  # type: ignore[arg-type]
    return module


def report(module: nn.Module) -> AdoptionReport:
    """Return which modules inside `module` have a split backward and which do not, by path."""
    split, whole = {}, {}
    for path, part in module.named_modules():
        if not any(True for _ in part.parameters(recurse=False)):
            continue
        base = _base(part)
        if isinstance(part, SplitModule):
            split[path] = type(part).__name__ if base is None else base.__name__
        elif base is None:
            names = ", ".join(each.__name__ for each in SPLIT_TYPES)
            whole[path] = f"{type(part).__name__} is not one of {names}"
        else:
            whole[path] = _obstacle(part, base) or f"{type(part).__name__} has not been adopted"
    return AdoptionReport(split, whole)


def adopted_modules(module: nn.Module) -> Iterator[Adopted]:
    """Return the adopted layers inside `module`, each once."""
    return (part for part in module.modules() if isinstance(part, Adopted))


def _base(module: nn.Module) -> type[nn.Module] | None:
    """Return the type of `SPLIT_TYPES` that the module has, or None."""
    return next((base for base in SPLIT_TYPES if isinstance(module, base)), None)


def _obstacle(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Return why a module of type `base` cannot be adopted; None if it can."""
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
    """Return the type with a split backward for `kind`, which is `base` or a subclass."""
    split = SPLIT_TYPES[base]
    return split if kind is base else type(kind.__name__, (split, kind), {"__doc__": kind.__doc__})
