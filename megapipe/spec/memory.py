"""Bytes that a layer holds on one rank, from its configuration alone: state, saved activations, messages."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.spec.experts import expert_bytes, has_experts
from megapipe.spec.parameters import LayerSpec, ParameterSpec

Precision = Literal["fp32", "bf16", "fp16"]
AttentionPath = Literal["sdpa", "unfused"]
ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
FULL_BYTES = 4
"""Bytes of an fp32 element: masters, gradients, moments and statistics in every precision."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters and what belongs to them on one rank.

    weights: compute-dtype copies, all versions. master: fp32 weights under bf16 and fp16; under fp32 the newest copy
    is the master and this is 0. gradients: fp32 accumulators. moments: what the optimizer keeps between steps.
    """

    weights: int
    master: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.master + self.gradients + self.moments


def num_moments(optimizer: OptimizerConfig, matrix: bool = False) -> int:
    """Numbers that the optimizer keeps between steps for every element of a parameter.

    matrix: one of those that muon treats apart (`ParameterSpec.matrix`).
    """
    if optimizer.name == "muon" and matrix:
        return 1
    if optimizer.name in ("adamw", "muon"):
        return 2
    return 1 if optimizer.momentum else 0


def state_bytes(
    specs: Iterable[ParameterSpec],
    precision: Precision,
    *,
    tensor_size: int = 1,
    alignment: int = 1,
    num_versions: int = 1,
    num_gradients: int = 1,
    moments: int = 2,
    matrix_moments: int | None = None,
    master_weights: bool = True,
    moment_bytes: int = FULL_BYTES,
    segment_alignment: int = 1,
) -> StateBytes:
    """State of the distinct parameters `specs` on one tensor rank, vocabulary padding included.

    num_versions: live weight versions. num_gradients: accumulators (one per use of a tied weight). moments: those of
    each parameter, which `num_moments` tells of an optimizer; the default is AdamW's. matrix_moments: those of
    matrices, where they have another number. master_weights, moment_bytes: 2
    under bf16 moments, as training.master_weights and optimizer.moment_dtype say. segment_alignment: as in
    `stored_elements`.
    """
    shard = {"tensor_size": tensor_size, "alignment": alignment, "segment_alignment": segment_alignment}
    held = [(stored_elements([spec], **shard), spec.matrix) for spec in specs]
    elements = sum(size for size, _ in held)
    of_matrices = moments if matrix_moments is None else matrix_moments
    kept = sum(size * (of_matrices if matrix else moments) for size, matrix in held)
    return StateBytes(
        weights=elements * num_versions * ELEMENT_BYTES[precision],
        master=0 if precision == "fp32" or not master_weights else elements * FULL_BYTES,
        gradients=elements * num_gradients * FULL_BYTES,
        moments=kept * moment_bytes,
    )


def stored_elements(
    specs: Iterable[ParameterSpec], *, tensor_size: int = 1, alignment: int = 1, segment_alignment: int = 1
) -> int:
    """Elements that one tensor rank stores of `specs`, vocabulary padding included.

    segment_alignment: parameters start at its multiples in the flat buffer of a unit, which ends at one; 1 leaves the
    gaps out, under 64 elements a parameter.
    """
    sizes = (prod(spec.local_shape(tensor_size, alignment)) for spec in specs)
    return sum(-(-size // segment_alignment) * segment_alignment for size in sizes)


def boundary_bytes(
    model: ModelConfig, micro_size: int, sequence_length: int, precision: Precision, *, sequence_shards: int = 1
) -> int:
    """One message between two stages: a micro-batch's residual stream [micro, sequence, hidden], or its gradient.

    sequence_shards: tensor ranks that share the tokens; each sends its own.
    """
    return micro_size * (sequence_length // sequence_shards) * model.hidden_size * ELEMENT_BYTES[precision]


def activation_bytes(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    attention: AttentionPath,
    *,
    tensor_size: int = 1,
    alignment: int = 1,
    recompute_logits: bool = False,
    recompute: Collection[RecomputedPart] = (),
    sequence_parallel: bool = False,
    mask_bytes: int = 1,
) -> int:
    """What one layer keeps on one tensor rank from a micro-batch's forward to its backward.

    Counted is every tensor that a backward formula reads, once: the inputs of norms, matrix products and activation;
    query, key and value; the attention's result; per norm row the statistics in fp32 (mean and deviation, or the
    deviation alone); sdpa's log-sum per query in fp32, or unfused's probabilities [heads, sequence, sequence], twice
    under attention dropout (before and after); one byte per element of a dropout's mask; the head's gradient of its
    logits or, under recompute_logits, the log-sum of each row in fp32. A view counts as the whole tensor that it keeps
    alive. What parts of a block `recompute` names are not kept: the unfused path's probabilities and what is made of
    them, the activation's result, the norms' results. Of a shared embedding one byte a token: whether another rank has
    its row. Not counted: rotary tables, numbers of rows, and the micro-batch's own tokens, labels and loss mask.
    With dropout, layer norm, GELU and the unfused path this is the formula of Korthikanti et al. (2022,
    arXiv 2205.05198, section 4, table 2) but for the norms' statistics, which they leave out.
    sequence_parallel: the tensor ranks share the tokens of what each would otherwise keep whole. mask_bytes: 1, or 0
    where a dropout's backward computes its mask again instead of keeping it.
    Experts are taken to be chosen evenly (`spec.experts`).
    """
    tokens = micro_size * sequence_length
    shards = tensor_size if sequence_parallel else 1
    size = ELEMENT_BYTES[precision]
    if layer.kind == "embedding":
        elsewhere = tokens if tensor_size > 1 else 0
        masked = tokens // shards * model.hidden_size if model.embedding_dropout else 0
        return elsewhere + masked * mask_bytes
    stream = tokens * model.hidden_size * size
    norm = stream + tokens * FULL_BYTES * (2 if model.normalization == "layer_norm" else 1)
    if layer.kind == "head":
        rows = layer.parameters["output.weight"].local_shape(tensor_size, alignment)[0]
        return (norm + stream) // shards + tokens * (FULL_BYTES if recompute_logits else rows * size)
    normalised = 0 if "norms" in recompute else stream
    masked = tokens * model.hidden_size if model.hidden_dropout else 0
    replicated = 2 * (norm + normalised + masked * mask_bytes) // shards
    shared = attention_bytes(
        model, micro_size, sequence_length, size, attention, tensor_size, "attention" in recompute, mask_bytes
    )
    again = "mlp" in recompute
    if has_experts(layer):
        ranks = {"tensor_size": tensor_size, "shards": shards}
        return replicated + shared // tensor_size + expert_bytes(model, tokens, size, **ranks, again=again)
    return replicated + (shared + _mlp_bytes(model, tokens, size, again)) // tensor_size


def isolation_bytes(
    model: ModelConfig,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    attention: AttentionPath,
    *,
    recompute: Collection[RecomputedPart] = (),
    mask_length: int | None = None,
    blocks: bool = False,
) -> int:
    """What a block keeps of a micro-batch besides `activation_bytes` where data.isolate_documents is true.

    Places within documents differ from sample to sample, so rotary tables, two for queries and two for keys, are the
    micro-batch's own, in fp32; sdpa keeps the mask [b, s, s] in the compute dtype, the unfused path one of bytes.
    mask_length: tokens that attention sees at once where these are not the rank's own; 0 where it keeps no mask.
    blocks: attention takes lists of blocks in place of a mask (`layers.document_blocks`).
    """
    tables = 4 * micro_size * sequence_length * model.head_dim // 2 * FULL_BYTES
    kept = tables if model.positions == "rotary" else 0
    if blocks:
        return kept
    mask = micro_size * (sequence_length if mask_length is None else mask_length) ** 2
    if attention == "sdpa":
        return kept + mask * ELEMENT_BYTES[precision]
    return kept if "attention" in recompute else kept + mask


def repeated_keys_bytes(
    model: ModelConfig, micro_size: int, sequence_length: int, precision: Precision, tensor_size: int = 1
) -> int:
    """Return the bytes that a block saves in addition to `activation_bytes` if attention repeats keys and values.

    Negative where the product of queries, keys and values is then not kept: rotated queries and repeated keys and
    values are all that attention reads.
    """
    tokens, width = micro_size * sequence_length, model.head_dim * ELEMENT_BYTES[precision]
    query, key = (tokens * heads * width // tensor_size for heads in (model.num_heads, model.kv_heads))
    changed = model.qk_norm or model.positions == "rotary"
    copied = changed or model.kv_heads > tensor_size  # queries are brought together, out of their groups
    freed = (key if changed else 0) + (query + 2 * key if copied and not model.qk_norm else 0)
    return 2 * query - freed


def attention_bytes(
    model: ModelConfig,
    micro_size: int,
    sequence_length: int,
    size: int,
    attention: AttentionPath,
    tensor_size: int,
    again: bool,
    mask_bytes: int = 1,
) -> int:
    """What the tensor ranks share of an attention, over all of them: all but the input of its first product.

    again: the unfused path's weights are made again. mask_bytes: as in `activation_bytes`.
    """
    query_rows = micro_size * sequence_length * model.num_heads
    key_rows = micro_size * sequence_length * model.kv_heads
    kept = query_rows * model.head_dim * size  # result, the input of the output product
    kept += _projected_elements(model, query_rows, key_rows, attention, micro_size, tensor_size) * size
    if model.qk_norm:
        kept += (query_rows + key_rows) * FULL_BYTES
    if attention == "sdpa":
        return kept + query_rows * FULL_BYTES
    if again:
        return kept
    weights = query_rows * sequence_length
    copies = 2 if model.attention_dropout else 1
    return kept + weights * size * copies + (weights * mask_bytes if model.attention_dropout else 0)


def _projected_elements(
    model: ModelConfig, query_rows: int, key_rows: int, attention: AttentionPath, micro_size: int, tensor_size: int
) -> int:
    """Elements of query, key and value: as projected, all three in one tensor, and as multiplied where that differs.

    Bringing rows together copies them: the unfused path does so by kv head, unless there is one sample or one such
    head; grouped queries come out of their groups.
    """
    query, key = query_rows * model.head_dim, key_rows * model.head_dim
    changed = model.qk_norm or model.positions == "rotary"
    several_heads = model.kv_heads > tensor_size
    keys_copied = attention == "unfused" and micro_size > 1 and several_heads
    grouped = model.num_heads > model.kv_heads
    queries_copied = keys_copied or (grouped and (attention == "unfused" or several_heads))
    projected = query + 2 * key if model.qk_norm or not keys_copied else 0
    return projected + query * (changed or queries_copied) + key * (changed or keys_copied) + key * keys_copied


def _mlp_bytes(model: ModelConfig, tokens: int, size: int, again: bool) -> int:
    """What the tensor ranks share of an MLP: the activation's one or two inputs and, unless made again, its result."""
    return tokens * model.ffn_size * size * ((2 if model.activation == "swiglu" else 1) + (not again))
