"""A layer as a list of ops: what each op holds, computes, exchanges and launches, declared once.

Everything that a planner, a dry run, a simulator or a memory check wants to know about a layer is a sum over its ops:
parameters, tensors saved for the backward, tensors that the weight half of a split backward needs, FLOPs, collectives
and kernels. Saved tensors are named values, not byte counts, so that a tensor that two ops read counts once and a
recomputed one is replaced by what it is computed from.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from megapipe.config.memory import Part
from megapipe.config.model import ModelConfig
from megapipe.spec.parameters import ParameterSpec

Precision = Literal["fp32", "bf16", "fp16"]
AttentionPath = Literal["sdpa", "unfused"]
ContextAttention = Literal["ring", "all_to_all"]
ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
FULL_BYTES = 4
"""Bytes of an fp32 element: master weights, gradients, moments and statistics in every precision."""
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast"]
GroupName = Literal["tensor", "context", "pipeline+tensor"]
BackwardPhase = Literal["backward", "input half", "weight half"]
KernelPhase = Literal["forward", "backward_input", "backward_weight", "recompute"]


@dataclass(frozen=True)
class MicrobatchShape:
    """One micro-batch on one rank of a layout: the numbers on which the sizes of a layer's ops depend.

    micro_size: samples of a micro-batch. sequence_length: tokens of a whole sample. attention: path of attention.
    tensor: number of tensor ranks. alignment: rows of a padded vocabulary shard are multiples of it.
    sequence_parallel: tensor ranks shard the tokens between matrix products, in sequence_chunks pieces. context:
    number of ranks that shard each sample, by context_attention. predictions: masked tokens of a sample that a BERT's
    head predicts on this rank; None for all tokens. recompute: parts of a block that the backward recomputes itself.
    recompute_logits: the head saves no logits. splits_loss: the backward of an output layer that pipeline ranks shard
    is split. isolate_documents: attention stays within documents; document_blocks: by lists of blocks instead of a
    mask.
    fp8: matrix products of blocks are in fp8; tensorwise_fp8: with scales that the tensor ranks agree on.
    stored_masks: dropout keeps its mask for the backward (on a GPU the kernels recompute it). repeats_keys: attention
    needs a key and value head for each query head. slices: places of the tokens of each slice of a sample, () for
    whole samples; slice: number of this slice. tensor_rank, context_rank: this rank's number among the tensor and the
    context ranks, on which only kernel calls depend.
    """

    model: ModelConfig = field(hash=False)
    micro_size: int = 1
    sequence_length: int = 1
    precision: Precision = "fp32"
    attention: AttentionPath = "sdpa"
    tensor: int = 1
    alignment: int = 1
    sequence_parallel: bool = False
    sequence_chunks: int = 1
    context: int = 1
    context_attention: ContextAttention = "ring"
    predictions: int | None = None
    recompute: frozenset[Part] = frozenset()
    recompute_logits: bool = False
    splits_loss: bool = False
    isolate_documents: bool = False
    document_blocks: bool = False
    fp8: bool = False
    tensorwise_fp8: bool = False
    stored_masks: bool = True
    repeats_keys: bool = False
    slices: tuple[range, ...] = ()
    slice: int = 0
    tensor_rank: int = 0
    context_rank: int = 0

    @cached_property
    def width(self) -> int:
        """Bytes of an element in the compute dtype."""
        return ELEMENT_BYTES[self.precision]

    @property
    def local_length(self) -> int:
        """Tokens of a sample, or of its slice, on the tensor ranks of one context rank."""
        return self.passing_length // self.context

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a sample that attend to themselves, by `model.attention_chunk_size`."""
        chunk = self.model.attention_chunk_size
        return 1 if chunk is None else max(1, self.sequence_length // chunk)

    @property
    def passing_length(self) -> int:
        """Tokens of a sample that pass through a layer together: all, or those of the slice."""
        return len(self.slices[self.slice]) if self.slices else self.sequence_length

    @cached_property
    def tokens(self) -> int:
        """Tokens of the micro-batch on the tensor ranks of one context rank."""
        return self.micro_size * self.local_length

    @property
    def shards(self) -> int:
        """Tensor ranks that shard the tokens between matrix products."""
        return self.tensor if self.sequence_parallel else 1

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream of all `tokens`."""
        return self.tokens * self.model.hidden_size * self.width

    @cached_property
    def own_stream(self) -> int:
        """Bytes of the residual stream of the tokens that this rank has between matrix products."""
        return self.stream // self.shards

    @cached_property
    def of_embedding(self) -> "MicrobatchShape":
        """This shape for the model of the embeddings, which may be narrower than the residual stream."""
        narrow = self.model.of_embedding
        return self if narrow is self.model else replace(self, model=narrow)

    def statistics(self, rows: int) -> int:
        """Return the bytes of the fp32 statistics of `rows` normalised rows: mean and deviation, or the deviation
        alone."""
        return rows * FULL_BYTES * (1 + self.model.norm_kind.centred)

    @property
    def rows(self) -> int:
        """Rows of the head's logits."""
        return self.tokens if self.predictions is None else self.micro_size * self.predictions

    @property
    def expert_rows(self) -> int:
        """Rows that the experts of this rank process if all experts are chosen equally often."""
        return self.tokens * self.model.experts_per_token // self.tensor


class Value(NamedTuple):
    """A tensor that a forward leaves for the backward, or the input half of a backward for the weight half.

    bytes: of its whole storage on this rank; a view counts as the tensor that it keeps alive. part: the part of the
    block that can recompute it from `sources`.
    """

    name: str
    bytes: int
    part: Part | None = None
    sources: tuple["Value", ...] = ()


class Collective(NamedTuple):
    """Calls that all ranks of a group make for one micro-batch.

    elements: as in `Exchange`. forward, backward: calls in a forward and in a whole backward. input_half, weight_half:
    calls in the halves of a split one, which together may be more: sequence parallelism gathers twice in a whole
    backward and four times in a split one. input_half None means `backward`.
    """

    group: GroupName
    operation: Operation
    elements: int
    element_bytes: int
    forward: int = 0
    backward: int = 0
    input_half: int | None = None
    weight_half: int = 0

    @property
    def split_backward(self) -> int:
        """Calls in both halves of a split backward."""
        return (self.backward if self.input_half is None else self.input_half) + self.weight_half


class Kernel(NamedTuple):
    """Executed work: a matrix product, or a pass over memory.

    product: rows, inner size, columns and number of such products, all on this rank; None for a pass. moved: bytes
    read and written, if these are not the product's operands and result. dtype: number format of the product, if the
    device supports it. out_bytes: bytes per element of the product's result. compute: factor of the product's FLOPs
    (causal attention computes half of all pairs). times: factor of everything. mask: further bytes if dropout masks
    are stored.
    """

    name: str
    phase: KernelPhase
    product: tuple[int, int, int, int] | None = None
    moved: float | None = None
    dtype: str = "fp32"
    out_bytes: int | None = None
    compute: float = 1.0
    times: float = 1.0
    mask: int = 0


class KernelUse(NamedTuple):
    """Calls of an op of the kernel registry for one micro-batch. A call that has no elements counts as none.

    op: its name. columns: length of the last axis. calls: in a forward. part: the part of the block whose forward
    calls a backward repeats if it recomputes that part. backward: calls in a backward; None means `calls`.
    """

    op: str
    columns: int
    calls: int = 1
    part: Part | None = None
    backward: int | None = None

    @property
    def backward_calls(self) -> int:
        """Calls in a backward, recomputed forwards not counted."""
        return self.calls if self.backward is None else self.backward


class BackwardPeak(NamedTuple):
    """Peak bytes within a layer's backward, or one half of it, while an op runs: beyond those held before it."""

    phase: BackwardPhase
    bytes: int


Peaks = tuple[BackwardPeak, ...]


class Flops(NamedTuple):
    """FLOPs of one micro-batch, over all tensor and context ranks together, from matrix products alone.

    A product of [m, k] by [k, n] counts 2 m k n. Not counted are norms, activations, softmax, dropout, biases,
    rotations, table look-ups and the recomputation inside fused attention: these are the model's FLOPs (Narayanan et
    al., 2021, arXiv 2104.04473, equation 3), the numerator of MFU. Causal attention counts in full, as that paper
    does: every query meets all keys of the sequence, or all of its sliding window. Only the experts to which a token
    goes are counted.

    backward_input: gradients of activations. backward_weight: gradients of weights. A whole backward is their sum and
    the `recomputed` FLOPs of the forward.
    """

    forward: int = 0
    backward_input: int = 0
    backward_weight: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        """Forward and backward without recomputation."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def executed(self) -> int:
        """Forward and backward with recomputation: the measure of a stage's work, not of the model's."""
        return self.total + self.recomputed


class Op(NamedTuple):
    """One op of a layer.

    weights: parameters, named by their path in the layer. gathered: weights that every tensor rank holds whole see the
    tokens of all tensor ranks, even under sequence parallelism, so that their gradients need no sum. saves: tensors
    that its backward reads. weight_needs: tensors that the weight half of a split backward reads, gradients included.
    copies: tensors that the forward copies for that half. handed: bytes that later slices of the sample read until the
    backward. handed_gradient: bytes of the gradient of these, to which later slices add. kernels: returns its executed
    work, which only estimates of time ask for; nothing if other ops' kernels do the work, or its time is not counted.
    uses: calls of ops of the kernel registry. peaks: returns the peaks of tensors that exist only within its
    backward; nothing if other ops of the layer need more memory.
    """

    name: str
    weights: tuple[ParameterSpec, ...] = ()
    gathered: bool = False
    saves: tuple[Value, ...] = ()
    weight_needs: tuple[Value, ...] = ()
    copies: tuple[Value, ...] = ()
    handed: int = 0
    handed_gradient: int = 0
    flops: Flops = Flops()
    collectives: tuple[Collective, ...] = ()
    kernels: Callable[[], tuple[Kernel, ...]] = tuple
    uses: tuple[KernelUse, ...] = ()
    peaks: Callable[[], Peaks] = tuple


class Exchange(NamedTuple):
    """One kind of call that all members of a group make.

    elements: of the whole buffer, over all members: what an all-reduce sums, what an all-gather returns, what a
    reduce-scatter starts from, what each member of an all-to-all gives, the message of a send. element_bytes: bytes of
    an element. calls: number of calls.
    """

    operation: Operation
    elements: int
    element_bytes: int
    calls: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of the buffers of all calls together."""
        return self.elements * self.element_bytes * self.calls

    def sent(self, members: int) -> float:
        """Return the bytes that each of `members` ranks sends in a ring algorithm, which sends the fewest bytes.

        An all-reduce is a reduce-scatter and an all-gather, (members - 1) / members of the buffer each.
        """
        if self.operation == "send":
            return float(self.bytes)
        passes = 2 if self.operation == "all_reduce" else 1
        return passes * self.bytes * (members - 1) / members


def saved_bytes(ops: Iterable[Op], recompute: Iterable[Part] = (), *, split: bool = False) -> int:
    """Return the bytes that a micro-batch's forward leaves on a rank for the backward. split: the backward has two
    halves.

    Not counted: tables that all micro-batches share, and the micro-batch's own tokens, labels and loss mask.
    """
    values = (value for op in ops for value in (op.saves + op.copies if split else op.saves))
    return _distinct_bytes(values, recompute)


def weight_half_bytes(ops: Iterable[Op], recompute: Iterable[Part] = ()) -> int:
    """Return the bytes that the input half of a split backward leaves on one rank for the weight half.

    For the matrix products of a GPT block these are 32 s b h bytes in half precision, as in Qi et al. (2023, arXiv
    2401.10241, table 1), who leave the norms out.
    """
    return _distinct_bytes((value for op in ops for value in op.weight_needs + op.copies), recompute)


def _distinct_bytes(values: Iterable[Value], recompute: Iterable[Part]) -> int:
    """Return the sum of the storages: each counts once, and the sources of a recomputed value replace it."""
    held: dict[str, int] = {}
    waiting = list(values)
    while waiting:
        name, size, part, sources = waiting.pop()
        if part is not None and part in recompute:
            waiting.extend(sources)
        else:
            held[name] = max(held.get(name, 0), size)
    return sum(held.values())


def total_flops(ops: Iterable[Op]) -> Flops:
    """Return the FLOPs of all ops."""
    return Flops(*map(sum, zip(*(op.flops for op in ops), strict=True)))


def exchanges(ops: Iterable[Op], *, forwards: int = 1, split: bool = False) -> dict[str, list[Exchange]]:
    """Return the exchanges of one micro-batch by group, for `forwards` forwards and one backward. split: the backward
    has two halves."""
    by_group: dict[str, list[Exchange]] = {}
    for op in ops:
        for each in op.collectives:
            calls = each.forward * forwards + (each.split_backward if split else each.backward)
            by_group.setdefault(each.group, []).append(Exchange(*each[1:4], calls))
    return by_group


def partial_weights(ops: Iterable[Op]) -> list[ParameterSpec]:
    """Return the weights that every tensor rank holds whole and applies only to its own tokens.

    Under sequence parallelism their gradients are summed over the tensor ranks, in fp32, before any other sum.
    """
    return [spec for op in ops if not op.gathered for spec in op.weights if spec.partition_axis is None]


def linear_flops(rows: int, elements: int, recomputed: bool = False) -> Flops:
    """Return the FLOPs of a product of `rows` rows and a matrix of `elements` elements."""
    once = 2 * rows * elements
    return Flops(once, once, once, once if recomputed else 0)


def linear_kernels(
    name: str, rows: int, inner: int, columns: int, *, dtype: str, width: int, times: float = 1.0, again: bool = False
) -> tuple[Kernel, ...]:
    """Return a linear layer's three products. again: the backward recomputes the first one, which is then listed
    twice."""
    forward = Kernel(name, "forward", (rows, inner, columns, 1), dtype=dtype, out_bytes=width, times=times)
    return (
        forward,
        *([forward._replace(phase="recompute")] if again else []),
        forward._replace(
            name=f"{name}, gradient of its input", phase="backward_input", product=(rows, columns, inner, 1)
        ),
        # A product reads and writes the fp32 sum that it adds to.
        forward._replace(
            name=f"{name}, gradient of its weight",
            phase="backward_weight",
            product=(inner, rows, columns, 1),
            out_bytes=2 * FULL_BYTES,
        ),
    )


def passes(name: str, forward: float, backward: float, *, again: bool = False, mask: int = 0) -> tuple[Kernel, ...]:
    """Return the kernels of an op that only reads and writes memory: `forward` bytes, and in the backward `backward`
    bytes."""
    first = Kernel(name, "forward", moved=forward, mask=mask)
    return (
        first,
        *([first._replace(phase="recompute")] if again else []),
        Kernel(name, "backward_input", moved=backward, mask=mask),
    )


def registry_uses(ops: Sequence[Op]) -> list[tuple[str, int]]:
    """Return the ops of the kernel registry that a layer calls, with the length of the last axis, each once."""
    return list(dict.fromkeys((use.op, use.columns) for op in ops for use in op.uses))
