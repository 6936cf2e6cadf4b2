"""The ops of GPT and BERT layers: blocks, embeddings and heads.

Letters as in Narayanan et al. (2021, arXiv 2104.04473, section 3.2): b samples of a micro-batch, s tokens of a sample,
h hidden size, t tensor ranks. The order of ops is the order of their parameters, which the flat buffers of a unit
keep; where a norm comes after a residual sum (post-norm BERT) it is not the order of execution. With dropout, layer
norm, GELU and the unfused path a block saves what Korthikanti et al. (2022, arXiv 2205.05198, section 4, table 2)
count, and the statistics of its norms, which they leave out.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.spec.dtypes import FULL_BYTES
from megapipe.spec.ops import (
    Collective,
    Flops,
    Kernel,
    MicrobatchShape,
    Op,
    Value,
    linear_flops,
    linear_kernels,
    passes,
)
from megapipe.spec.parameters import Init, ParameterSpec

ROUTER = "mlp.router.weight"
"""Path of the matrix that chooses a token's experts, in blocks that have some."""
INDEX_BYTES = 8
"""Bytes of the number of a token, a row or an expert."""
LOSS_STATISTICS = 3
"""Numbers per row by which tensor ranks find the softmax over all columns: maximum, sum, the label's logit."""
TOKEN_TYPES = 2
"""First and second part of a BERT's sample."""
SENTENCE_CLASSES = 2
"""The second part follows the first one in the text, or not."""
CAUSAL_SHARE = 0.5
"""Share of all pairs of tokens that a causal mask leaves and a fused kernel computes."""
ZEROS, ONES = Init("zeros"), Init("ones")


def is_gated(model: ModelConfig) -> bool:
    """Return whether the activation multiplies two halves of the first matrix's result."""
    return model.activation == "swiglu"


def block_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the ops of one block: attention and MLP, or experts, with their norms and residual sums."""
    model = shape.model
    post_norm = isinstance(model, BertModelConfig) and model.norm_position == "post"
    layer_input, after_attention, after_mlp = (
        Value(name, shape.own_stream) for name in ("input", "attention residual", "mlp residual")
    )
    # Each norm's input, and its result, which the following matrix product reads.
    first_input, second_input = (after_attention, after_mlp) if post_norm else (layer_input, after_attention)
    first, second = (
        Value(name, shape.own_stream, "norms", (source,))
        for name, source in (("attention norm", first_input), ("mlp norm", second_input))
    )
    yield norm(shape, "attention_norm", first_input)
    yield from attention(shape, layer_input if post_norm else first)
    yield residual(shape, "attention residual")
    yield norm(shape, "mlp_norm", second_input)
    yield from (mlp if model.num_experts is None else experts)(shape, first if post_norm else second)
    yield residual(shape, "mlp residual")


def norm(shape: MicrobatchShape, path: str, source: Value, *, kernels: bool = True) -> Op:
    """Return a norm of the residual stream. Its kernel reads and writes the stream once; the backward reads the input
    and two gradients and writes one."""
    model, stream = shape.model, shape.own_stream
    statistics = Value(f"{path} statistics", shape.statistics(shape.tokens // shape.shards))
    again = path != "norm" and "norms" in shape.recompute
    return Op(
        path,
        weights=norm_weights(model, path),
        saves=(source, statistics),
        weight_needs=(source, statistics, _gradient(path, stream)),
        kernels=passes(path, 2 * stream, 4 * stream, again=again) if kernels else (),
        uses=((model.normalization, model.hidden_size),),
    )


def residual(shape: MicrobatchShape, name: str) -> Op:
    """Return a residual sum with its dropout: one kernel that reads two tensors and writes one."""
    elements = shape.own_stream // shape.width if shape.model.hidden_dropout else 0
    return Op(
        name,
        saves=(Value(f"{name} mask", elements * shape.stored_masks),),
        kernels=passes(name, 3 * shape.own_stream, 2 * shape.own_stream, mask=elements),
        uses=(("bias_dropout_residual", shape.model.hidden_size),) if elements else (),
    )


def attention(shape: MicrobatchShape, source: Value) -> Iterator[Op]:
    """Yield the projections and what is between them.

    qkv has, per kv group, the group's query heads, then its key, then its value. An attention of context ranks is a
    ring (keys and values go round, in the backward with their gradients in fp32), or exchanges heads for tokens.
    """
    model, tensor = shape.model, shape.tensor
    hidden, head_dim = model.hidden_size, model.head_dim
    rows = (model.kv_heads, model.num_heads // model.kv_heads + 2, head_dim)
    qkv = matrix("attention.qkv.weight", (*rows, hidden), 0, model.init_std)
    bias = (vector("attention.qkv.bias", rows, 0, ZEROS),) if model.bias != "none" else ()
    projected = qkv.num_elements // hidden
    yield Op(
        "qkv",
        weights=(qkv, *bias),
        saves=(source,),
        weight_needs=(source, _gradient("qkv", shape.tokens * projected * shape.width // tensor)),
        flops=linear_flops(_all_tokens(shape), qkv.num_elements),
        collectives=(*_entering(shape, shape.sequence_chunks), *_gathered_again(shape), *_scales(shape)),
        kernels=_linear(shape, qkv, shape.tokens),
    )
    core, result = _heads(shape)
    yield core
    output = matrix("attention.output.weight", (hidden, model.num_heads * head_dim), 1, _residual_std(model))
    mixed = shape.tokens * model.num_heads * head_dim * shape.width // tensor
    yield Op(
        "output",
        weights=(output, *_bias(model, "attention.output.bias", (hidden,), None)),
        saves=(result,),
        weight_needs=(Value("attention result", mixed), _gradient("attention output", shape.own_stream)),
        flops=linear_flops(_all_tokens(shape), output.num_elements),
        collectives=_scales(shape),
        kernels=_linear(shape, output, shape.tokens),
    )


def _heads(shape: MicrobatchShape) -> tuple[Op, Value]:
    """Return attention itself, and what the output projection reads."""
    model, tensor, width = shape.model, shape.tensor, shape.width
    head_dim, heads, keys = model.head_dim, model.num_heads // tensor, model.kv_heads // tensor
    changed = model.qk_norm or model.positions == "rotary"
    saves, collectives = list(_masks(shape)), []
    if model.qk_norm:
        saves.append(Value("head norm statistics", shape.tokens * (heads + keys) * FULL_BYTES))
        if tensor > 1 and not shape.sequence_parallel:  # of two weights that every rank applies to its own heads
            collectives.append(Collective("tensor", "all_reduce", head_dim, width, 0, 2))
    exchanged = shape.context > 1 and shape.context_attention == "all_to_all"
    if exchanged:
        copied = model.kv_heads // tensor * kv_copies(keys, model.num_heads // model.kv_heads, shape.context)
        own = shape.micro_size, shape.sequence_length, heads // shape.context, copied // shape.context
        result = Value("attention result", shape.tokens * heads * head_dim * width)
        # Heads arrive rotated and normalised, so that attention itself is that of a model without either.
        saves += _attended(shape, *own, changed=False, keeps_projected=False)
        if model.qk_norm:
            saves.append(Value("heads before their norms", shape.tokens * (heads + 2 * keys) * head_dim * width))
        if shape.attention == "sdpa":  # its backward reads the result as it was before the exchange
            saves.append(Value("result of whole samples", result.bytes))
        for count in (heads + 2 * copied, heads):
            collectives.append(Collective("context", "all_to_all", shape.tokens * count * head_dim, width, 1, 1))
    else:
        result = Value("attention result", shape.tokens * heads * head_dim * width)
        saves += _attended(
            shape, shape.micro_size, shape.local_length, heads, keys, changed=changed, keeps_projected=model.qk_norm
        )
        if shape.context > 1:
            hops, block = shape.context - 1, 2 * shape.tokens * keys * head_dim
            collectives.append(Collective("context", "send", block, width, hops, hops))
            collectives.append(Collective("context", "send", block, FULL_BYTES, 0, hops))
    pairs = 4 * shape.micro_size * model.num_heads * shape.sequence_length * _seen_keys(shape) * head_dim
    norms = ("query_norm", "key_norm") if model.qk_norm else ()
    return Op(
        "attention",
        weights=tuple(vector(f"attention.{name}.weight", (head_dim,), None, ONES) for name in norms),
        saves=tuple(saves),
        # Attention's two products have no weights: their backward is four products, all in the input half (Qi et al.
        # 2023, arXiv 2401.10241, table 1).
        flops=Flops(pairs, 2 * pairs),
        collectives=tuple(collectives),
        kernels=(*_head_kernels(shape), *_attention_kernels(shape)),
        uses=_attention_uses(shape),
    ), result


def _attended(
    shape: MicrobatchShape,
    micro_size: int,
    length: int,
    heads: int,
    keys: int,
    *,
    changed: bool,
    keeps_projected: bool,
) -> list[Value]:
    """Return what attention of these local heads saves besides its result: query, key and value, as projected (all
    three in one tensor) and as multiplied where that differs, and log-sums, or the weights of the unfused path.

    Bringing rows together copies them: the unfused path does so by kv head, unless there is one sample or one such
    head; grouped queries come out of their groups.
    """
    model, unfused = shape.model, _is_unfused(shape)
    query, key = (micro_size * length * count * model.head_dim for count in (heads, keys))
    keys_copied = unfused and micro_size > 1 and keys > 1
    queries_copied = keys_copied or (heads > keys and (unfused or keys > 1))
    if shape.repeats_keys:
        projected = 0 if (changed or keys > 1) and not keeps_projected else query + 2 * key
        elements = projected + query * (changed or queries_copied) + 2 * query
    else:
        projected = query + 2 * key if keeps_projected or not keys_copied else 0
        moved = query * (changed or queries_copied) + key * (changed or keys_copied) + key * keys_copied
        elements = projected + moved
    product = Value("query, key and value", elements * shape.width)
    rows = micro_size * length * heads
    if not unfused:
        return [product, Value("attention log-sums", rows * FULL_BYTES)]
    weights, dropped = rows * length, bool(model.attention_dropout)
    size = weights * shape.width * (1 + dropped) + weights * dropped * shape.stored_masks
    return [product, Value("attention weights", size, "attention", (product,))]


def _is_unfused(shape: MicrobatchShape) -> bool:
    """Return whether attention computes its weights as a tensor; a ring is always fused."""
    ring = shape.context > 1 and shape.context_attention == "ring"
    return shape.attention == "unfused" and not ring


def _masks(shape: MicrobatchShape) -> Iterator[Value]:
    """Yield what attention saves to leave tokens out: of other documents, or padding.

    Positions within documents differ from sample to sample, so the rotary tables, two for queries and two for keys,
    are the micro-batch's own. A ring recomputes its masks.
    """
    model, width = shape.model, shape.width
    ring = shape.context > 1 and shape.context_attention == "ring"
    if shape.isolate_documents:
        if model.positions == "rotary":
            yield Value("rotary tables", 4 * shape.tokens * model.head_dim // 2 * FULL_BYTES)
        if not shape.document_blocks and not ring:
            pairs = shape.micro_size * shape.sequence_length**2
            unfused = shape.attention == "unfused"
            yield Value("mask", pairs * (1 if unfused else width), "attention" if unfused else None)
    if isinstance(model, BertModelConfig) and shape.attention == "sdpa" and not ring:
        yield Value("padding mask", shape.micro_size * shape.sequence_length * width)


def mlp(shape: MicrobatchShape, source: Value) -> Iterator[Op]:
    """Yield the ops of an MLP. Under swiglu axis 0 of `up` is (gate, up)."""
    model, hidden, ffn = shape.model, shape.model.hidden_size, shape.model.ffn_size
    gate = 1 + is_gated(model)
    rows, axis = ((2, ffn), 1) if is_gated(model) else ((ffn,), 0)
    up = matrix("mlp.up.weight", (*rows, hidden), axis, model.init_std)
    down = matrix("mlp.down.weight", (hidden, ffn), 1, _residual_std(model))
    inner = shape.tokens * ffn * shape.width // shape.tensor
    outer = Value("up", inner * gate)
    activated = Value("activation", inner, "mlp", (outer,))
    yield Op(
        "up",
        weights=(up, *_bias(model, "mlp.up.bias", rows, axis)),
        saves=(source,),
        weight_needs=(source, _gradient("up", outer.bytes)),
        flops=linear_flops(_all_tokens(shape), up.num_elements),
        collectives=(*_entering(shape, shape.sequence_chunks), *_gathered_again(shape), *_scales(shape)),
        kernels=_linear(shape, up, shape.tokens),
    )
    biased = "bias_gelu" if model.bias == "all" else "gelu"
    yield _activation(shape, outer, inner, (biased, ffn // shape.tensor))
    yield Op(
        "down",
        weights=(down, *_bias(model, "mlp.down.bias", (hidden,), None)),
        saves=(activated,),
        weight_needs=(activated, _gradient("down", shape.own_stream)),
        flops=linear_flops(_all_tokens(shape), down.num_elements),
        collectives=_scales(shape),
        kernels=_linear(shape, down, shape.tokens),
    )


def _activation(shape: MicrobatchShape, source: Value, inner: int, gelu: tuple[str, int]) -> Op:
    """Return the activation with its bias: one kernel. inner: bytes of its result. gelu: its use where not gated."""
    inputs = 1 + is_gated(shape.model)
    return Op(
        "activation",
        saves=(source,),
        kernels=passes("activation", (inputs + 1) * inner, (2 * inputs + 1) * inner, again="mlp" in shape.recompute),
        uses=(("swiglu", 2 * gelu[1]) if is_gated(shape.model) else gelu,),
    )


def experts(shape: MicrobatchShape, source: Value) -> Iterator[Op]:
    """Yield the ops of a mixture of experts whose tensor ranks each hold some experts whole.

    Every rank picks the rows of its own experts from all tokens. Which experts tokens choose the data decides; counted
    are rows that are spread evenly, k tokens' rows over t ranks. A rank whose experts are chosen more often keeps more
    and computes longer by the same ratio. Under swiglu axis 1 of `up` is (gate, up).
    """
    model, hidden, ffn = shape.model, shape.model.hidden_size, shape.model.ffn_size
    number, gate = model.num_experts or 1, 1 + is_gated(model)
    inner_shape = (number, 2, ffn) if is_gated(model) else (number, ffn)
    router = matrix(ROUTER, (number, hidden), None, model.init_std)
    up = matrix("mlp.up.weight", (*inner_shape, hidden), 0, model.init_std)
    down = matrix("mlp.down.weight", (number, hidden, ffn), 0, _residual_std(model))
    balance = replace(vector("mlp.router.bias", (number,), None, ZEROS), balance_rate=model.expert_balance_rate)
    rows, choices, width = shape.expert_rows, shape.tokens * model.experts_per_token, shape.width
    scores = Value("scores", shape.tokens * number * FULL_BYTES // shape.shards)
    chosen = choices * ((FULL_BYTES if model.normalize_expert_shares else 0) + INDEX_BYTES) // shape.shards
    picked, outer = Value("picked rows", rows * hidden * width), Value("up", rows * ffn * gate * width)
    activated = Value("activation", rows * ffn * width, "mlp", (outer,))
    yield Op(
        "router",
        weights=(router,),
        saves=(source, scores, Value("chosen experts", chosen)),
        weight_needs=(source, _gradient("scores", scores.bytes)),
        flops=linear_flops(_all_tokens(shape), router.num_elements),
        collectives=(*_entering(shape, 1), *_choice_collectives(shape, choices)),
        kernels=linear_kernels("mlp.router", shape.tokens // shape.shards, hidden, number, dtype="fp32", width=width),
    )
    yield Op(
        "dispatch",
        saves=(
            Value("tokens of rows", rows * INDEX_BYTES),
            Value("numbers of rows", choices * INDEX_BYTES),
        ),
        kernels=_row_kernels(shape),
    )
    yield Op(
        "up",
        weights=(up,),
        saves=(picked,),
        weight_needs=(picked, _gradient("up", outer.bytes)),
        flops=_expert_flops(shape, up),
        kernels=_expert_products(shape, up),
    )
    yield _activation(shape, outer, choices * ffn * width // shape.tensor, ("gelu", ffn))
    yield Op(
        "down",
        weights=(
            down,
            *_bias(model, "mlp.up.bias", inner_shape, 0),
            *_bias(model, "mlp.down.bias", (number, hidden), 0),
            *((balance,) if model.balances_experts else ()),
        ),
        saves=(activated,),
        weight_needs=(activated, _gradient("down", picked.bytes)),
        flops=_expert_flops(shape, down),
        kernels=_expert_products(shape, down),
    )
    yield Op("combine", saves=(Value("results of rows", picked.bytes), Value("weights of rows", rows * width)))


def _choice_collectives(shape: MicrobatchShape, choices: int) -> tuple[Collective, ...]:
    """Return the exchanges of what tokens chose, and of gradients of shares, each from the rank of its expert."""
    if shape.tensor == 1:
        return ()
    if not shape.sequence_parallel:
        return (Collective("tensor", "all_reduce", choices, FULL_BYTES, 0, 1),)
    return (
        Collective("tensor", "all_gather", choices, FULL_BYTES, 1),
        Collective("tensor", "all_gather", choices, INDEX_BYTES, 1),
        Collective("tensor", "reduce_scatter", choices, FULL_BYTES, 0, 1),
    )


def _expert_flops(shape: MicrobatchShape, spec: ParameterSpec) -> Flops:
    model = shape.model
    used = spec.num_elements // (model.num_experts or 1) * model.experts_per_token
    return linear_flops(_all_tokens(shape), used)


def _expert_products(shape: MicrobatchShape, spec: ParameterSpec) -> tuple[Kernel, ...]:
    """Return the products of one expert after the other, each with an even share of the rows."""
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
    """Return the passes over memory in which rows of experts are picked, weighed and put together."""
    row = shape.model.hidden_size * shape.width
    own, all_rows = shape.expert_rows * row, shape.tokens * shape.model.experts_per_token * row
    picked, summed = 2 * own, 2 * own + 3 * all_rows + shape.tokens * row
    return passes("rows of experts", picked + 2 * own + summed, picked + 4 * own + summed)


def embedding_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the ops of an embedding: rows that are looked up and summed, and a norm in post-norm BERTs."""
    model, stream = shape.model, shape.own_stream
    bert = isinstance(model, BertModelConfig)
    post_norm = isinstance(model, BertModelConfig) and model.norm_position == "post"
    tables = [table(model, "word.weight", model.vocabulary_size, padded=True)]
    if model.positions == "learned":
        tables.append(table(model, "position.weight", model.max_positions, padded=False))
    if bert:
        tables.append(table(model, "token_type.weight", TOKEN_TYPES, padded=False))
    elements, collectives = shape.tokens * model.hidden_size, tuple[Collective, ...]()
    if shape.tensor > 1 and shape.sequence_parallel:
        collectives = (
            Collective("tensor", "reduce_scatter", elements, shape.width, 1),
            Collective("tensor", "all_gather", elements, shape.width, 0, 1),
        )
    elif shape.tensor > 1:
        collectives = (Collective("tensor", "all_reduce", elements, shape.width, 1),)
    masked = elements // shape.shards if model.embedding_dropout else 0
    # Sequence parallelism gathers the gradient of the word embeddings; other tables keep that of their shard.
    own = shape.sequence_parallel and (len(tables) > 1 or post_norm)
    moved = stream + stream // shape.width * 2 * FULL_BYTES
    yield Op(
        "lookup",
        weights=tuple(tables),
        saves=(
            Value("rows of other ranks", shape.tokens if shape.tensor > 1 else 0),
            Value("embedding mask", masked * shape.stored_masks),
        ),
        weight_needs=(_gradient("words", shape.stream), *([_gradient("sum", stream)] if own else [])),
        collectives=collectives,
        kernels=(
            Kernel("embedding", "forward", moved=3 * stream),
            Kernel("embedding, gradient of its table", "backward_weight", moved=moved),
        ),
        uses=(("dropout", model.hidden_size),) if model.embedding_dropout else (),
    )
    if post_norm:
        yield norm(shape, "norm", Value("sum", stream), kernels=False)


def gpt_head_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the ops of a GPT's head: the last norm, and the output matrix with its loss."""
    model, tokens, tensor = shape.model, shape.tokens, shape.tensor
    normalised = Value("head norm", shape.own_stream)
    yield norm(shape, "norm", Value("input", shape.own_stream))
    collectives = _loss_collectives(shape, tokens)
    elements = tokens * model.hidden_size
    if tensor > 1 and shape.sequence_parallel:
        collectives += (
            Collective("tensor", "all_gather", elements, shape.width, 1, 1),
            Collective("tensor", "reduce_scatter", elements, shape.width, 0, 1),
        )
    elif tensor > 1:
        collectives += (Collective("tensor", "all_reduce", elements, shape.width, 0, 1),)
    logits = Value("gradient of logits", tokens * _columns(shape) * shape.width)
    yield Op(
        "output",
        weights=_output_weights(shape),
        saves=(normalised, Value("log-sums", tokens * FULL_BYTES) if shape.recompute_logits else logits),
        weight_needs=(normalised, logits),
        flops=linear_flops(_all_tokens(shape), _output_elements(model), shape.recompute_logits),
        collectives=collectives,
        kernels=_output_kernels(shape),
        uses=(("linear_cross_entropy", model.hidden_size),),
    )


def bert_head_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the ops of a BERT's heads: masked tokens' `transform` and `output`, sentences' `pooler` and `sentence`.

    Under sequence parallelism every rank does the same from the gathered tokens on, and keeps its own gradient.
    """
    model = shape.model
    assert isinstance(model, BertModelConfig)
    hidden, rows, tensor, width = model.hidden_size, shape.rows, shape.tensor, shape.width
    every_row = shape.micro_size * (shape.sequence_length if shape.predictions is None else shape.predictions)
    states = Value("hidden states", shape.stream)
    if model.norm_position == "pre":
        yield norm(shape, "norm", Value("input", shape.own_stream))
    wide = rows * hidden * width
    picked, transformed, activated, normalised = (
        Value(name, wide) for name in ("picked tokens", "transform", "gelu", "transform norm")
    )
    statistics = Value("transform statistics", shape.statistics(rows))
    yield Op("pick", saves=(states, Value("log-sums", rows * FULL_BYTES)))
    transform = matrix("transform.weight", (hidden, hidden), None, model.init_std)
    yield Op(
        "transform",
        weights=(transform, vector("transform.bias", (hidden,), None, ZEROS)),
        gathered=True,
        saves=(picked,),
        weight_needs=(picked, _gradient("transform", wide)),
        flops=linear_flops(every_row, transform.num_elements),
        kernels=_linear(shape, transform, rows),
    )
    yield Op("gelu", saves=(transformed,), uses=(("gelu", hidden),))
    yield Op(
        "transform_norm",
        weights=norm_weights(model, "transform_norm"),
        gathered=True,
        saves=(activated, statistics),
        weight_needs=(activated, statistics, _gradient("transform norm", wide)),
    )
    collectives = _loss_collectives(shape, rows)
    if tensor > 1:
        collectives += (Collective("tensor", "all_reduce", rows * hidden, width, 0, 1),)
        if shape.sequence_parallel:
            collectives += (Collective("tensor", "all_gather", shape.tokens * hidden, width, 1),)
    columns = _columns(shape)
    bias = replace(vector("output.bias", (model.vocabulary_size,), 0, ZEROS), padded=True)
    logits = 0 if shape.recompute_logits else rows * min(columns, model.vocabulary_size) * width
    share = -(-model.vocabulary_size // tensor)
    loss = ("linear_cross_entropy", hidden) if shape.recompute_logits else ("cross_entropy", share)
    yield Op(
        "output",
        weights=(bias, *_output_weights(shape)),
        gathered=True,
        saves=(normalised, Value("logits", logits)),
        weight_needs=(normalised, _gradient("logits", rows * columns * width)),
        flops=linear_flops(every_row, _output_elements(model), shape.recompute_logits),
        collectives=collectives,
        kernels=_output_kernels(shape),
        uses=(loss,),
    )
    if model.sentence_head:
        yield from _sentence_ops(shape, states)


def _sentence_ops(shape: MicrobatchShape, states: Value) -> Iterator[Op]:
    """Yield the pooler of first tokens and the classifier of sentence pairs."""
    model, micro, width = shape.model, shape.micro_size, shape.width
    pooled = micro * model.hidden_size * width
    # The first token of one sample is a view of its hidden states.
    first, pooled_tanh = states if micro == 1 else Value("first tokens", pooled), Value("pooled", pooled)
    pooler = matrix("pooler.weight", (model.hidden_size, model.hidden_size), None, model.init_std)
    sentence = matrix("sentence.weight", (SENTENCE_CLASSES, model.hidden_size), None, model.init_std)
    scores = micro * SENTENCE_CLASSES
    loss = Value("pair loss", (scores + 1) * FULL_BYTES)
    for spec, source, gradient, saves in (
        (pooler, first, _gradient("pooler", pooled), ()),
        (sentence, pooled_tanh, _gradient("sentence", scores * width), (loss,)),
    ):
        path = spec.name.removesuffix(".weight")
        yield Op(
            path,
            weights=(spec, vector(f"{path}.bias", spec.shape[:1], None, ZEROS)),
            gathered=True,
            saves=(source, *saves),
            weight_needs=(source, gradient),
            flops=linear_flops(micro, spec.num_elements),
            kernels=_linear(shape, spec, micro),
        )


def norm_weights(model: ModelConfig, path: str) -> tuple[ParameterSpec, ...]:
    """Return the weight and, for layer norm, the bias of the norm at `path`."""
    weight = vector(f"{path}.weight", (model.hidden_size,), None, ONES)
    if model.normalization != "layer_norm":
        return (weight,)
    return weight, vector(f"{path}.bias", (model.hidden_size,), None, ZEROS)


def table(model: ModelConfig, path: str, rows: int, *, padded: bool) -> ParameterSpec:
    """Return a lookup table or the output projection: decayed, yet no matrix for optimizers that orthogonalise
    matrices."""
    axis = 0 if padded else None
    init = Init("normal", model.init_std)
    return ParameterSpec(path, (rows, model.hidden_size), axis, init, decay=True, matrix=False, padded=padded)


def matrix(path: str, shape: tuple[int, ...], axis: int | None, std: float) -> ParameterSpec:
    """Return a matrix of a linear layer. axis: the one that tensor ranks shard."""
    return ParameterSpec(path, shape, axis, Init("normal", std), decay=True, matrix=True)


def vector(path: str, shape: tuple[int, ...], axis: int | None, init: Init) -> ParameterSpec:
    """Return a bias or a norm's weight: never decayed."""
    return ParameterSpec(path, shape, axis, init, decay=False, matrix=False)


def kv_copies(kv_heads: int, heads_each: int, context_size: int) -> int:
    """Return how often all_to_all sends each key and value head of a tensor rank: once if they divide over the ranks.

    heads_each: query heads of a key head; with copies, each stands for a part of them.
    Raises ValueError if the query heads do not divide either.
    """
    if kv_heads * heads_each % context_size:
        raise ValueError(
            f"{kv_heads * heads_each} query heads cannot be divided evenly over {context_size} context ranks"
        )
    return next(n for n in range(1, heads_each + 1) if heads_each % n == 0 and kv_heads * n % context_size == 0)


def _residual_std(model: ModelConfig) -> float:
    """Matrices that write to the residual stream start smaller (GPT-2 report, section 2.3)."""
    return model.init_std / math.sqrt(2 * model.num_layers) if model.scale_residual_init else model.init_std


def _bias(model: ModelConfig, path: str, shape: tuple[int, ...], axis: int | None) -> tuple[ParameterSpec, ...]:
    return (vector(path, shape, axis, ZEROS),) if model.bias == "all" else ()


def _gradient(name: str, size: int) -> Value:
    return Value(f"gradient of {name}", size)


def _all_tokens(shape: MicrobatchShape) -> int:
    """Tokens of the micro-batch over all context ranks."""
    return shape.micro_size * shape.sequence_length


def _seen_keys(shape: MicrobatchShape) -> int:
    window, length = shape.model.sliding_window, shape.sequence_length
    return length if window is None else min(window, length)


def _entering(shape: MicrobatchShape, chunks: int) -> tuple[Collective, ...]:
    """Return the exchanges around a pair of matrices: before the one whose rows and after the one whose columns the
    tensor ranks shard. Each sends the residual stream: 8 b s h (t - 1) / t elements a block (section 3.2)."""
    elements = shape.tokens * shape.model.hidden_size
    if shape.tensor == 1:
        return ()
    if not shape.sequence_parallel:
        return (Collective("tensor", "all_reduce", elements, shape.width, 1, 1),)
    return (
        Collective("tensor", "all_gather", elements // chunks, shape.width, chunks, chunks),
        Collective("tensor", "reduce_scatter", elements // chunks, shape.width, chunks, chunks),
    )


def _gathered_again(shape: MicrobatchShape) -> tuple[Collective, ...]:
    """Return the gather of a product's input for its weight's gradient (Korthikanti et al. 2022, arXiv 2205.05198,
    section 4.2.2). The weight half of a split backward gathers the gradient of the sum a second time too."""
    if shape.tensor == 1 or not shape.sequence_parallel:
        return ()
    return (Collective("tensor", "all_gather", shape.tokens * shape.model.hidden_size, shape.width, 0, 1, 0, 2),)


def _scales(shape: MicrobatchShape) -> tuple[Collective, ...]:
    """Return the exchange of the largest magnitudes of both operands of a matrix product in fp8, forward and for the
    gradients of input and weight."""
    if not shape.tensorwise_fp8 or shape.tensor == 1:
        return ()
    chunks = shape.sequence_chunks if shape.sequence_parallel else 1
    return (Collective("tensor", "all_reduce", 2, FULL_BYTES, chunks, chunks + 1, chunks, 1),)


def _loss_collectives(shape: MicrobatchShape, rows: int) -> tuple[Collective, ...]:
    if shape.tensor == 1:
        return ()
    return (Collective("tensor", "all_gather", shape.tensor * LOSS_STATISTICS * rows, FULL_BYTES, 1),)


def _output_weights(shape: MicrobatchShape) -> tuple[ParameterSpec, ...]:
    """Return the output matrix, unless it is the embedding's."""
    model = shape.model
    return () if model.tie_embeddings else (table(model, "output.weight", model.vocabulary_size, padded=True),)


def _output_elements(model: ModelConfig) -> int:
    return model.vocabulary_size * model.hidden_size


def _columns(shape: MicrobatchShape) -> int:
    """Columns of the logits on this rank, padding included."""
    weight = table(shape.model, "output.weight", shape.model.vocabulary_size, padded=True)
    return weight.local_shape(shape.tensor, shape.alignment)[0]


def _output_kernels(shape: MicrobatchShape) -> tuple[Kernel, ...]:
    """Return the output matrix's products and the loss, which reads its logits twice, for the sum and for the gradient
    that it leaves in their place."""
    rows, columns, again = shape.rows, _columns(shape), shape.recompute_logits
    return (
        *linear_kernels(
            "output",
            rows,
            shape.model.hidden_size,
            columns,
            dtype=shape.precision,
            width=shape.width,
            again=again,
        ),
        *passes("loss", 3 * rows * columns * shape.width, 0.0, again=again),
    )


def _linear(shape: MicrobatchShape, spec: ParameterSpec, rows: int) -> tuple[Kernel, ...]:
    local = spec.local_shape(shape.tensor, shape.alignment)
    return linear_kernels(
        spec.name.removesuffix(".weight"),
        rows,
        local[-1],
        math.prod(local[:-1]),
        dtype="fp8" if shape.fp8 else shape.precision,
        width=shape.width,
    )


def _head_kernels(shape: MicrobatchShape) -> tuple[Kernel, ...]:
    """Return the passes that rotate and normalise heads."""
    model = shape.model
    kinds = (model.positions == "rotary") + model.qk_norm
    query = shape.tokens * (model.num_heads // shape.tensor) * model.head_dim * shape.width
    moved = 2 * (query + query * model.kv_heads // model.num_heads) * kinds
    return passes("rotation and norms of heads", moved, moved) if kinds else ()


def _attention_kernels(shape: MicrobatchShape) -> Iterator[Kernel]:
    """Yield one fused kernel, or scores, softmax, dropout and the weighted sum of values, each by itself."""
    model, length, keys = shape.model, shape.local_length, _seen_keys(shape)
    batch = shape.micro_size * (model.num_heads // shape.tensor)
    scores = Kernel("attention scores", "forward", (length, model.head_dim, keys, batch), dtype=shape.precision)
    if shape.attention == "unfused" and shape.context == 1:
        again = "attention" in shape.recompute
        mixed = scores._replace(name="attention values", product=(length, keys, model.head_dim, batch))
        for kernel in (scores, mixed):
            yield kernel
            if again and kernel is scores:
                yield kernel._replace(phase="recompute")
            yield kernel._replace(phase="backward_input", times=2.0)
        weights = batch * length * keys
        yield from passes("softmax", 2 * weights * shape.width, 3 * weights * shape.width, again=again)
        if model.attention_dropout:
            moved = 2 * weights * shape.width
            yield from passes("attention dropout", moved, moved, again=again, mask=weights)
        return
    causal = not isinstance(model, BertModelConfig) and keys == shape.sequence_length
    share = CAUSAL_SHARE if causal else 1.0
    query = shape.tokens * (model.num_heads // shape.tensor) * model.head_dim * shape.width
    moved = 2 * query + 2 * (query * model.kv_heads // model.num_heads)
    # Dao 2023, arXiv 2307.08691, section 2.3: two products forward, five backward, one of them the scores again.
    fused = scores._replace(name="fused attention", moved=moved, compute=2 * share)
    yield fused
    yield fused._replace(phase="backward_input", moved=2 * moved, compute=5 * share)


def _attention_uses(shape: MicrobatchShape) -> tuple[tuple[str, int], ...]:
    model, uses = shape.model, list[tuple[str, int]]()
    if model.qk_norm:
        uses.append(("rms_norm", model.head_dim))
    if model.positions == "rotary":
        uses.append(("rotary", model.head_dim))
    if _is_unfused(shape) and not isinstance(model, BertModelConfig):
        uses.append(("attention_probabilities", model.head_dim))
    if model.attention_dropout:
        uses.append(("dropout", shape.sequence_length))
    return tuple(uses)
