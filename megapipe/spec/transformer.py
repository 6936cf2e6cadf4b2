"""The ops of GPT and BERT layers: blocks and embeddings; `spec.heads` has the ops of heads.

Letters as in Narayanan et al. (2021, arXiv 2104.04473, section 3.2): b samples of a micro-batch, s tokens of a sample,
h hidden size, t tensor ranks. The order of ops is the order of their parameters, which the flat buffers of a unit
keep. It is not the order of execution if a norm follows a residual sum (post-norm BERT). With dropout, layer norm,
GELU and the unfused path a block saves what Korthikanti et al. (2022, arXiv 2205.05198, section 4, table 2) count, and
the statistics of its norms, which they leave out.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from megapipe.config.bert import BertModelConfig
from megapipe.config.memory import RecomputedPart
from megapipe.spec.attention import attention
from megapipe.spec.linear import (
    OUTPUT_GRADIENT,
    ZEROS,
    all_tokens,
    entering,
    gathered_gradient,
    gradient,
    linear_op,
    matrix,
    norm_weights,
    over_tensor_ranks,
    pair_exchanges,
    residual_std,
    scales,
    table,
    vector,
    with_bias,
)
from megapipe.spec.ops import (
    FULL_BYTES,
    Collective,
    Kernel,
    KernelUse,
    MicrobatchShape,
    Op,
    Peaks,
    Value,
    linear_flops,
    linear_kernels,
    passes,
)
from megapipe.spec.parameters import ParameterSpec
from megapipe.spec.peaks import (
    activation_peaks,
    down_peaks,
    gate_peaks,
    projection_peaks,
    table_peaks,
    up_peaks,
)

ROUTER = "mlp.router.weight"
"""Path of the matrix that chooses a token's experts, in blocks with experts."""
INDEX_BYTES = 8
"""Bytes of an index of a token, a row or an expert."""


def block_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the ops of one block: attention and MLP, or experts, with their norms and residual sums."""
    model, position, stream = shape.model, shape.model.norm_position, shape.own_stream
    layer_input, after_attention, after_mlp = (
        Value(name, stream) for name in ("input", "attention residual", "mlp residual")
    )
    # Each norm's input, and its result, which the following matrix product reads.
    first_input = after_attention if position == "post" else layer_input
    second_input = {"post": after_mlp}.get(position, layer_input if model.parallel_residual else after_attention)
    first, second = (
        Value(name, stream, "norms", (source,))
        for name, source in (("attention norm", first_input), ("mlp norm", second_input))
    )
    reads = {"post": (layer_input, first), "output": (layer_input, after_attention)}.get(position, (first, second))
    if not model.attention_norm:
        reads = (layer_input, second)
    elif position != "output":
        yield norm(shape, "attention_norm", first_input, part="norms")
    # A residual sum passes on the gradient of the block's output itself only if nothing else reads the sum.
    attention_gradient, mlp_gradient = (
        gradient(name, stream) if changed else Value(OUTPUT_GRADIENT, stream)
        for name, changed in (
            ("attention output", model.changes_updates or not model.parallel_residual),
            ("down", model.changes_updates or position == "post"),
        )
    )
    yield from attention(shape, reads[0], attention_gradient)
    yield from _output_norm(shape, "attention")
    yield residual(shape, "attention residual")
    if position != "output":
        yield norm(shape, "mlp_norm", second_input, part=None if position == "post" else "norms")
    if model.num_experts is None:
        yield from mlp(shape, reads[1], mlp_gradient)
    else:
        yield from experts(shape, reads[1], mlp_gradient)
    yield from _output_norm(shape, "mlp")
    yield residual(shape, "mlp residual")


def _output_norm(shape: MicrobatchShape, half: Literal["attention", "mlp"]) -> Iterator[Op]:
    """Yield the norm of the output of attention or MLP, if the model has one. Its result is not saved."""
    model, stream = shape.model, shape.own_stream
    if not model.normalizes_outputs:
        return
    op = norm(shape, f"{half}_output_norm", Value(f"{half} update", stream))
    if half == "mlp" and not model.hidden_dropout and model.residual_scale == 1:
        op = op._replace(weight_needs=(*op.weight_needs[:-1], Value(OUTPUT_GRADIENT, stream)))
    yield op


def norm(shape: MicrobatchShape, path: str, source: Value, *, part: RecomputedPart | None = None) -> Op:
    """Return a norm of the residual stream. Its kernel reads and writes the stream once; the backward reads the input
    and two gradients and writes one. part: the part of a block whose recomputation calls the kernel again. It is None
    for the last norm of a block with norms after the residual sums: the block's backward does not need its result."""
    model, stream = shape.model, shape.own_stream
    statistics = Value(f"{path} statistics", shape.statistics(shape.tokens // shape.shards))
    again = path in ("attention_norm", "mlp_norm") and "norms" in shape.recompute
    weights = norm_weights(model, path)
    copied = sum(spec.num_elements for spec in weights) * shape.width
    return Op(
        path,
        weights=weights,
        saves=(source, statistics),
        weight_needs=(source, statistics, gradient(path, stream)),
        copies=(Value(f"{path} weights", copied),) if part in shape.recompute else (),
        kernels=partial(passes, path, 2 * stream, 4 * stream, again=again),
        uses=(KernelUse(model.norm_kind.op, model.hidden_size, part=part),),
    )


def residual(shape: MicrobatchShape, name: str) -> Op:
    """Return a residual sum with its dropout: one kernel that reads two tensors and writes one."""
    model, stream = shape.model, shape.own_stream
    elements = stream // shape.width if model.hidden_dropout else 0
    return Op(
        name,
        saves=(Value(f"{name} mask", elements * shape.stored_masks),),
        kernels=partial(passes, name, 3 * stream, 2 * stream, mask=elements),
        uses=(KernelUse("bias_dropout_residual", model.hidden_size),) if elements else (),
    )


def mlp(shape: MicrobatchShape, source: Value, grad_output: Value, *, shared: bool = False) -> Iterator[Op]:
    """Yield the ops of an MLP, or of a `shared` expert. Axis 0 of a gated `up` is (gate, up). grad_output: gradient of
    its output."""
    model, hidden = shape.model, shape.model.hidden_size
    ffn = (model.shared_expert_size or 0) if shared else model.ffn_size
    path, prefix = ("mlp.shared", "shared ") if shared else ("mlp", "")
    gate = 1 + model.activation_kind.gated
    rows, axis = ((2, ffn), 1) if model.activation_kind.gated else ((ffn,), 0)
    up = matrix(f"{path}.up.weight", (*rows, hidden), axis, model.init_std)
    down = matrix(f"{path}.down.weight", (hidden, ffn), 1, residual_std(model))
    inner = shape.tokens * ffn * shape.width // shape.tensor
    outer = Value(f"{prefix}up", inner * gate)
    activated = Value(f"{prefix}activation", inner, "mlp", (outer,))
    yield linear_op(
        f"{prefix}up",
        shape,
        with_bias(model, up),
        source,
        gradient(outer.name, outer.bytes),
        collectives=pair_exchanges(shape),
        peaks=partial(up_peaks, shape, up, shared=shared),
    )
    yield _activation(shape, outer, inner, ffn // shape.tensor, biased=model.has_bias(f"{path}.up"), shared=shared)
    yield linear_op(
        f"{prefix}down",
        shape,
        with_bias(model, down),
        activated,
        grad_output,
        collectives=(*gathered_gradient(shape), *scales(shape)),
        peaks=partial(down_peaks, shape, down, shared=shared),
    )


def _activation(
    shape: MicrobatchShape, source: Value, inner: int, channels: int, *, biased: bool, shared: bool = False
) -> Op:
    """Return the op of an activation, whose kernel also adds the bias. inner: bytes of its result. channels: of its
    result. biased: there is a bias."""
    kind = shape.model.activation_kind
    inputs, op = 1 + kind.gated, (kind.biased if biased else None) or kind.op
    return Op(
        "activation",
        saves=(source,),
        kernels=partial(
            passes, "activation", (inputs + 1) * inner, (2 * inputs + 1) * inner, again="mlp" in shape.recompute
        ),
        uses=(KernelUse(op, inputs * channels, part="mlp"),),
        peaks=partial(activation_peaks, shape, shared=shared),
    )


def experts(shape: MicrobatchShape, source: Value, grad_output: Value) -> Iterator[Op]:
    """Yield the ops of a mixture of experts whose tensor ranks each hold some experts whole.

    Every rank picks the rows of its own experts from all tokens. Which experts tokens choose depends on the data; the
    counts assume that rows are spread evenly: k rows per token over t ranks. A rank whose experts are chosen more
    often saves more and computes longer by the same ratio. If the activation is gated, axis 1 of `up` is (gate, up).
    """
    model, hidden, ffn = shape.model, shape.model.hidden_size, shape.model.ffn_size
    number, gate = model.num_experts or 1, 1 + model.activation_kind.gated
    inner_shape = (number, 2, ffn) if model.activation_kind.gated else (number, ffn)
    router = matrix(ROUTER, (number, hidden), None, model.init_std)
    up = matrix("mlp.up.weight", (*inner_shape, hidden), 0, model.init_std)
    down = matrix("mlp.down.weight", (number, hidden, ffn), 0, residual_std(model))
    up, down = (replace(each, state_unit="experts") for each in (up, down))
    biases = (*with_bias(model, up)[1:], *with_bias(model, down)[1:])
    scored = (vector("mlp.router.score_bias", (number,), None, ZEROS),) if model.router_bias else ()
    balance = replace(vector("mlp.router.bias", (number,), None, ZEROS), balance_rate=model.expert_balance_rate)
    rows, choices, width = shape.expert_rows, shape.tokens * model.experts_per_token, shape.width
    scores = Value("scores", shape.tokens * number * FULL_BYTES // shape.shards)
    chosen = (_share_bytes(shape) + choices * INDEX_BYTES) // shape.shards
    picked, outer = Value("picked rows", rows * hidden * width), Value("up", rows * ffn * gate * width)
    activated = Value("activation", rows * ffn * width, "mlp", (outer,))
    yield Op(
        "router",
        weights=(router, *scored),
        saves=(source, scores, Value("chosen experts", chosen)),
        weight_needs=(source, gradient("scores", scores.bytes)),
        flops=linear_flops(all_tokens(shape), router.num_elements),
        collectives=(*entering(shape, 1), *_choice_collectives(shape, choices)),
        kernels=partial(
            linear_kernels, "mlp.router", shape.tokens // shape.shards, hidden, number, dtype="fp32", width=width
        ),
    )
    yield Op(
        "dispatch",
        saves=(
            Value("tokens of rows", rows * INDEX_BYTES),
            Value("numbers of rows", choices * INDEX_BYTES),
        ),
        kernels=partial(_row_kernels, shape),
    )
    yield _expert_op("up", shape, (up,), picked, outer.bytes, up_peaks)
    yield _activation(shape, outer, choices * ffn * width // shape.tensor, ffn, biased=False)
    weights = (down, *biases, *((balance,) if model.balances_experts else ()))
    yield _expert_op("down", shape, weights, activated, picked.bytes, down_peaks)
    yield Op("combine", saves=(Value("results of rows", picked.bytes), Value("weights of rows", rows * width)))
    if model.shared_expert_size is not None:
        apart = model.shared_expert_gate or grad_output.name != OUTPUT_GRADIENT
        yield from mlp(shape, source, gradient("shared down", shape.own_stream) if apart else grad_output, shared=True)
        yield _shared_sum(shape, source)


def _shared_sum(shape: MicrobatchShape, source: Value) -> Op:
    """Return the op that adds the results of the shared expert and of the chosen experts, with the shared expert's
    gate."""
    model, stream = shape.model, shape.own_stream
    if not model.shared_expert_gate:
        return Op("shared sum", kernels=partial(passes, "shared sum", 3 * stream, 0))
    gate = matrix("mlp.shared.gate.weight", (1, model.hidden_size), None, model.init_std)
    opened = shape.tokens * shape.width // shape.shards
    return Op(
        "shared sum",
        weights=(gate,),
        saves=(source, Value("shared gate", opened), Value("shared result", stream)),
        weight_needs=(source, gradient("shared gate", opened)),
        flops=linear_flops(all_tokens(shape), gate.num_elements),
        kernels=partial(passes, "shared sum", 6 * stream, 5 * stream),
        peaks=partial(gate_peaks, shape),
    )


def _share_bytes(shape: MicrobatchShape) -> int:
    """Return the bytes that are saved for the shares of all tokens in addition to scores: values of the chosen experts
    and, if sigmoids are normalized, their sums. A softmax over all scores saves its result in place of the scores."""
    normalized, sigmoid = shape.model.normalize_expert_shares, shape.model.router_scores == "sigmoid"
    kept = shape.model.experts_per_token * (normalized or sigmoid) + (normalized and sigmoid)
    return shape.tokens * kept * FULL_BYTES


def _choice_collectives(shape: MicrobatchShape, choices: int) -> tuple[Collective, ...]:
    """Return the exchanges of the tokens' choices of experts, and of the gradients of shares, each of which is
    computed on the rank of its expert."""
    if shape.tensor == 1:
        return ()
    if not shape.sequence_parallel:
        return (Collective("tensor", "all_reduce", choices, FULL_BYTES, 0, 1),)
    return (
        Collective("tensor", "all_gather", choices, FULL_BYTES, 1),
        Collective("tensor", "all_gather", choices, INDEX_BYTES, 1),
        Collective("tensor", "reduce_scatter", choices, FULL_BYTES, 0, 1),
    )


def _expert_op(
    name: str,
    shape: MicrobatchShape,
    weights: tuple[ParameterSpec, ...],
    source: Value,
    output: int,
    peaks: Callable[[MicrobatchShape, ParameterSpec], Peaks],
) -> Op:
    """Return the op of a matrix of all experts. weights: the matrix, then others. output: bytes of its output. peaks:
    returns its peaks."""
    used = weights[0].num_elements // (shape.model.num_experts or 1) * shape.model.experts_per_token
    return Op(
        name,
        weights=weights,
        saves=(source,),
        weight_needs=(source, gradient(name, output)),
        flops=linear_flops(all_tokens(shape), used),
        kernels=partial(_expert_products, shape, weights[0]),
        peaks=partial(peaks, shape, weights[0]),
    )


def _expert_products(shape: MicrobatchShape, spec: ParameterSpec) -> tuple[Kernel, ...]:
    """Return the products of all experts, one after another, each with an equal part of the rows."""
    number, *local = spec.shape
    rows = max(1, shape.tokens * shape.model.experts_per_token // number)
    return linear_kernels(
        spec.name.removesuffix(".weight"),
        rows,
        local[-1],
        math.prod(local[:-1]),
        dtype=shape.precision,
        width=shape.width,
        times=number // shape.tensor,
    )


def _row_kernels(shape: MicrobatchShape) -> tuple[Kernel, ...]:
    """Return the passes over memory in which rows of experts are picked, weighted and summed."""
    # Picking, weighting and summing each read and write the rank's own rows.
    own_rows = shape.expert_rows * shape.model.hidden_size * shape.width
    summed = (3 * shape.model.experts_per_token + 1) * shape.stream
    return passes("rows of experts", 6 * own_rows + summed, 8 * own_rows + summed)


def embedding_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the ops of an embedding: rows that are looked up and summed, a norm if the model has one, and a projection
    if the rows are not as wide as the residual stream."""
    whole, shape = shape, shape.of_embedding
    model, stream = shape.model, shape.own_stream
    encoder = model if isinstance(model, BertModelConfig) else None
    types, unused = (encoder.token_types, encoder.first_position) if encoder else (0, 0)
    normalized = model.normalizes_embeddings
    tables = [table(model, "word.weight", model.vocabulary_size, padded=True)]
    if model.positions == "learned":
        tables.append(table(model, "position.weight", unused + model.max_positions, padded=False))
    if types:
        tables.append(table(model, "token_type.weight", types, padded=False))
    elements = shape.tokens * model.hidden_size
    masked = elements // shape.shards if model.embedding_dropout else 0
    # Sequence parallelism gathers the gradient of the word embeddings, and their scale changes it; other tables read
    # the gradient of the rank's shard of the sum. The table of positions reads the sum of this gradient over samples,
    # unless positions count from the starts of documents, which differ between samples.
    projected = whole is not shape
    changed = normalized or model.embedding_dropout > 0 or projected
    words_apart = shape.sequence_parallel or model.embedding_scale != 1
    words = "gradient of words" if changed or words_apart else OUTPUT_GRADIENT
    gradients = [Value(words, shape.stream)]
    summed = model.positions == "learned" and not shape.isolate_documents
    if words_apart and (types or (model.positions == "learned" and not summed)):
        gradients.append(Value("gradient of sum" if changed else OUTPUT_GRADIENT, stream))
    if summed:
        gradients.append(gradient("positions", stream // shape.micro_size))
    yield Op(
        "lookup",
        weights=tuple(tables),
        saves=(Value("embedding mask", masked * shape.stored_masks),),
        weight_needs=tuple(gradients),
        collectives=word_collectives(shape),
        kernels=partial(lookup_kernels, shape),
        uses=(KernelUse("dropout", model.hidden_size),) if model.embedding_dropout else (),
        peaks=partial(table_peaks, shape, tables),
    )
    if normalized:
        yield norm(shape, "norm", Value("sum", stream))._replace(kernels=tuple)
    if projected:
        yield _projection(whole)


def position_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the ops of a GPT's embedding after the lookup of words, for a table of words that all pipeline ranks
    shard: positions, dropout, and a norm if the model has one. The sum of looked-up words that arrives is kept until
    its gradient comes, unless it leaves unchanged."""
    model, stream = shape.model, shape.own_stream
    learned, normalized = model.positions == "learned", model.normalizes_embeddings
    changed = normalized or model.embedding_dropout > 0
    tables = [table(model, "position.weight", model.max_positions, padded=False)] if learned else []
    read = [gradient("positions", stream // shape.micro_size)]
    if shape.isolate_documents:
        read = [Value("gradient of sum" if changed else OUTPUT_GRADIENT, stream)]
    masked = stream // shape.width if model.embedding_dropout else 0
    # A norm keeps its input, which is the sum itself if nothing is added to it.
    name = "words" if learned or model.embedding_scale != 1 else "sum"
    arriving = Value(name, stream if learned or changed or model.embedding_scale != 1 else 0)
    yield Op(
        "positions",
        weights=tuple(tables),
        saves=(arriving, Value("embedding mask", masked * shape.stored_masks)),
        weight_needs=tuple(read if learned else ()),
        uses=(KernelUse("dropout", model.hidden_size),) if model.embedding_dropout else (),
        peaks=partial(table_peaks, shape, tables) if tables else tuple,
    )
    if normalized:
        yield norm(shape, "norm", Value("sum", stream))._replace(kernels=tuple)


def shared_word_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the op of a table of word embeddings that all pipeline ranks shard.

    shape: its tensor ranks are all ranks that shard the table. They sum what they look up, and get the gradient of the
    sum by a broadcast.
    """
    words = table(shape.model, "word.weight", shape.model.vocabulary_size, padded=True)
    elements = shape.tokens * shape.model.hidden_size
    yield Op(
        "lookup",
        weights=(words,),
        collectives=(
            Collective("pipeline+tensor", "all_reduce", elements, shape.width, 1),
            Collective("pipeline+tensor", "broadcast", elements, shape.width, 0, 1),
        ),
        kernels=partial(lookup_kernels, shape),
        peaks=partial(table_peaks, shape, [words]),
    )


def word_collectives(shape: MicrobatchShape) -> tuple[Collective, ...]:
    """Return the exchanges of word embeddings, whose rows tensor ranks shard."""
    hidden = shape.model.hidden_size
    return over_tensor_ranks(shape, hidden, all_reduce=(1,), reduce_scatter=(1,), all_gather=(0, 1))


def _projection(shape: MicrobatchShape) -> Op:
    """Return the linear layer from the embeddings to the residual stream. Every tensor rank does it whole."""
    model, narrow = shape.model, shape.of_embedding
    weight = matrix("projection.weight", (model.hidden_size, narrow.model.hidden_size), None, model.init_std)
    return linear_op(
        "projection",
        shape,
        (weight, vector("projection.bias", (model.hidden_size,), None, ZEROS)),
        Value("embeddings", narrow.own_stream),
        Value(OUTPUT_GRADIENT, shape.own_stream),
        rows=shape.tokens // shape.shards,
        peaks=partial(projection_peaks, shape, weight),
    )


def lookup_kernels(shape: MicrobatchShape) -> tuple[Kernel, ...]:
    stream = shape.own_stream
    moved = stream + stream // shape.width * 2 * FULL_BYTES
    return (
        Kernel("embedding", "forward", moved=3 * stream),
        Kernel("embedding, gradient of its table", "backward_weight", moved=moved),
    )
