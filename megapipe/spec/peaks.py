"""Peaks within a backward: bytes that an op needs while it runs, beyond what the rank held when the backward started.

A matrix's gradient is computed in the compute dtype, and a second copy of it in fp32 exists while it is added to its
accumulator; the gradients of the operation's inputs and the tensors that the forward saved exist at the same time.
So the peak of a step is within an action, not after it. `layout.walk` adds these bytes to what each action starts
with. Forwards need less than the backward of the same layer, and are not counted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from megapipe.spec.linear import chunk_rows
from megapipe.spec.ops import (
    FULL_BYTES,
    BackwardPeak,
    BackwardPhase,
    MicrobatchShape,
    Op,
    Peaks,
    weight_half_bytes,
)
from megapipe.spec.parameters import ParameterSpec


def peaks_within(ops: Sequence[Op], shape: MicrobatchShape) -> dict[BackwardPhase, int]:
    """Return the peak bytes of a layer's backward, and of each half of it, beyond those held before it."""
    others = (each for op in ops for each in op.peaks() if each.phase != "weight half")
    peaks = [*_weight_halves(ops, shape), *others]
    phases: tuple[BackwardPhase, ...] = "backward", "input half", "weight half"
    return {phase: max((each.bytes for each in peaks if each.phase == phase), default=0) for phase in phases}


def _weight_halves(ops: Sequence[Op], shape: MicrobatchShape) -> Iterator[BackwardPeak]:
    """Yield the peak of each op's weight half, which frees the op's tensors before that of the previous op starts.

    It recomputes its input, gathers the tokens of all tensor ranks, and adds the gradient of one weight at a time to
    its accumulator, without a cast. The gathered tokens are sorted by rank: those of several samples are copied. An op
    that needs more declares so in its `peaks`.
    """
    held = weight_half_bytes(ops, shape.recompute)
    for number, op in enumerate(ops):
        freed = held - weight_half_bytes(ops[: number + 1], shape.recompute)
        recomputed = sum(value.bytes for value in op.weight_needs if value.part in shape.recompute)
        gathers = (each for each in op.collectives if each.operation == "all_gather" and each.weight_half)
        gathered = sum(each.elements * each.element_bytes for each in gathers)
        copied = gathered if shape.micro_size > 1 else 0
        largest = max((_elements(shape, spec) for spec in op.weights), default=0) * shape.width
        needed = [each.bytes for each in op.peaks() if each.phase == "weight half"]
        needed.append(recomputed + gathered + max(copied, largest))
        yield BackwardPeak("weight half", max(needed) - freed)


def table_peaks(shape: MicrobatchShape, tables: Iterable[ParameterSpec]) -> Peaks:
    """Return the peaks of an embedding's lookup. Rows of a table's gradient are summed in fp32. Tensor ranks copy
    the output's gradient, to mask the rows of tokens that other ranks hold."""
    largest = max(_elements(shape, spec) for spec in tables)
    masked = shape.tensor > 1 and any(spec.padded for spec in tables)
    needed = FULL_BYTES * largest + (shape.stream if masked else 0)
    if shape.width != FULL_BYTES:
        needed += max(shape.stream // shape.width * FULL_BYTES, shape.width * largest)
    gathered = _gathered(shape)
    copied = gathered if shape.micro_size > 1 else 0
    return (
        BackwardPeak("backward", gathered + needed),
        BackwardPeak("input half", gathered + copied),
        BackwardPeak("weight half", needed),
    )


def projection_peaks(shape: MicrobatchShape, weight: ParameterSpec) -> Peaks:
    """Return the peaks of the projection of the embeddings: the gradients of its input and of its matrix."""
    source, matrix = shape.of_embedding.own_stream, _gradient(shape, _elements(shape, weight))
    return BackwardPeak("backward", source + matrix), BackwardPeak("input half", source)


def output_peaks(shape: MicrobatchShape, columns: int) -> Peaks:
    """Return the peaks of a head's output matrix: the gradients of the last hidden states and of the matrix,
    computed from the logits' gradient. columns: number of columns of the logits on this rank."""
    rows, elements = shape.rows, columns * shape.model.hidden_size
    hidden = rows * shape.model.hidden_size * shape.width
    if shape.recompute_logits:
        logits = min(rows, chunk_rows(columns, shape.width)) * columns * shape.width
        whole = hidden + elements * (FULL_BYTES + shape.width) + logits
    else:  # rows are scaled before the product
        whole = hidden + max(hidden + elements * shape.width, _gradient(shape, elements))
    return (
        BackwardPeak("backward", whole),
        BackwardPeak("input half", hidden),
        BackwardPeak("weight half", elements * shape.width + hidden + _gathered(shape)),
    )


class _FeedForward(NamedTuple):
    """Bytes of tensors in the backward of an MLP, of experts, or of a shared expert; a block's backward starts with
    these.

    hidden: the output. inner: the activation's output. outer: the activation's input. freed: tensors that later
    operations saved, freed before the gradient of `down` is computed. activated: tensors that the gradient of `down`
    frees. recomputed: a recomputed activation. shared_gradient: the input's gradient from the shared expert's
    backward, which runs first; the backward of the experts holds it.
    """

    hidden: int
    inner: int
    outer: int
    freed: int
    activated: int
    recomputed: int
    shared_gradient: int


def _feed_forward(shape: MicrobatchShape, *, whole: bool, shared: bool = False) -> _FeedForward:
    """Return the sizes for a whole backward, or for the input half, which leaves saved tensors to the weight half."""
    model, experts = shape.model, shape.model.num_experts is not None and not shared
    rows = shape.expert_rows if experts else shape.tokens
    ffn = (model.shared_expert_size or 0) if shared else model.ffn_size
    hidden = rows * model.hidden_size * shape.width // (1 if experts else shape.shards)
    inner = rows * ffn * shape.width // (1 if experts else shape.tensor)
    recomputed = inner if "mlp" in shape.recompute else 0
    freed = hidden if (experts and whole) or (shared and model.shared_expert_gate) else 0
    freed += shape.own_stream * (model.normalizes_outputs and whole and not shared)
    shared_gradient = 0
    if experts and model.shared_expert_size is not None:
        first = _feed_forward(shape, whole=whole, shared=True)
        freed += first.freed + first.activated + first.outer
        shared_gradient = shape.own_stream
    return _FeedForward(
        hidden,
        inner,
        inner * (1 + model.activation_kind.gated),
        freed,
        inner - recomputed if whole else 0,
        recomputed,
        shared_gradient,
    )


def down_peaks(shape: MicrobatchShape, spec: ParameterSpec, *, shared: bool = False) -> Peaks:
    """Return the peaks of an MLP's second matrix. A product's output gradient is freed before its weight's gradient
    is cast, unless it is the gradient of the residual stream."""
    model = shape.model
    experts = model.num_experts is not None and not shared
    keeps = experts or model.changes_updates or (shared and model.shared_expert_gate)

    def of(whole: bool) -> int:
        mlp = _feed_forward(shape, whole=whole, shared=shared)
        elements = _elements(shape, spec) if whole else 0
        product = mlp.hidden * keeps + _gathered(shape) + mlp.recomputed + elements * shape.width
        return mlp.inner + max(product, _gradient(shape, elements)) - mlp.freed + mlp.shared_gradient

    return _both(of)


def activation_peaks(shape: MicrobatchShape, *, shared: bool = False) -> Peaks:
    """Return the peaks of an MLP's activation: the gradients of its result and of its input."""

    def of(whole: bool) -> int:
        mlp = _feed_forward(shape, whole=whole, shared=shared)
        return mlp.inner + mlp.outer - mlp.activated - mlp.freed + mlp.shared_gradient

    return _both(of)


def up_peaks(shape: MicrobatchShape, spec: ParameterSpec, *, shared: bool = False) -> Peaks:
    """Return the peaks of an MLP's first matrix."""

    def of(whole: bool) -> int:
        mlp = _feed_forward(shape, whole=whole, shared=shared)
        elements = _elements(shape, spec) if whole else 0
        product = mlp.outer + 2 * _gathered(shape) + elements * shape.width
        held = mlp.shared_gradient - mlp.activated - mlp.outer - mlp.freed
        return mlp.hidden + max(product, _gradient(shape, elements)) + held

    return _both(of)


def gate_peaks(shape: MicrobatchShape) -> Peaks:
    """Return the peaks of a shared expert's gate: the gradients of the result and of the gate, the latter before its
    sum."""
    return _both(lambda whole: 2 * shape.own_stream)


def attention_peaks(shape: MicrobatchShape) -> Peaks:
    """Return the peaks of attention without a fused kernel: the weights and the gradient of the values if weights
    are recomputed, and the gradients of the weights before and after the softmax. Its backward follows that of the
    MLP, which has freed its saved tensors."""
    if shape.attention != "unfused":
        return ()
    rows = shape.tokens * shape.model.num_heads // shape.tensor
    weights = rows * (shape.local_length // shape.num_chunks) * shape.width
    if "attention" in shape.recompute:
        needed = 3 * weights + shape.stream // shape.tensor
    elif shape.model.attention_dropout:  # the dropped weights have been freed
        needed = weights
    else:  # the tensors that the second norm and its product saved have been freed too
        needed = 2 * (weights - shape.stream // shape.shards)

    def of(whole: bool) -> int:
        mlp = _feed_forward(shape, whole=whole)
        return needed - mlp.activated - mlp.outer - mlp.freed

    return _both(of)


def _both(of: Callable[[bool], int]) -> Peaks:
    """Return the peaks of a whole backward and of the input half. of: returns the bytes; its argument is whether the
    backward is whole."""
    return BackwardPeak("backward", of(True)), BackwardPeak("input half", of(False))


def _elements(shape: MicrobatchShape, spec: ParameterSpec) -> int:
    return prod(spec.local_shape(shape.tensor, shape.alignment))


def _gathered(shape: MicrobatchShape) -> int:
    """Return the bytes of the tokens that tensor ranks gather for a matrix product; 0 if they do not shard the
    tokens."""
    return shape.stream if shape.sequence_parallel and shape.tensor > 1 else 0


def _gradient(shape: MicrobatchShape, elements: int) -> int:
    """Return the bytes of a weight's gradient, and of its cast to fp32 if it has another dtype."""
    return elements * (FULL_BYTES if shape.width == FULL_BYTES else shape.width + FULL_BYTES)
