"""Linear layers whose matrix is sharded over a tensor group (Shoeybi et al. 2019, 1909.08053, section 3).

Parameters keep their canonical shape, in which all axes but the last are output axes, and are used as matrices.

Products in fp8 (Micikevicius et al. 2022, 2209.05433) scale operands and round them to 8 bits directly before each
product, which accumulates in fp32. Scales are computed from the operand itself: its largest magnitude becomes the
format's largest number. tensorwise has one scale per operand, with E4M3 in the forward and E5M2, which has a wider
range, for gradients. rowwise has one scale for each row or column that the product does not sum over, and always E4M3.

`ColumnLinear` and `RowLinear` are for a user's own modules. They work as `nn.Linear` until a pipeline gives them a
tensor group, so the same model also trains in one process. Between the two layers, a rank has its own part of the
features, so code there must read their number from the tensor, not from the model's sizes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.kernels.registry import Registry, opaque
from megapipe.layers.split import Rerun, SplitModule, SplitTape, Tensors, WeightGradients, save_input, saved_input
from megapipe.parallel.collectives import (
    copy_to_group,
    gather_tokens,
    largest_in_group,
    reduce_from_group,
    scatter_sum,
)
from megapipe.parallel.groups import Group

if TYPE_CHECKING:
    from megapipe.layers.sequence_parallel import SequenceProducts


class OnShards:
    """Mixin of modules that behave differently if tokens are sharded.

    sequence: how tokens are sharded; None for whole samples. partial: replicated parameters of the module whose
    gradient on a rank covers only its own tokens (or heads), so that it must be summed over the ranks before an
    update.
    """

    sequence: "SequenceProducts | None" = None
    partial: ClassVar[tuple[str, ...]] = ()

    def on_all_tokens(self, x: Tensor, group: Group) -> Tensor:
        """Return the hidden states x of all tokens, for computation of which each rank does a part: their gradient is
        the sum of all ranks' gradients."""
        return copy_to_group(x, group) if self.sequence is None else gather_tokens(x, group)

    def summed_over(self, y: Tensor, group: Group) -> Tensor:
        """Return the sum of all ranks' y [b, s, h], of all tokens or of those that a rank keeps."""
        return reduce_from_group(y, group) if self.sequence is None else scatter_sum(y, group)


def own_tokens(per_token: Tensor, shards: "SequenceProducts | None") -> Tensor:
    """Return this rank's part [..., s / t] of a tensor with an entry per token [..., s], as a view; all of it without
    shards."""
    if shards is None:
        return per_token
    share = per_token.shape[-1] // shards.group.size
    return per_token.narrow(-1, shards.group.rank * share, share)


def num_tokens(x: Tensor, shards: "SequenceProducts | None") -> int:
    """Return the number of tokens of the samples to which hidden states [b, s / t, h] belong."""
    return x.shape[1] * (1 if shards is None else shards.group.size)


def shard_sequence(layer: nn.Module, products: "SequenceProducts") -> list[str]:
    """Let a layer take and return hidden states [b, s / t, h]; return the paths of its `partial` parameters.

    A layer may name parts in `whole_sequence` that it runs on gathered tokens, identically on every rank.
    """
    for _, part in _parts_on_shards(layer):
        part.sequence = products
    return partial_parameters(layer)


def partial_parameters(layer: nn.Module) -> list[str]:
    """Return the paths of a layer's parameters that its parts name in `partial`."""
    return [
        f"{path}.{name}" if path else name
        for path, part in _parts_on_shards(layer)
        for name in part.partial
        if getattr(part, name) is not None
    ]


def _parts_on_shards(layer: nn.Module) -> Iterator[tuple[str, OnShards]]:
    whole: tuple[str, ...] = getattr(layer, "whole_sequence", ())
    for path, part in layer.named_modules():
        if isinstance(part, OnShards) and path.partition(".")[0] not in whole:
            yield path, part


Shapes = Mapping[str, tuple[int, ...]]
"""Attribute path within a module -> shape of the parameter as this rank stores it."""


def within(shapes: Shapes, module: str) -> Shapes:
    """Return the shapes of the parameters inside the submodule `module`, by their path in it."""
    prefix = f"{module}."
    return {path.removeprefix(prefix): shape for path, shape in shapes.items() if path.startswith(prefix)}


def empty_parameter(shape: tuple[int, ...]) -> nn.Parameter:
    """Return a parameter without storage or values; its owner binds it to memory."""
    return nn.Parameter(torch.empty(shape, device="meta"))


@opaque(
    "linear_weight_gradient(Tensor x, Tensor dy) -> Tensor",
    lambda x, dy: x.new_empty(dy.shape[-1], x.shape[-1]),
)
def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient [out, in] of the matrix, for input x [..., in] and output gradient dy [..., out]."""
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


@opaque(
    "linear_bias_gradient(Tensor dy) -> Tensor",
    lambda dy: dy.new_empty(dy.shape[-1]),
)
def bias_gradient(dy: Tensor) -> Tensor:
    """Return the gradient [out] of the bias."""
    return dy.flatten(0, -2).sum(0)


def as_matrix(weight: Tensor) -> Tensor:
    """Return an [out, in] view of a weight in canonical shape [..., in]."""
    return weight.view(-1, weight.shape[-1])


Rows = Sequence[int]
"""Shape of a product without its last axis."""

Source = Callable[[], Tensor]
"""Returns the input of a product, which may have to be recomputed."""

Gradients = tuple[Tensor | None, ...]


class Products:
    """The three matrix products of a linear layer, in the dtype of its operands, and the gradient of its bias.

    x: [..., in]. dy: [..., out].
    """

    bias_gradient = staticmethod(bias_gradient)

    def width(self, weight: Tensor) -> int:
        """Return the length of the output's last axis."""
        return weight.numel() // weight.shape[-1]

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output [..., out]."""
        return functional.linear(x, as_matrix(weight), None if bias is None else bias.view(-1))

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient [..., in] of x."""
        return dy @ as_matrix(weight)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """Return the gradient [out, in] of the weight."""
        return weight_gradient(x, dy)

    def accumulator_of(self, weight: Tensor) -> Tensor | None:
        """Return the parameter to whose `.grad` these products are added as they are computed, or None."""
        return None

    def gradient(self, x: Tensor, dy: Tensor, weight: Tensor, accumulator: Tensor | None) -> Tensor | None:
        """Return the gradient of the weight in its shape, or None if it has been added to the accumulator's
        `.grad`."""
        return self.weight_gradient(x, dy).view(weight.shape)

    def received(self, dy: Tensor) -> Tensor:
        """Return the output's gradient in the memory layout that the other methods need."""
        return dy

    def backward(
        self, dy: Tensor, weight: Tensor, needed: Sequence[bool], x: Source, accumulator: Tensor | None
    ) -> Gradients:
        """Return the gradients of x, weight (as `gradient`) and bias [out], None for those that are not `needed`."""
        dx = self.input_gradient(dy, weight) if needed[0] else None
        dweight = self.gradient(x(), dy, weight, accumulator) if needed[1] else None
        return dx, dweight, self.bias_gradient(dy) if needed[2] else None


PLAIN = Products()


class AccumulatingProducts(Products):
    """Products whose weight gradients the kernel registry's `weight_gradient` adds to the accumulators.

    Autograd would add them later, after rounding them to the dtype of the product.
    """

    def __init__(self, kernels: Registry) -> None:
        self._kernels = kernels

    def accumulator_of(self, weight: Tensor) -> Tensor | None:
        return weight

    def gradient(self, x: Tensor, dy: Tensor, weight: Tensor, accumulator: Tensor | None) -> Tensor | None:
        total = None if accumulator is None else accumulator.grad
        if total is None:
            return super().gradient(x, dy, weight, None)
        self._kernels.pick("weight_gradient", x).apply(x, dy, as_matrix(total))
        return None


def use_products(layer: nn.Module, products: Products) -> None:
    """Let every linear layer within `layer` multiply its matrices by `products`."""
    for module in layer.modules():
        if isinstance(getattr(module, "products", None), Products):
            module.products = products  # type: ignore[assignment]


class FusedLinear(torch.autograd.Function):
    """The forward and the whole backward of x W^T + b. The bias gets its gradient here even if it is added later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        add_bias: bool,
        rerun: Rerun | None,
        products: Products,
    ) -> Tensor:
        """Return x W^T [..., out], with the bias if `add_bias`. rerun: recomputes x, which is then not saved."""
        save_input(ctx, x, rerun, weight)
        ctx.products = products
        ctx.accumulator = products.accumulator_of(weight)
        ctx.bias_shape = None if bias is None else bias.shape
        return products.output(x, weight, bias if add_bias else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, each None where it is not needed."""
        weight, *kept = ctx.saved_tensors
        products, needed = ctx.products, ctx.needs_input_grad
        dy = products.received(dy)
        source = partial(saved_input, ctx, kept)
        dx, dweight, dbias = products.backward(dy, weight, needed, source, ctx.accumulator)
        dbias = None if dbias is None else dbias.view(ctx.bias_shape)
        return dx, dweight, dbias, None, None, None


class ProbedLinear(torch.autograd.Function):
    """The forward and the input half of a split backward. Weight and bias are detached; the probe receives the
    gradient dy of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        """Return x W^T + b [..., out]."""
        ctx.save_for_backward(weight)
        ctx.products = products
        return products.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        """Return the gradients of x and of the probe."""
        (weight,) = ctx.saved_tensors
        dy = ctx.products.received(dy)
        dx = ctx.products.input_gradient(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, dy, None, None, None


class WeightAndBias(SplitModule):
    """Base of the modules that compute x W^T + b.

    shapes: of `weight` [..., in] and, if there is a bias, `bias`. Parameters are on the meta device until they are
    bound.
    """

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])
        self.bias = empty_parameter(shapes["bias"]) if "bias" in shapes else None

    def product(
        self, x: Tensor, tape: SplitTape | None, products: Products, rows: Rows, rerun: Rerun | None, *, add_bias: bool
    ) -> Tensor:
        """Return x W^T + b [*rows, out], with output axes flattened into one. The bias gets its gradient here even if
        it is added later.

        rerun: recomputes x for the gradient of W, so that x is not saved.
        """
        if tape is None:
            return FusedLinear.apply(x, self.weight, self.bias, add_bias, rerun, products)
        record = tape.record(self, (*rows, products.width(self.weight)), x)
        record.keep_input(x, rerun)
        bias = self.bias.detach() if self.bias is not None and add_bias else None
        return ProbedLinear.apply(x, record.probe, self.weight.detach(), bias, products)


class Linear(WeightAndBias):
    """y = x W^T + b with one rank's part of W. products: how matrices are multiplied; may be replaced before the first
    forward."""

    def __init__(self, shapes: Shapes, group: Group) -> None:
        super().__init__(shapes)
        self.group = group
        self.products = PLAIN

    def local_product(
        self, x: Tensor, tape: SplitTape | None, *, add_bias: bool, rerun: Rerun | None = None
    ) -> Tensor:
        """Return the `product` [..., out] of x [..., in] and this rank's part of W."""
        return self.product(x, tape, self.products, x.shape[:-1], rerun, add_bias=add_bias)

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        yield from self.weight_gradients(saved[0], gradient)
        if self.bias is not None:
            yield self.bias, bias_gradient(gradient)

    def weight_gradients(self, x: Tensor, dy: Tensor) -> WeightGradients:
        """Return the weight with its gradient, or nothing if the gradient has already been added to `.grad`."""
        gradient = self.products.gradient(x, dy, self.weight, self.products.accumulator_of(self.weight))
        if gradient is not None:
            yield self.weight, gradient


class ColumnParallelLinear(Linear, OnShards):
    """A linear layer with sharded outputs: every rank has the whole x and computes its own part of y.

    Under sequence parallelism a rank has only its own tokens of x, which are gathered first.
    """

    def forward(
        self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None, *, add_bias: bool = True
    ) -> Tensor:
        """Map [..., in] to this rank's [..., out / size], with output axes flattened. rerun: as in `product`.
        add_bias: if false, the caller adds the detached bias, whose gradient is computed here."""
        if self.sequence is not None:
            return self.sequence.column(self, x, tape, add_bias=add_bias, rerun=rerun)
        return self.local_product(copy_to_group(x, self.group), tape, add_bias=add_bias, rerun=rerun)

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        if self.sequence is not None:
            return self.sequence.weight_half(self, saved[0], gradient, column=True)
        return super().weight_half(saved, gradient)


class RowParallelLinear(Linear, OnShards):
    """A linear layer with sharded inputs: the ranks' products are summed, then the bias is added once.

    Under sequence parallelism a rank gets only its own tokens of the sum.
    """

    partial = ("bias",)

    def forward(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> Tensor:
        """Map this rank's [..., in / size] to the whole [..., out]. rerun: as in `product`."""
        if self.group.size == 1:
            return self.local_product(x, tape, add_bias=True, rerun=rerun)
        if self.sequence is not None:
            y = self.sequence.row(self, x, tape, rerun=rerun)
        else:
            y = reduce_from_group(self.local_product(x, tape, add_bias=False, rerun=rerun), self.group)
        return y if self.bias is None else y + self.bias.detach()

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        if self.sequence is not None:
            return self.sequence.weight_half(self, saved[0], gradient, column=False)
        return super().weight_half(saved, gradient)


class ReplicatedLinear(Linear):
    """A linear layer that every rank computes whole, on the same x; for small layers that are not worth sharding."""

    def forward(self, x: Tensor, tape: SplitTape | None, rerun: Rerun | None = None) -> Tensor:
        """Map [..., in] to [..., out]. rerun: as in `product`."""
        return self.local_product(x, tape, add_bias=True, rerun=rerun)


class OwnTokensLinear(ReplicatedLinear, OnShards):
    """A replicated linear layer whose input, under sequence parallelism, is only a rank's own tokens."""

    partial = ("weight", "bias")


Recipe = Literal["tensorwise", "rowwise"]

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
ALIGNMENT = 16
"""Every dimension of a product on a GPU must be a multiple of this."""


@opaque(
    "fp8_product(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor",
    lambda a, b, scale_a, scale_b, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
)
def fp8_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a [m, k] times the transpose of b [n, k], both fp8, each times its scales: [m, n] in `dtype`.

    scale_a, scale_b: fp32, one element, or [m, 1] and [n, 1]. Without fp8 units (CPU), the same product is computed in
    fp32.
    """
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=dtype)
    return (a.float() @ b.float().t()).mul_(scale_a).mul_(scale_b.t()).to(dtype)


def quantised(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale in fp8, and the scale that maps `largest` to the format's largest number.

    largest: magnitudes that broadcast to x. If one is not finite, its results are not finite either. The error of a
    normal number is at most 1/16 of it in E4M3 and 1/8 in E5M2; the error of a smaller number is at most scale * 2^-10
    and scale * 2^-17.
    """
    limit = torch.finfo(dtype).max
    scale = (largest.float() / limit).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).clamp(-limit, limit).to(dtype).contiguous(), scale


class Fp8Products(Products):
    """The products of a linear layer in fp8; one instance for all layers of a rank.

    group: tensor ranks; they agree on tensorwise scales, as if each had the whole operand. Rowwise scales are computed
    from a rank's own part: if the axis of the sum is sharded, they are finer than in one process.
    """

    def __init__(self, recipe: Recipe, group: Group) -> None:
        self.recipe = recipe
        self.group = group
        self.gradients = E5M2 if recipe == "tensorwise" else E4M3

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = as_matrix(weight)
        y = self._product(x.flatten(0, -2), matrix, E4M3).view(*x.shape[:-1], matrix.shape[0])
        return y if bias is None else y + bias.view(-1)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        matrix = as_matrix(weight)
        return self._product(dy.flatten(0, -2), matrix.t(), self.gradients).view(*dy.shape[:-1], matrix.shape[1])

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        return self._product(dy.flatten(0, -2).t(), x.flatten(0, -2).t(), self.gradients)

    def _product(self, a: Tensor, b: Tensor, format_a: torch.dtype) -> Tensor:
        """Return a [m, k] times the transpose of b [n, k]; b is in E4M3."""
        largest_a, largest_b = self._largest(a, b)
        short_a, scale_a = quantised(a, largest_a, format_a)
        short_b, scale_b = quantised(b, largest_b, E4M3)
        return fp8_product(short_a, short_b, scale_a, scale_b, a.dtype)

    def _largest(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest magnitudes of elements with the same scale."""
        if self.recipe == "rowwise":
            return a.abs().amax(1, keepdim=True), b.abs().amax(1, keepdim=True)
        both = largest_in_group(torch.stack([a.abs().amax(), b.abs().amax()]).float(), self.group)
        return both[0].view(1, 1), both[1].view(1, 1)


class SplitFeatures(nn.Linear):
    """Base of the linear layers that tensor ranks shard.

    partition_axes: parameter -> the axis along which it is sharded. group: the tensor ranks; None for one rank, which
    has whole parameters. products: how matrices are multiplied.
    """

    partition_axes: ClassVar[Mapping[str, int]] = {}
    group: Group | None = None
    products: Products = PLAIN

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.products is PLAIN:
            return functional.linear(x, self.weight, bias)
        return FusedLinear.apply(x, self.weight, bias, bias is not None, None, self.products)


class ColumnLinear(SplitFeatures):
    """`nn.Linear` whose outputs are sharded over tensor ranks; `RowLinear` follows it.

    Example:
        >>> import torch
        >>> from megapipe import ColumnLinear, RowLinear
        >>> mlp = torch.nn.Sequential(ColumnLinear(8, 32), torch.nn.GELU(), RowLinear(32, 8))
        >>> mlp(torch.zeros(2, 8)).shape
        torch.Size([2, 8])
    """

    partition_axes: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out_features of this rank] for [..., in_features]."""
        return self._product(input if self.group is None else copy_to_group(input, self.group), self.bias)


class RowLinear(SplitFeatures):
    """`nn.Linear` whose inputs are sharded over tensor ranks: the outputs of a `ColumnLinear`.

    Example:
        >>> import torch
        >>> from megapipe import ColumnLinear, RowLinear
        >>> mlp = torch.nn.Sequential(ColumnLinear(8, 32, bias=False), torch.nn.GELU(), RowLinear(32, 8))
        >>> [name for name, _ in mlp.named_parameters()]
        ['0.weight', '2.weight', '2.bias']
    """

    partition_axes: ClassVar[Mapping[str, int]] = {"weight": 1}

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out_features], the sum over ranks, for [..., in_features of this rank]."""
        if self.group is None:
            return self._product(input, self.bias)
        output = reduce_from_group(self._product(input, None), self.group)
        return output if self.bias is None else output + self.bias


def partition_axis(module: nn.Module, path: str) -> int | None:
    """Return the axis along which a parameter of `module` is sharded over tensor ranks, None if it is replicated."""
    owner, _, name = path.rpartition(".")
    part = module.get_submodule(owner)
    return part.partition_axes.get(name) if isinstance(part, SplitFeatures) else None


def set_tensor_group(module: nn.Module, group: Group) -> None:
    """Shard the linear layers within `module` over the ranks of a group; their parameters must be this rank's
    parts."""
    for part in module.modules():
        if isinstance(part, SplitFeatures) and group.size > 1:
            part.group = group
