"""Matrix products whose weights tensor ranks shard: their parameters, exchanges and kernels."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

from megapipe.config.model import ModelConfig, NormKind
from megapipe.spec.ops import (
    FULL_BYTES,
    Collective,
    Kernel,
    MicrobatchShape,
    Op,
    Peaks,
    Value,
    linear_flops,
    linear_kernels,
)
from megapipe.spec.parameters import Init, ParameterSpec

ZEROS = Init("zeros")
CHUNK_BYTES = 2**28
"""Maximum bytes of logits that are computed at a time if the backward recomputes them."""


def norm_init(kind: NormKind) -> Init:
    """Return how the weight of a norm is initialised."""
    return Init(kind.initial)


def norm_weights(model: ModelConfig, path: str) -> tuple[ParameterSpec, ...]:
    """Return the weight and, for layer norm, the bias of the norm at `path`."""
    weight = vector(f"{path}.weight", (model.hidden_size,), None, norm_init(model.norm_kind))
    if not model.norm_kind.biased:
        return (weight,)
    return weight, vector(f"{path}.bias", (model.hidden_size,), None, ZEROS)


def table(model: ModelConfig, path: str, rows: int, *, padded: bool) -> ParameterSpec:
    """Return a lookup table or the output projection. It is decayed, but optimizers that orthogonalise matrices do not
    treat it as a matrix."""
    axis = 0 if padded else None
    init = Init("normal", model.init_std)
    return ParameterSpec(path, (rows, model.hidden_size), axis, init, decay=True, matrix=False, padded=padded)


@lru_cache(maxsize=256)
def matrix(path: str, shape: tuple[int, ...], axis: int | None, std: float) -> ParameterSpec:
    """Return a matrix of a linear layer. axis: the one that tensor ranks shard."""
    return ParameterSpec(path, shape, axis, Init("normal", std), decay=True, matrix=True)


@lru_cache(maxsize=256)
def vector(path: str, shape: tuple[int, ...], axis: int | None, init: Init) -> ParameterSpec:
    """Return a bias or a norm's weight, which is never decayed."""
    return ParameterSpec(path, shape, axis, init, decay=False, matrix=False)


def residual_std(model: ModelConfig) -> float:
    """Return the initial deviation of matrices that write to the residual stream (GPT-2 report, section 2.3)."""
    return model.init_std / math.sqrt(2 * model.num_layers) if model.scale_residual_init else model.init_std


def with_bias(model: ModelConfig, weight: ParameterSpec) -> tuple[ParameterSpec, ...]:
    """Return the matrix of a linear layer and, if the model has one, its bias."""
    if not model.has_bias(weight.name):
        return (weight,)
    *outputs, inputs = range(len(weight.shape))
    axis = None if weight.partition_axis == inputs else weight.partition_axis
    path = weight.name.removesuffix("weight") + "bias"
    bias = vector(path, weight.shape[: len(outputs)], axis, ZEROS)
    return weight, replace(bias, state_unit=weight.state_unit)


OUTPUT_GRADIENT = "gradient of the layer's output"
"""Name of the gradient with which a layer's backward starts, if a weight half reads this tensor itself."""


def gradient(name: str, size: int) -> Value:
    """Return the gradient of the tensor `name`."""
    return Value(f"gradient of {name}", size)


def chunk_rows(num_columns: int, element_bytes: int) -> int:
    """Return the rows of logits that are computed at a time if none are saved: a power of two that takes at most
    256 MB."""
    rows = CHUNK_BYTES // (max(num_columns, 1) * element_bytes)
    return 1 << max(rows.bit_length() - 1, 0)


def all_tokens(shape: MicrobatchShape) -> int:
    """Return the tokens of the micro-batch over all context ranks."""
    return shape.micro_size * shape.passing_length


Calls = tuple[int, ...]
"""Calls of a `Collective`: forward, backward, input_half, weight_half."""


def over_tensor_ranks(
    shape: MicrobatchShape, channels: int, *, all_reduce: Calls = (), chunks: int = 1, **sharded: Calls
) -> tuple[Collective, ...]:
    """Return the exchanges of a tensor of these channels over the tensor ranks.

    all_reduce: its calls if every rank has all tokens. sharded: calls of each operation under sequence parallelism,
    which exchanges one of the chunks.
    """
    if shape.tensor == 1:
        return ()
    if not shape.sequence_parallel:
        sharded, chunks = {"all_reduce": all_reduce} if all_reduce else {}, 1
    elements = shape.tokens * channels // chunks
    exchanges = ((name, elements, shape.width, *calls) for name, calls in sharded.items())
    # The names are those of operations.
    return tuple(Collective("tensor", *each) for each in exchanges)  # type: ignore[arg-type]


def entering(shape: MicrobatchShape, chunks: int) -> tuple[Collective, ...]:
    """Return the exchanges around a pair of matrices: before the one whose rows and after the one whose columns the
    tensor ranks shard. Each sends the residual stream: 8 b s h (t - 1) / t elements per block (Narayanan et al. 2021,
    arXiv 2104.04473, section 3.2)."""
    both, hidden = (chunks, chunks), shape.model.hidden_size
    return over_tensor_ranks(shape, hidden, all_reduce=(1, 1), all_gather=both, reduce_scatter=both, chunks=chunks)


def pair_exchanges(shape: MicrobatchShape) -> tuple[Collective, ...]:
    """Return the exchanges around a pair of matrices, of which the first one's op has them, and of its scales. Under
    sequence parallelism, the first product's input is gathered again for its weight's gradient (Korthikanti et al.
    2022, arXiv 2205.05198, section 4.2.2)."""
    again = over_tensor_ranks(shape, shape.model.hidden_size, all_gather=(0, 1, 0, 1))
    return (*entering(shape, shape.sequence_chunks), *again, *scales(shape))


def gathered_gradient(shape: MicrobatchShape) -> tuple[Collective, ...]:
    """Return the gather of the gradient of a pair's sum: the weight half of a split backward needs it a second
    time."""
    return over_tensor_ranks(shape, shape.model.hidden_size, all_gather=(0, 0, 0, 1))


def column_exchanges(shape: MicrobatchShape, channels: int) -> tuple[Collective, ...]:
    """Return the exchanges of the input of a matrix whose rows tensor ranks shard. channels: of the input."""
    n = shape.sequence_chunks
    return (
        *over_tensor_ranks(shape, channels, all_reduce=(0, 1), all_gather=(n,), reduce_scatter=(0, n), chunks=n),
        *over_tensor_ranks(shape, channels, all_gather=(0, 1, 0, 1)),
    )


def row_exchanges(shape: MicrobatchShape) -> tuple[Collective, ...]:
    """Return the exchanges of the output of a matrix whose columns tensor ranks shard, the residual stream."""
    hidden, n = shape.model.hidden_size, shape.sequence_chunks
    return (
        *over_tensor_ranks(shape, hidden, all_reduce=(1,), reduce_scatter=(n,), all_gather=(0, n), chunks=n),
        *gathered_gradient(shape),
    )


def scales(shape: MicrobatchShape) -> tuple[Collective, ...]:
    """Return the exchange of the largest magnitudes of both operands of a matrix product in fp8, forward and for the
    gradients of input and weight."""
    if not shape.tensorwise_fp8 or shape.tensor == 1:
        return ()
    chunks = shape.sequence_chunks if shape.sequence_parallel else 1
    return (Collective("tensor", "all_reduce", 2, FULL_BYTES, chunks, chunks + 1, chunks, 1),)


def linear_op(
    name: str,
    shape: MicrobatchShape,
    weights: tuple[ParameterSpec, ...],
    source: Value,
    grad_output: Value,
    *,
    rows: int | None = None,
    all_rows: int | None = None,
    gathered: bool = False,
    more_saves: tuple[Value, ...] = (),
    collectives: tuple[Collective, ...] = (),
    peaks: Callable[[], Peaks] = tuple,
) -> Op:
    """Return the op of a linear layer. weights: its matrix, and its bias if it has one. source: its input.
    grad_output: gradient of its output. rows: of its products on this rank, by default the tokens on its tensor ranks.
    all_rows: of its products on all tensor and context ranks together, by default all tokens. gathered: as in `Op`.
    more_saves: further tensors that its backward reads."""
    weight = weights[0]
    return Op(
        name,
        weights=weights,
        gathered=gathered,
        saves=(source, *more_saves),
        weight_needs=(source, grad_output),
        flops=linear_flops(all_tokens(shape) if all_rows is None else all_rows, weight.num_elements),
        collectives=collectives,
        kernels=partial(linear_products, shape, weight, shape.tokens if rows is None else rows),
        peaks=peaks,
    )


def linear_products(shape: MicrobatchShape, spec: ParameterSpec, rows: int) -> tuple[Kernel, ...]:
    """Return the products of a linear layer's shard with `rows` rows."""
    local = spec.local_shape(shape.tensor, shape.alignment)
    return linear_kernels(
        spec.name.removesuffix(".weight"),
        rows,
        local[-1],
        math.prod(local[:-1]),
        dtype="fp8" if shape.fp8 else shape.precision,
        width=shape.width,
    )
