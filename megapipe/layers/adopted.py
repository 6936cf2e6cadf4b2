"""torch's own layers with a split backward: what `megapipe.layers.adopt` turns them into.

Without a tape their forward is torch's, untouched. With one, it runs on leaves that share the parameters' memory, so
that autograd computes the input's gradient exactly as it always does and stops there; the weight halves then repeat
the arithmetic of torch's backward, which gives the same bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.layers.split import SplitModule, SplitTape

WeightGradients = Iterable[tuple[nn.Parameter, Tensor]]


class Adopted(SplitModule):
    """Base of the adopted layers.

    tape: where the forward in progress records its uses; None runs torch's own. Others may use the parameters as well,
    as `nn.MultiheadAttention` does with its output layer's; those uses are left to autograd.
    """

    exclusive: ClassVar[bool] = False
    tape: SplitTape | None = None

    def splits(self) -> bool:
        """Whether this forward is recorded; not where another dtype than the parameters' or a compiler takes over."""
        return (
            not torch.compiler.is_compiling()
            and self.tape is not None
            and torch.is_grad_enabled()
            and not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))
            and all(own.requires_grad for own in self.parameters(recurse=False))
        )

    def record(self, output: Tensor, *saved: Tensor) -> Tensor:
        """Leave what the weight half needs on the tape; returns `output`."""
        assert self.tape is not None
        self.tape.record_output(self, output, tuple(tensor.detach() for tensor in saved))
        return output


def _leaf(parameter: nn.Parameter) -> Tensor:
    """Stands for a parameter in the graph: torch takes the same paths as with the parameter itself."""
    return parameter.detach().requires_grad_()


def _leaf_or_none(parameter: nn.Parameter | None) -> Tensor | None:
    return None if parameter is None else _leaf(parameter)


class SplitLinear(Adopted, nn.Linear):
    """`nn.Linear` with a split backward."""

    weight: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if not self.splits():
            return super().forward(input)
        output = functional.linear(input, _leaf(self.weight), _leaf_or_none(self.bias))
        return self.record(output, input)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> WeightGradients:
        rows = gradient.reshape(-1, self.out_features)
        yield self.weight, rows.t() @ saved[0].reshape(-1, self.in_features)
        if self.bias is not None:
            yield self.bias, rows.sum(0)


class SplitEmbedding(Adopted, nn.Embedding):
    """`nn.Embedding` with a split backward; neither renormalised nor sparse."""

    weight: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Indices [...] to [..., embedding_dim]."""
        if not self.splits():
            return super().forward(input)
        output = functional.embedding(
            input, _leaf(self.weight), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return self.record(output, input)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> WeightGradients:
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
        """`[..., *normalized_shape]` to the same."""
        if not self.splits():
            return super().forward(input)
        weight, bias = _leaf(self.weight), _leaf_or_none(self.bias)
        output, mean, deviation = torch.native_layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return self.record(output, input, mean, deviation)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> WeightGradients:
        has_bias = self.bias is not None
        _, weight, bias = torch.ops.aten.native_layer_norm_backward(
            gradient, saved[0], self.normalized_shape, *saved[1:], self.weight, self.bias, [False, True, has_bias]
        )
        yield self.weight, weight
        if has_bias:
            yield self.bias, bias


class SplitRMSNorm(Adopted, nn.RMSNorm):
    """`nn.RMSNorm` with a split backward. Its weight half normalises once more: torch keeps no statistics to share."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., *normalized_shape]` to the same."""
        if not self.splits():
            return super().forward(x)
        return self.record(functional.rms_norm(x, self.normalized_shape, _leaf(self.weight), self.eps), x)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> WeightGradients:
        with torch.enable_grad():
            leaf = _leaf(self.weight)
            output = functional.rms_norm(saved[0], self.normalized_shape, leaf, self.eps)
        yield self.weight, torch.autograd.grad(output, leaf, gradient)[0]


@contextmanager
def recording(modules: Sequence[Adopted], tape: SplitTape | None) -> Iterator[None]:
    """The adopted `modules` record their uses on `tape` inside of this block."""
    for module in modules:
        module.tape = tape
    try:
        yield
    finally:
        for module in modules:
            module.tape = None
