"""The ops of multi-latent attention's projections (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from collections.abc import Iterator
from functools import partial

from megapipe.config.model import ModelConfig
from megapipe.spec.linear import (
    all_tokens,
    column_exchanges,
    gradient,
    linear_bias,
    linear_products,
    matrix,
    norm_init,
    vector,
)
from megapipe.spec.ops import FULL_BYTES, Collective, KernelUse, MicrobatchShape, Op, Value, linear_flops, passes


def latent_projections(shape: MicrobatchShape, source: Value) -> Iterator[Op]:
    """Yield the ops that compute queries, keys and values from `source`. Each rank computes latents of its own
    tokens."""
    model, rotated, heads = shape.model, shape.model.rotary_dim, shape.model.num_heads
    query_latent, latent = model.query_latent_size, model.kv_latent_size or 0
    if query_latent is None:
        yield _heads(shape, "query", heads * model.head_dim, model.hidden_size, source)
    else:
        yield from _latent(shape, source, "query", query_latent, query_latent)
        read = Value("query latent norm", _own(shape, query_latent))
        yield _heads(shape, "query_up", heads * model.head_dim, query_latent, read)
    yield from _latent(shape, source, "kv", latent + rotated, latent)
    key_and_value = heads * (model.own_head_size + model.value_dim)
    yield _heads(shape, "kv_up", key_and_value, latent, Value("kv latent norm", _own(shape, latent)))


def _own(shape: MicrobatchShape, channels: int) -> int:
    """Return the bytes of these channels of the tokens that this rank has between matrix products."""
    return shape.tokens * channels * shape.width // shape.shards


def _latent(shape: MicrobatchShape, source: Value, name: str, channels: int, normalised: int) -> Iterator[Op]:
    """Yield a matrix with `channels` outputs, which every tensor rank has whole, and the norm of the first
    `normalised` ones. The other outputs are the shared key; ranks exchange it, because the heads of every rank need
    it."""
    model = shape.model
    path, norm, moved = f"attention.{name}_down", f"{name}_latent_norm", _own(shape, normalised)
    down = matrix(f"{path}.weight", (channels, model.hidden_size), None, model.init_std)
    latent, statistics = Value(f"{name} latent", _own(shape, channels)), _own_rows(shape) * FULL_BYTES
    yield Op(
        f"{name}_down",
        weights=(down, *linear_bias(model, f"{path}.bias", (channels,), None)),
        saves=(source,),
        weight_needs=(source, gradient(latent.name, latent.bytes)),
        flops=linear_flops(all_tokens(shape), down.num_elements),
        collectives=_shared_key(shape, channels - normalised),
        kernels=partial(linear_products, shape, down, _own_rows(shape)),
    )
    kept = latent, Value(f"{norm} statistics", statistics)
    yield Op(
        norm,
        weights=(vector(f"attention.{norm}.weight", (normalised,), None, norm_init(model.head_norm_kind)),),
        saves=kept,
        weight_needs=(*kept, gradient(norm, moved)),
        kernels=partial(passes, norm, 2 * moved, 4 * moved),
        uses=(KernelUse(model.head_norm_kind.op, normalised),),
    )


def _own_rows(shape: MicrobatchShape) -> int:
    return shape.tokens // shape.shards


def _shared_key(shape: MicrobatchShape, channels: int) -> tuple[Collective, ...]:
    """Return the exchanges of the key that all heads share, and of its gradient."""
    if shape.tensor == 1 or not channels:
        return ()
    elements = shape.tokens * channels
    if not shape.sequence_parallel:
        return (Collective("tensor", "all_reduce", elements, shape.width, 0, 1),)
    return (
        Collective("tensor", "all_gather", elements, shape.width, 1),
        Collective("tensor", "reduce_scatter", elements, shape.width, 0, 1),
    )


def _heads(shape: MicrobatchShape, path: str, rows: int, channels: int, source: Value) -> Op:
    """Return the op of a matrix whose rows belong to heads, which tensor ranks shard."""
    weight = matrix(f"attention.{path}.weight", (rows, channels), 0, shape.model.init_std)
    return Op(
        path,
        weights=(weight,),
        saves=(source,),
        weight_needs=(source, gradient(path, shape.tokens * rows * shape.width // shape.tensor)),
        flops=linear_flops(all_tokens(shape), weight.num_elements),
        collectives=column_exchanges(shape, channels),
        kernels=partial(linear_products, shape, weight, shape.tokens),
    )


def operand_elements(model: ModelConfig, rows: int, *, unfused: bool, copied: bool) -> int:
    """Return the number of elements of queries, keys and values as attention multiplies them. rows: of all heads.

    Values are views of the projection's output, unless making heads contiguous copies them (copied), or fused kernels
    need them widened to the channels of queries.
    """
    if copied:
        values = model.value_dim
    elif not unfused and model.value_dim < model.head_dim:
        values = model.head_dim
    else:
        values = model.own_head_size + model.value_dim
    return rows * (2 * model.head_dim + values)
