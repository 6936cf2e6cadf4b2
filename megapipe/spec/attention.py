"""The ops of attention: the projections, attention itself, and its exchanges between context ranks.

The projections are one matrix, or those of multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
Attention takes one of two paths: fused kernels, or the unfused path, which keeps the attention weights for the
backward.
"""

import math
from collections.abc import Iterator
from functools import partial

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.spec.linear import (
    all_tokens,
    column_exchanges,
    gathered_gradient,
    gradient,
    linear_op,
    matrix,
    norm_init,
    over_tensor_ranks,
    pair_exchanges,
    residual_std,
    row_exchanges,
    scales,
    vector,
    with_bias,
)
from megapipe.spec.ops import (
    FULL_BYTES,
    AttentionPath,
    Collective,
    Flops,
    Kernel,
    KernelUse,
    MicrobatchShape,
    Op,
    Precision,
    Value,
    passes,
)
from megapipe.spec.parameters import Init, ParameterSpec
from megapipe.spec.peaks import attention_peaks
from megapipe.spec.token_order import Visibility, order_of, pieces, slice_pieces

CAUSAL_SHARE = 0.5
"""Fraction of all pairs of tokens that a causal mask leaves visible, and that a fused kernel computes."""


def attention(shape: MicrobatchShape, source: Value, grad_output: Value) -> Iterator[Op]:
    """Yield the ops of the projections and of attention. source: their input. grad_output: gradient of the output.

    The rows of `qkv` are, for each kv group, the group's query heads, then its key, then its value. Context ranks form
    a ring (keys and values pass around it, in the backward with their gradients in fp32), or exchange heads for
    tokens.
    """
    model = shape.model
    latent = model.kv_latent_size is not None
    yield from latent_projections(shape, source) if latent else [_projection(shape, source)]
    core, result = _heads(shape)
    yield core
    size = model.hidden_size, model.num_heads * model.value_dim
    weights = with_bias(model, matrix("attention.output.weight", size, 1, residual_std(model)))
    calls = (*(row_exchanges if latent else gathered_gradient)(shape), *scales(shape))
    yield linear_op("output", shape, weights, result, grad_output, collectives=calls)


def _projection(shape: MicrobatchShape, source: Value) -> Op:
    """Return the projection to queries, keys and values."""
    model, calls = shape.model, pair_exchanges(shape)
    rows = (model.kv_heads, model.num_heads // model.kv_heads + 2, model.head_dim)
    qkv = matrix("attention.qkv.weight", (*rows, model.hidden_size), 0, model.init_std)
    output = gradient("qkv", shape.tokens * math.prod(rows) * shape.width // shape.tensor)
    return linear_op("qkv", shape, with_bias(model, qkv), source, output, collectives=calls)


def latent_projections(shape: MicrobatchShape, source: Value) -> Iterator[Op]:
    """Yield the ops that compute queries, keys and values from `source`. Each rank computes latents of its own
    tokens."""
    model, rotated, heads = shape.model, shape.model.rotary_dim, shape.model.num_heads
    query_latent, latent = model.query_latent_size, model.kv_latent_size or 0
    if query_latent is None:
        yield _per_head(shape, "query", heads * model.head_dim, model.hidden_size, source)
    else:
        yield from _latent(shape, source, "query", query_latent, query_latent)
        normalised = Value("query latent norm", _own(shape, query_latent))
        yield _per_head(shape, "query_up", heads * model.head_dim, query_latent, normalised)
    yield from _latent(shape, source, "kv", latent + rotated, latent)
    rows = heads * (model.own_head_size + model.value_dim)
    yield _per_head(shape, "kv_up", rows, latent, Value("kv latent norm", _own(shape, latent)))


def _own(shape: MicrobatchShape, channels: int) -> int:
    """Return the bytes of these channels of the tokens that this rank has between matrix products."""
    return shape.tokens * channels * shape.width // shape.shards


def _latent(shape: MicrobatchShape, source: Value, name: str, channels: int, normalised: int) -> Iterator[Op]:
    """Yield a matrix with `channels` outputs, which every tensor rank has whole, and the norm of the first
    `normalised` ones. The other outputs are the shared key; ranks exchange it, because the heads of every rank need
    it."""
    model = shape.model
    norm, moved = f"{name}_latent_norm", _own(shape, normalised)
    down = matrix(f"attention.{name}_down.weight", (channels, model.hidden_size), None, model.init_std)
    latent, rows = Value(f"{name} latent", _own(shape, channels)), shape.tokens // shape.shards
    yield linear_op(
        f"{name}_down",
        shape,
        with_bias(model, down),
        source,
        gradient(latent.name, latent.bytes),
        rows=rows,
        collectives=_shared_key(shape, channels - normalised),
    )
    kept = latent, Value(f"{norm} statistics", rows * FULL_BYTES)
    yield Op(
        norm,
        weights=(vector(f"attention.{norm}.weight", (normalised,), None, norm_init(model.head_norm_kind)),),
        saves=kept,
        weight_needs=(*kept, gradient(norm, moved)),
        kernels=partial(passes, norm, 2 * moved, 4 * moved),
        uses=(KernelUse(model.head_norm_kind.op, normalised),),
    )


def _shared_key(shape: MicrobatchShape, channels: int) -> tuple[Collective, ...]:
    """Return the exchanges of the key that all heads share, and of its gradient."""
    if not channels:
        return ()
    return over_tensor_ranks(shape, channels, all_reduce=(0, 1), all_gather=(1,), reduce_scatter=(0, 1))


def _per_head(shape: MicrobatchShape, path: str, rows: int, columns: int, source: Value) -> Op:
    """Return the op of a matrix whose rows belong to heads, which tensor ranks shard."""
    weight = matrix(f"attention.{path}.weight", (rows, columns), 0, shape.model.init_std)
    output = gradient(path, shape.tokens * rows * shape.width // shape.tensor)
    calls = column_exchanges(shape, columns)
    return linear_op(path, shape, (weight,), source, output, collectives=calls)


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


def _heads(shape: MicrobatchShape) -> tuple[Op, Value]:
    """Return the op of attention itself, and the tensor that the output projection reads."""
    model, tensor, width, tokens = shape.model, shape.tensor, shape.width, shape.tokens
    head_dim, heads, keys = model.head_dim, model.num_heads // tensor, model.kv_heads // tensor
    exchanged = shape.context > 1 and shape.context_attention == "all_to_all"
    ring, rotates = _is_ring(shape), model.positions == "rotary"
    copies = kv_copies(keys, model.num_heads // model.kv_heads, shape.context) if exchanged else 1
    by_group = (model.kv_heads, model.num_heads // model.kv_heads)
    init = Init("normal", model.init_std)
    sinks = (vector("attention.sinks.weight", by_group, 0, init),) if model.attention_sinks else ()
    saves, calls, needs = list(_masks(shape)), list[Collective](), tuple[Value, ...]()
    if model.qk_norm:
        rows = tokens * (heads + keys)
        before = Value("heads before their norms", (rows + tokens * keys) * head_dim * width)
        whole = model.qk_norm_over == "projection"
        kept = Value("head norm statistics", FULL_BYTES * (2 * tokens if whole else rows))
        saves.append(kept)
        # Attention in pieces returns the gradients of keys and values in one tensor, and an exchange adds those of
        # queries to it. The norms get separate tensors only from a rotation, or from a sum over copies of keys.
        joint = (exchanged or _in_pieces(shape)) and copies == 1 and not rotates
        held = rows + (tokens * keys if joint else 0)
        needs = before, kept, gradient("normalised heads", held * head_dim * width)
        if tensor > 1 and whole:  # sums over the heads of all ranks, for queries and for keys
            calls.append(Collective("tensor", "all_reduce", tokens, FULL_BYTES, 2, 2))
        elif tensor > 1 and not shape.sequence_parallel:  # two weights for a rank's own heads
            calls.append(Collective("tensor", "all_reduce", head_dim, width, 0, 2))
    result = Value("attention result", tokens * heads * model.value_dim * width)
    if exchanged:
        copied = keys * copies
        sizes = shape.sequence_length, heads // shape.context, copied // shape.context
        # Heads arrive rotated and normalised, so attention saves the same tensors as in a model without either.
        saves += _attended(shape, *sizes, changed=False, keeps_projected=False)
        if model.qk_norm:
            saves.append(before)
        if not _is_unfused(shape):  # the fused backward reads what was exchanged
            saves.append(Value("result of whole samples", tokens * heads * head_dim * width))
        for channels in ((heads + 2 * copied) * head_dim, heads * model.value_dim):
            calls.append(Collective("context", "all_to_all", tokens * channels, width, 1, 1))
    else:
        sizes, changed = (shape.local_length, heads, keys), model.qk_norm or rotates
        saves += _attended(shape, *sizes, changed=changed, keeps_projected=model.qk_norm)
        if model.value_dim < head_dim and not _is_unfused(shape):
            saves.append(Value("widened attention result", tokens * heads * head_dim * width))
        if ring:
            hops, block = shape.context - 1, 2 * tokens * keys * head_dim
            calls.append(Collective("context", "send", block, width, hops, hops))
            calls.append(Collective("context", "send", block, FULL_BYTES, 0, hops))
    channels = model.head_dim + model.value_dim
    pairs = 2 * all_tokens(shape) * model.num_heads * _seen_keys(shape) * channels
    handed = 2 * tokens * keys * head_dim if shape.slice + 1 < len(shape.slices) else 0
    return Op(
        "attention",
        weights=(*_norm_weights(model), *sinks),
        saves=tuple(saves),
        weight_needs=(*needs, *(gradient("sinks", heads * width) for _ in sinks)),
        handed=handed * width,
        handed_gradient=handed * FULL_BYTES,
        # Attention's two products have no weights: their backward is four products, all in the input half (Qi et al.
        # 2023, arXiv 2401.10241, table 1).
        flops=Flops(pairs, 2 * pairs),
        collectives=tuple(calls),
        kernels=lambda: (*_head_kernels(shape), *_core_kernels(shape)),
        uses=_attention_uses(shape),
        peaks=partial(attention_peaks, shape),
    ), result


def _norm_weights(model: ModelConfig) -> Iterator[ParameterSpec]:
    """Yield the weights of the norms of queries and keys: one vector for all heads, or one weight per channel of all
    heads."""
    whole = model.qk_norm_over == "projection"
    init = Init("ones") if whole else norm_init(model.head_norm_kind)
    query = (model.kv_heads, model.num_heads // model.kv_heads)
    for name, heads in (("query_norm", query), ("key_norm", query[:1])) if model.qk_norm else ():
        shape = (*heads, model.head_dim) if whole else (model.head_dim,)
        yield vector(f"attention.{name}.weight", shape, 0 if whole else None, init)


def _attended(
    shape: MicrobatchShape,
    length: int,
    heads: int,
    keys: int,
    *,
    changed: bool,
    keeps_projected: bool,
) -> list[Value]:
    """Return the tensors that attention saves, without its result: query, key and value, as projected (all three in
    one tensor) and as multiplied if that differs; and the log-sums, or the weights of the unfused path. length: tokens
    of a sample. heads, keys: number of query heads and of kv heads on this rank. changed: queries and keys are
    normalised or rotated before the product. keeps_projected: the projected tensor is saved for the norms.

    Making rows contiguous copies them: the unfused path copies rows by kv head, unless there is only one sample or one
    kv head; grouped queries are copied out of their groups.
    """
    model, unfused, rows = shape.model, _is_unfused(shape), shape.micro_size * length * heads
    query, key = (shape.micro_size * length * each * model.head_dim for each in (heads, keys))
    keys_copied = unfused and shape.micro_size * shape.num_chunks > 1 and keys > 1
    queries_copied = keys_copied or (heads > keys and (unfused or keys > 1))
    if shape.slices:  # queries apart; keys and values in one tensor that later slices read too
        elements = (query + 2 * key) * (1 + keeps_projected)
    elif model.kv_latent_size is not None and changed:
        elements = operand_elements(model, rows, unfused=unfused, copied=keys_copied)
    elif shape.repeats_keys:
        projected = 0 if (changed or keys > 1) and not keeps_projected else query + 2 * key
        elements = projected + query * (changed or queries_copied) + 2 * query
    else:
        elements = query + 2 * key if keeps_projected or not keys_copied else 0
        elements += query * (changed or queries_copied)
        elements += key * ((changed or keys_copied) + keys_copied)
    product = Value("query, key and value", elements * shape.width)
    if not unfused:
        return [product, Value("attention log-sums", rows * FULL_BYTES)]
    weights, dropped = rows * (length // shape.num_chunks), bool(model.attention_dropout)
    # A capped score's gradient is computed from its hyperbolic tangent.
    copies = 1 + dropped + (model.attention_softcap is not None)
    size = weights * shape.width * copies + weights * dropped * shape.stored_masks
    return [product, Value("attention weights", size, "attention", (product,))]


def _is_unfused(shape: MicrobatchShape) -> bool:
    """Return whether attention computes its weights as a tensor that it keeps."""
    return shape.attention == "unfused" and not _in_pieces(shape)


def _in_pieces(shape: MicrobatchShape) -> bool:
    """Return whether attention computes its weights piece by piece and keeps none: in a ring, in slices, and if the
    model requires it."""
    return _is_ring(shape) or bool(shape.slices) or shape.model.why_pieces is not None


def _is_ring(shape: MicrobatchShape) -> bool:
    return shape.context > 1 and shape.context_attention == "ring"


def _masks(shape: MicrobatchShape) -> Iterator[Value]:
    """Yield the tensors that attention saves to hide padding and other documents: masks and rotary tables.

    Positions within documents differ from sample to sample, so each micro-batch has its own rotary tables: two for
    queries and two for keys. Attention in pieces recomputes its masks.
    """
    model, width, in_pieces = shape.model, shape.width, _in_pieces(shape)
    if shape.isolate_documents:
        if model.positions == "rotary":
            yield Value("rotary tables", 4 * shape.tokens * model.rotary_dim // 2 * FULL_BYTES)
        if not shape.document_blocks and not in_pieces:
            size = shape.micro_size * shape.sequence_length**2 // shape.num_chunks
            unfused = shape.attention == "unfused"
            yield Value("mask", size, "attention") if unfused else Value("mask", size * width)
    if isinstance(model, BertModelConfig) and shape.attention == "sdpa" and not in_pieces:
        axes = 1 + (_seen_keys(shape) < shape.sequence_length)  # a window hides other keys
        yield Value("padding mask", shape.micro_size * shape.sequence_length**axes * width)


def _head_kernels(shape: MicrobatchShape) -> tuple[Kernel, ...]:
    """Return the passes that rotate and normalise heads."""
    model = shape.model
    rotates, partly = model.positions == "rotary", model.rotary_dim < model.head_dim
    # A partial rotation is a pass over the rotated channels, and a pass over all channels that joins both parts.
    channels = model.head_dim * (model.qk_norm + (rotates and not partly))
    channels += (model.head_dim + model.rotary_dim) * (rotates and partly)
    rows = shape.tokens * (model.num_heads + model.kv_heads) // shape.tensor
    moved = 2 * rows * channels * shape.width
    return passes("rotation and norms of heads", moved, moved) if moved else ()


def _core_kernels(shape: MicrobatchShape) -> Iterator[Kernel]:
    """Yield one fused kernel, or scores, softmax, dropout and the weighted sum of values, each by itself."""
    model, length, keys = shape.model, shape.local_length, _seen_keys(shape)
    batch = shape.micro_size * (model.num_heads // shape.tensor)
    if shape.num_chunks > 1:
        length, batch = keys, batch * shape.num_chunks // shape.context
    scores = Kernel("attention scores", "forward", (length, model.head_dim, keys, batch), dtype=shape.precision)
    if shape.attention == "unfused" and shape.context == 1 and not _in_pieces(shape):
        again = "attention" in shape.recompute
        mixed = scores._replace(name="attention values", product=(length, keys, model.value_dim, batch))
        for kernel in (scores, mixed):
            yield kernel
            if again and kernel is scores:
                yield kernel._replace(phase="recompute")
            yield kernel._replace(phase="backward_input", times=2.0)
        weights = batch * length * keys
        size = weights * shape.width
        if model.attention_softcap is not None:
            yield from passes("score cap", 4 * size, 5 * size, again=again)
        yield from passes("softmax", 2 * size, 3 * size, again=again)
        if model.attention_dropout:
            moved = 2 * size
            yield from passes("attention dropout", moved, moved, again=again, mask=weights)
        return
    causal = model.is_causal and keys == shape.sequence_length // shape.num_chunks
    share = CAUSAL_SHARE if causal else 1.0
    if causal and shape.slices:  # all keys of earlier slices, and half of its own
        places = shape.slices[shape.slice]
        share = (places.start + CAUSAL_SHARE * len(places)) / keys
    query = shape.tokens * (model.num_heads // shape.tensor) * model.head_dim * shape.width
    moved = 2 * query + 2 * (query * model.kv_heads // model.num_heads)
    # Dao 2023, arXiv 2307.08691, section 2.3: two products forward, five backward, of which one recomputes the scores.
    fused = scores._replace(name="fused attention", moved=moved, compute=2 * share)
    yield fused
    yield fused._replace(phase="backward_input", moved=2 * moved, compute=5 * share)


def _attention_uses(shape: MicrobatchShape) -> tuple[KernelUse, ...]:
    model, uses = shape.model, list[KernelUse]()
    if model.qk_norm and model.qk_norm_over == "head":
        uses.append(KernelUse(model.head_norm_kind.op, model.head_dim, calls=2))
    if model.positions == "rotary":
        uses.append(KernelUse("rotary", model.rotary_dim, calls=2))
    masks = isinstance(model, BertModelConfig) or shape.isolate_documents or model.attention_softcap is not None
    if _is_unfused(shape) and not masks:
        uses.append(KernelUse("attention_probabilities", model.head_dim, part="attention"))
    if model.attention_dropout and _in_pieces(shape):
        pieces = _num_pieces(shape)
        uses.append(KernelUse("dropout", shape.sequence_length, pieces, backward=2 * pieces))
    elif model.attention_dropout:
        uses.append(KernelUse("dropout", shape.sequence_length, part="attention"))
    return tuple(uses)


def _num_pieces(shape: MicrobatchShape) -> int:
    """Return the number of pieces that attention has on this rank. Dropout is applied to the weights of each piece; a
    backward recomputes them, and applies it to their gradients too."""
    bert = isinstance(shape.model, BertModelConfig)
    order, size, rank = order_of("ring", causal=not bert), shape.context, shape.context_rank
    if not _is_ring(shape):
        order, size, rank = "contiguous", 1, 0
    masked = bert or shape.isolate_documents
    visibility = Visibility(not bert, shape.model.sliding_window, masked)
    if shape.slices:
        seen = shape.slices[: shape.slice + 1]
        return sum(len(slice_pieces(visibility, seen[-1], keys)) for keys in seen)
    length = shape.sequence_length // size
    return sum(len(pieces(visibility, order, rank, key, size, length)) for key in range(size))


def kv_copies(kv_heads: int, heads_each: int, context_size: int) -> int:
    """Return how often all_to_all sends each key and value head of a tensor rank: once if the ranks divide them
    evenly.

    heads_each: query heads of a key head; each copy of a key head serves a part of them.
    Raises ValueError if the ranks do not divide the query heads evenly either.
    """
    if kv_heads * heads_each % context_size:
        raise ValueError(
            f"{kv_heads * heads_each} query heads cannot be divided evenly over {context_size} context ranks"
        )
    return next(n for n in range(1, heads_each + 1) if heads_each % n == 0 and kv_heads * n % context_size == 0)


def _seen_keys(shape: MicrobatchShape) -> int:
    """Return the largest number of keys that a query sees."""
    window, length = shape.model.attention_reach.tokens, shape.sequence_length
    if window is None:
        return length
    return min(window if shape.model.is_causal else 2 * window - 1, length)


LEAST_HEAD_DIM = 16
"""Smallest number of channels per head that flex_attention's kernels support."""
WITH_AMX = 512
WITHOUT_AMX = 128
"""Largest number of tokens for which the unfused path is faster in 16 bits on a CPU without AMX."""


def faster_path(device: str, half: bool, num_tokens: int, amx: bool) -> AttentionPath:
    """Return the faster path, for forward and backward together, on this device type.

    half: numbers have 16 bits. amx: the CPU has matrix instructions for bf16.

    Measured on one CPU thread, 4 heads of 64 channels: in fp32 the two are equally fast up to 256 tokens and SDPA is
    faster from 512 on. In bf16 the unfused path is faster up to 512 tokens with AMX (by a factor of 2.6 at 256) and up
    to 128 without.
    """
    if device != "cpu" or not half:
        return "sdpa"
    return "unfused" if num_tokens <= (WITH_AMX if amx else WITHOUT_AMX) else "sdpa"


def attention_path(
    model: ModelConfig, precision: Precision, device: str, num_tokens: int, amx: bool = False
) -> AttentionPath:
    """Return the path of a model: the configured one, or else the faster one among those that support the model."""
    if model.attention != "auto":
        return "unfused" if model.attention == "unfused" else "sdpa"
    if model.why_unfused is not None:
        return "unfused"
    if model.why_pieces is not None:
        return "sdpa"
    return faster_path(device, precision != "fp32", num_tokens, amx)


def why_a_mask(model: ModelConfig, device: str) -> str | None:
    """Return why attention within documents uses a mask on this device type; None if it uses blocks."""
    if model.attention in ("sdpa", "unfused"):
        return f"model.attention is {model.attention}"
    if model.why_unfused is not None:
        return f"{model.why_unfused} needs the unfused path"
    if model.why_pieces is not None:
        return f"{model.why_pieces} needs attention in pieces"
    if any(each.attention_chunk_size is not None for each in model.kinds_of_layers.values()):
        return "model.attention_chunk_size needs a mask for each chunk"
    if device != "cuda":
        return f"torch's flex_attention has no backward on {device}"
    narrowest = min(each.head_dim for each in model.kinds_of_layers.values())
    if narrowest < LEAST_HEAD_DIM:
        return f"torch's flex_attention needs heads of {LEAST_HEAD_DIM} channels, and these have {narrowest}"
    return None
