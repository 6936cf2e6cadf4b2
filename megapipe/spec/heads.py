"""The ops of the heads of GPTs, with the prediction of further tokens, and of BERTs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from megapipe.config.bert import BertModelConfig
from megapipe.spec.linear import (
    ZEROS,
    all_tokens,
    chunk_rows,
    gradient,
    linear_op,
    matrix,
    norm_weights,
    over_tensor_ranks,
    table,
    vector,
)
from megapipe.spec.ops import (
    FULL_BYTES,
    Collective,
    GroupName,
    Kernel,
    KernelPhase,
    KernelUse,
    MicrobatchShape,
    Op,
    Peaks,
    Value,
    linear_flops,
    linear_kernels,
    passes,
    saved_bytes,
)
from megapipe.spec.parameters import ParameterSpec
from megapipe.spec.peaks import output_peaks, table_peaks
from megapipe.spec.transformer import INDEX_BYTES, block_ops, lookup_kernels, norm, word_collectives

LOSS_STATISTICS = 3
"""Numbers per row from which tensor ranks compute the softmax over all columns: maximum, sum, the label's logit."""
SENTENCE_CLASSES = 2
"""Classes of a sentence pair: the second part follows the first one in the text, or not."""


def gpt_head_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the ops of a GPT's head: the last norm, and the output matrix with its loss; then the ops of the blocks
    that predict further tokens."""
    normalised = Value("head norm", shape.own_stream)
    yield norm(shape, "norm", Value("input", shape.own_stream))
    terms = 1 + bool(shape.model.mtp_layers)
    yield _output(shape, normalised, Value("scale of the loss", FULL_BYTES * terms))
    scaled = shape.model.logit_scale != 1
    hidden = normalised._replace(name="unscaled head norm") if scaled else normalised
    for depth in range(shape.model.mtp_layers):
        yield from _prediction_ops(shape, depth, hidden)
        hidden = hidden._replace(name=f"mtp.{depth}.{'unscaled norm' if scaled else 'normalised'}")


def _prediction_ops(shape: MicrobatchShape, depth: int, hidden: Value) -> Iterator[Op]:
    """Yield the ops of one depth of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2). Embedding and
    output matrix are those of the model. hidden: normalised hidden states of the previous depth."""
    prefix = f"mtp.{depth}."
    model, stream, size = shape.model, shape.own_stream, shape.model.hidden_size
    words = table(model, "word.weight", model.vocabulary_size, padded=True)
    projection = matrix("projection.weight", (size, 2 * size), None, model.init_std)
    joined, normalised = Value("joined", 2 * stream), Value("normalised", stream)
    # The first depth reads the micro-batch's own labels as tokens; other labels are copies, each shifted by one more.
    tokens, labels = (
        Value(f"labels shifted by {n}", shape.tokens * INDEX_BYTES * (n > 0)) for n in (depth, depth + 1)
    )
    lookup = Op(
        "lookup",
        saves=(tokens,),
        weight_needs=(tokens, gradient("words", shape.stream)),
        collectives=word_collectives(shape),
        kernels=partial(lookup_kernels, shape),
        peaks=partial(table_peaks, shape, (words,)),
    )
    # The gradients of both norms' results are views of one tensor, which has the two side by side.
    norms = (
        each._replace(weight_needs=(*each.weight_needs[:-1], gradient("joined", joined.bytes)))
        for each in (
            norm(shape, "embedding_norm", Value("embeddings", stream)),
            norm(shape, "hidden_norm", hidden),
        )
    )
    rows = shape.tokens // shape.shards
    plain, grad_output = replace(shape, fp8=False), gradient("projection", stream)
    join = linear_op("projection", plain, (projection,), joined, grad_output, rows=rows)
    block = [each._replace(weights=_with_prefix("block.", each)) for each in block_ops(shape)]
    scale = Value("scale of further losses", FULL_BYTES)
    output = _output(shape, normalised, scale)
    weights = Value("weights of tokens", shape.tokens * FULL_BYTES)
    kept = (*output.saves, weights, *((labels,) if shape.recompute_logits else ()))
    output = output._replace(saves=kept, weight_needs=(*output.weight_needs, weights), weights=())
    last = norm(shape, "norm", Value("output", stream))
    # When the block's backward starts, the tensors of the last ops have been freed, and its output's gradient exists.
    freed = sum(value.bytes for value in output.saves if value != normalised)
    more = stream - freed
    if "block" in shape.recompute:
        more += saved_bytes(block) - stream
        block = [_rerun(each, Value("input", stream)) for each in block]
    block = [each._replace(peaks=partial(_held_more, each, more)) for each in block]
    for op in (lookup, *norms, join, *block, last, output):
        yield _renamed(op, prefix, (hidden, scale, tokens, labels))


def _held_more(op: Op, more: int) -> Peaks:
    """Return an op's peaks plus `more` bytes: those held before the op's backward but not before its layer's
    backward."""
    return tuple(each._replace(bytes=each.bytes + more) for each in op.peaks())


def _rerun(op: Op, source: Value) -> Op:
    """Return an op of a block that the backward reruns. source: the block's input, which is saved."""
    return op._replace(
        saves=tuple(each._replace(part="block", sources=(source,)) for each in op.saves),
        flops=op.flops._replace(recomputed=op.flops.forward),
        collectives=tuple(
            each._replace(
                backward=each.backward + each.forward,
                input_half=(each.backward if each.input_half is None else each.input_half) + each.forward,
            )
            for each in op.collectives
        ),
        kernels=partial(_kernels_and_reruns, op),
        uses=tuple(use._replace(part="block") for use in op.uses),
    )


def _kernels_and_reruns(op: Op) -> tuple[Kernel, ...]:
    kernels = op.kernels()
    return *kernels, *(each._replace(phase="recompute") for each in kernels if each.phase == "forward")


def _with_prefix(prefix: str, op: Op) -> tuple[ParameterSpec, ...]:
    return tuple(replace(spec, name=prefix + spec.name) for spec in op.weights)


def _renamed(op: Op, prefix: str, same: tuple[Value, ...]) -> Op:
    """Return an op with a prefix to the names of its weights and values. same: values that keep their names."""

    def named(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(
            each if each in same else each._replace(name=prefix + each.name, sources=named(each.sources))
            for each in values
        )

    return op._replace(
        name=prefix + op.name,
        weights=_with_prefix(prefix, op),
        saves=named(op.saves),
        weight_needs=named(op.weight_needs),
        copies=named(op.copies),
    )


def _output(shape: MicrobatchShape, normalised: Value, scale: Value) -> Op:
    """Return the op of a GPT's output matrix with its loss. normalised: its input. scale: gradient of the loss."""
    model, tokens = shape.model, shape.tokens
    hidden = over_tensor_ranks(shape, model.hidden_size, all_reduce=(0, 1), all_gather=(1, 1), reduce_scatter=(0, 1))
    columns = _columns(shape)
    logits = Value("gradient of logits", tokens * columns * shape.width)
    return Op(
        "output",
        weights=_output_weights(shape),
        saves=(normalised, Value("log-sums", tokens * FULL_BYTES) if shape.recompute_logits else logits),
        weight_needs=(normalised, logits, scale),
        flops=linear_flops(all_tokens(shape), model.vocabulary_size * model.hidden_size, shape.recompute_logits),
        collectives=(*_loss_collectives(shape, tokens), *hidden),
        kernels=partial(_output_kernels, shape),
        uses=(_loss_use(shape, tokens),),
        peaks=partial(output_peaks, shape, columns),
    )


def last_norm_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the op of a GPT's last norm, if all pipeline ranks shard the output matrix."""
    yield next(gpt_head_ops(shape))


def shared_output_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the op of an output matrix that all pipeline ranks shard, with its loss.

    shape: its tensor ranks are all ranks that shard the matrix. They get the last hidden states by a broadcast, and
    sum the gradients of these. Statistics of all ranks arrive between forward and backward. If the backward is split,
    the forward saves the product of the softmax over the rank's own columns and the matrix.
    """
    _, output, *_ = gpt_head_ops(shape)
    group: GroupName = "pipeline+tensor"
    elements, own_bytes = shape.tokens * shape.model.hidden_size, LOSS_STATISTICS * shape.tokens * FULL_BYTES
    statistics = Value("statistics", own_bytes), Value("statistics of all ranks", own_bytes * shape.tensor)
    (use,) = output.uses
    product = [Value("product of the softmax", shape.stream)] if shape.splits_loss else []
    yield output._replace(
        saves=(*output.saves, *statistics, *product),
        weight_needs=(*output.weight_needs, *statistics),
        collectives=(
            Collective(group, "broadcast", elements, shape.width, 1),
            *(each._replace(group=group) for each in output.collectives),
        ),
        kernels=lambda: tuple(_shared_output_kernels(shape)),
        uses=(use._replace(calls=1, backward=0 if shape.splits_loss else use.calls - 1),),
    )


def bert_head_ops(shape: MicrobatchShape) -> Iterator[Op]:
    """Yield the ops of a BERT's heads: masked tokens' `transform` and `output`, sentences' `pooler` and `sentence`.

    Under sequence parallelism every rank does the same work after the tokens are gathered, and keeps the gradient of
    its own tokens.
    """
    model = shape.model
    assert isinstance(model, BertModelConfig)
    hidden, rows, tensor, width = model.hidden_size, shape.rows, shape.tensor, shape.width
    narrow = shape.of_embedding
    inner = narrow.model.hidden_size
    every_row = shape.micro_size * (shape.sequence_length if shape.predictions is None else shape.predictions)
    states = Value("hidden states", shape.stream)
    if model.norm_position == "pre":
        yield norm(shape, "norm", Value("input", shape.own_stream))
    picked = Value("picked tokens", rows * hidden * width)
    wide = rows * inner * width
    transformed, activated, normalised = (Value(name, wide) for name in ("transform", "activation", "transform norm"))
    statistics = Value("transform statistics", shape.statistics(rows))
    yield Op("pick", saves=(states, Value("log-sums", rows * FULL_BYTES)))
    transform = matrix("transform.weight", (inner, hidden), None, model.init_std)
    bias = (vector("transform.bias", (inner,), None, ZEROS),) if model.transform_bias else ()
    yield linear_op(
        "transform", shape, (transform, *bias), picked, gradient("transform", wide),
        rows=rows, all_rows=every_row, gathered=True,
    )  # fmt: skip
    yield Op("transform_activation", saves=(transformed,), uses=(KernelUse(model.transform_kind.op, inner),))
    yield Op(
        "transform_norm",
        weights=norm_weights(narrow.model, "transform_norm"),
        gathered=True,
        saves=(activated, statistics),
        weight_needs=(activated, statistics, gradient("transform norm", wide)),
        uses=(KernelUse(model.norm_kind.op, inner),),
    )
    calls = _loss_collectives(shape, rows)
    if tensor > 1:
        calls += (Collective("tensor", "all_reduce", rows * inner, width, 0, 1),)
        if shape.sequence_parallel:
            calls += (Collective("tensor", "all_gather", shape.tokens * hidden, width, 1),)
    columns, vocabulary = _columns(shape), model.vocabulary_size
    output_bias = replace(vector("output.bias", (vocabulary,), 0, ZEROS), padded=True)
    logits = 0 if shape.recompute_logits else rows * min(columns, vocabulary) * width
    yield Op(
        "output",
        weights=(output_bias, *_output_weights(narrow)),
        gathered=True,
        saves=(normalised, Value("logits", logits)),
        weight_needs=(normalised, gradient("logits", rows * columns * width)),
        flops=linear_flops(every_row, vocabulary * inner, shape.recompute_logits),
        collectives=calls,
        kernels=partial(_output_kernels, narrow),
        uses=(_loss_use(narrow, rows),),
        peaks=partial(output_peaks, narrow, columns),
    )
    if model.sentence_head:
        yield from _sentence_ops(shape, states)


def _sentence_ops(shape: MicrobatchShape, states: Value) -> Iterator[Op]:
    """Yield the pooler of first tokens and the classifier of sentence pairs."""
    model, micro, hidden = shape.model, shape.micro_size, shape.model.hidden_size
    pooled = micro * hidden * shape.width
    # The first token of one sample is a view of its hidden states.
    first, pooled_tanh = states if micro == 1 else Value("first tokens", pooled), Value("pooled", pooled)
    pooler = matrix("pooler.weight", (hidden, hidden), None, model.init_std)
    sentence = matrix("sentence.weight", (SENTENCE_CLASSES, hidden), None, model.init_std)
    scores = micro * SENTENCE_CLASSES
    loss = Value("pair loss", (scores + 1) * FULL_BYTES)
    for spec, source, grad_output, saves in (
        (pooler, first, gradient("pooler", pooled), ()),
        (sentence, pooled_tanh, gradient("sentence", scores * shape.width), (loss,)),
    ):
        path = spec.name.removesuffix(".weight")
        weights = spec, vector(f"{path}.bias", spec.shape[:1], None, ZEROS)
        yield linear_op(
            path, shape, weights, source, grad_output, rows=micro, all_rows=micro, gathered=True, more_saves=saves
        )


def _loss_collectives(shape: MicrobatchShape, rows: int) -> tuple[Collective, ...]:
    if shape.tensor == 1:
        return ()
    return (Collective("tensor", "all_gather", shape.tensor * LOSS_STATISTICS * rows, FULL_BYTES, 1),)


def _loss_use(shape: MicrobatchShape, rows: int) -> KernelUse:
    """Return the kernel calls for the loss of `rows` rows: for their statistics, and for the gradients of logits. A
    rank whose columns are all padding has no logits.

    A GPT's forward leaves the gradient in place of the logits; tensor ranks exchange statistics before that. A BERT's
    backward computes it. If the backward recomputes logits, both directions proceed in chunks of rows.
    """
    model, shards = shape.model, shape.tensor
    columns = max(0, min(_columns(shape), model.vocabulary_size - shape.tensor_rank * _columns(shape)))
    gradients = int(columns > 0)
    op = "linear_cross_entropy" if model.logit_softcap is None else "softcapped_linear_cross_entropy"
    if shape.recompute_logits:
        chunks = -(-rows // chunk_rows(columns, shape.width))
        return KernelUse(op, model.hidden_size, chunks, backward=chunks * gradients)
    if isinstance(model, BertModelConfig):
        return KernelUse("cross_entropy", -(-model.vocabulary_size // shards), gradients)
    calls = 1 if shards == 1 else 1 + gradients
    return KernelUse(op, model.hidden_size, calls, backward=0)


def _shared_output_kernels(shape: MicrobatchShape) -> Iterator[Kernel]:
    """Yield the kernels of an output matrix that all pipeline ranks shard. A pass over the logits completes their
    gradient; if the backward is split, the forward has already multiplied the gradient from its own columns by the
    matrix."""
    for each in _output_kernels(shape):
        early = shape.splits_loss and each.phase == "backward_input"
        yield each._replace(phase="forward") if early else each
    later: KernelPhase = "backward_weight" if shape.splits_loss else "backward_input"
    yield Kernel("loss", later, moved=2 * shape.rows * _columns(shape) * shape.width)


def _output_weights(shape: MicrobatchShape) -> tuple[ParameterSpec, ...]:
    """Return the output matrix; nothing if it is tied to the embedding."""
    model = shape.model
    return () if model.tie_embeddings else (table(model, "output.weight", model.vocabulary_size, padded=True),)


def _columns(shape: MicrobatchShape) -> int:
    """Return the columns of the logits on this rank, padding included."""
    weight = table(shape.model, "output.weight", shape.model.vocabulary_size, padded=True)
    return weight.local_shape(shape.tensor, shape.alignment)[0]


def _output_kernels(shape: MicrobatchShape) -> tuple[Kernel, ...]:
    """Return the output matrix's products and the loss, which reads the logits twice: for the sum, and for the
    gradient that it writes in their place."""
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
