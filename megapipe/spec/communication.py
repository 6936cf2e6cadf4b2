"""What a rank exchanges with others, from the configuration alone: within layers, between stages, between replicas.

Letters as in Narayanan et al. (2021, arXiv 2104.04473, section 3.2): b samples of a micro-batch, s tokens of a sample,
h hidden size, t tensor ranks. An `Exchange` tells the buffer that a collective works on; `Exchange.sent` what of it
crosses a rank's wire.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megapipe.config.model import ModelConfig
from megapipe.spec.experts import has_experts
from megapipe.spec.memory import ELEMENT_BYTES, FULL_BYTES, Precision, boundary_bytes
from megapipe.spec.parameters import LayerSpec

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
DOUBLE_BYTES = 8
"""Bytes of a float64: counts, norms and losses of a step."""
LOSS_STATISTICS = 3
"""Numbers a row by which tensor ranks find the softmax over all columns: maximum, sum, the label's logit."""


@dataclass(frozen=True)
class Exchange:
    """One kind of call that all members of a group make.

    elements: of the whole buffer, over all members: what an all-reduce sums, what an all-gather leaves behind, what a
    reduce-scatter starts from; of an all-to-all what each member gives; of a send the message. element_bytes: bytes of
    one. calls: how often.
    """

    operation: Operation
    elements: int
    element_bytes: int
    calls: int = 1

    @property
    def bytes(self) -> int:
        """Of the buffers of all calls together."""
        return self.elements * self.element_bytes * self.calls

    def sent(self, members: int) -> float:
        """Bytes that each of `members` ranks sends, by rings, which send least.

        An all-reduce is a reduce-scatter and an all-gather, (members - 1) / members of the buffer each.
        """
        if self.operation == "send":
            return float(self.bytes)
        passes = 2 if self.operation == "all_reduce" else 1
        return passes * self.bytes * (members - 1) / members


def total_sent(exchanges: Iterable[Exchange], members: int) -> float:
    """Bytes that each member sends in all of them."""
    return sum(exchange.sent(members) for exchange in exchanges)


def tensor_exchanges(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    *,
    tensor_size: int,
    predictions: int | None = None,
    forwards: int = 1,
) -> list[Exchange]:
    """What the tensor ranks exchange for one micro-batch through one layer, forward and backward.

    A block all-reduces its residual stream [b, s, h] behind attention and MLP forward, and ahead of both backward:
    4 times 2 (t - 1) / t of b s h elements sent, the 8 b s h (t - 1) / t of section 3.2. The embedding does so once
    forward, the head once backward for the rows that it predicts, and its ranks exchange 12 bytes a row.

    predictions: tokens of a sample that the head predicts, by default all. forwards: how often the layer runs forward:
    2 where it is recomputed whole.
    """
    size = ELEMENT_BYTES[precision]
    stream = micro_size * sequence_length * model.hidden_size
    if layer.kind == "embedding":
        return [Exchange("all_reduce", stream, size)]
    if layer.kind == "block":
        found = [Exchange("all_reduce", stream, size, 2 * forwards + 2)]
        if model.qk_norm:  # gradients of two weights that every rank applies to heads of its own
            found.append(Exchange("all_reduce", model.head_dim, size, 2))
        if has_experts(layer):  # gradients of shares, each from the rank of its expert
            shares = micro_size * sequence_length * model.experts_per_token
            found.append(Exchange("all_reduce", shares, FULL_BYTES))
        return found
    rows = micro_size * (sequence_length if predictions is None else predictions)
    return [
        Exchange("all_reduce", rows * model.hidden_size, size),
        Exchange("all_gather", tensor_size * LOSS_STATISTICS * rows, FULL_BYTES),
    ]


MESSAGES_IN_FLIGHT = 4
"""Messages of one stage boundary and direction that a rank may have sent while no receive has ended: over NCCL their
tensors are kept until then."""


def fp8_exchange(forwards: int = 1, chunks: int = 1) -> Exchange:
    """What the tensor ranks exchange for one micro-batch through one block in fp8 with a scale for each operand: the
    largest magnitudes of both operands of its four products, forward and for the gradients of input and weight.

    forwards: as in `tensor_exchanges`. chunks: parts of the tokens, under sequence parallelism, that the products of
    the forward and of the input's gradient take one after the other.
    """
    return Exchange("all_reduce", 2, FULL_BYTES, 4 * ((forwards + 1) * chunks + 1))


def pipeline_exchange(
    model: ModelConfig, micro_size: int, sequence_length: int, precision: Precision, num_messages: int = 1
) -> Exchange:
    """Messages over one boundary between stages on different ranks: b s h elements a micro-batch and direction."""
    size = ELEMENT_BYTES[precision]
    elements = boundary_bytes(model, micro_size, sequence_length, precision) // size
    return Exchange("send", elements, size, num_messages)


def replica_exchanges(
    elements: int, precision: Precision, *, stage: Literal[0, 1, 2, 3] = 0, gathers: int = 2, reductions: int = 1
) -> list[Exchange]:
    """What the data-parallel replicas exchange in one step for a unit.

    elements: of its flat buffer (`spec.memory.stored_elements`). stage: of ZeRO (Rajbhandari et al. 2020, arXiv
    1910.02054, section 7). 0 sums gradients, 2 of the unit's size sent; 1 and 2 scatter their sums and gather the
    updated weights, 2 again; 3 gathers weights ahead of forwards and of backwards: 3. gathers, reductions: of stage 3,
    and of stages 2 and 3, in one step; more than two and one where a schedule comes back to a unit whose buffers have
    been given up. Gradients are fp32.
    """
    if stage == 0:
        return [Exchange("all_reduce", elements, FULL_BYTES)]
    return [
        Exchange("reduce_scatter", elements, FULL_BYTES, 1 if stage == 1 else reductions),
        Exchange("all_gather", elements, ELEMENT_BYTES[precision], gathers if stage == 3 else 1),
    ]


def scalar_exchanges(num_parameters: int, loss_terms: int = 1, updates: int = 1) -> list[Exchange]:
    """What all ranks exchange in one step besides, in float64: a count of tokens for each term of the loss and update,
    with flags for stop, save and a failed save; then every parameter's squared norm (0 where it is not the rank's) and
    the loss's terms."""
    return [
        Exchange("all_reduce", loss_terms * updates + 3, DOUBLE_BYTES),
        Exchange("all_reduce", num_parameters + loss_terms, DOUBLE_BYTES),
    ]


def merged(exchanges: Iterable[Exchange]) -> dict[Operation, tuple[int, int, int]]:
    """By operation: calls, elements and bytes of all of them."""
    found: dict[Operation, tuple[int, int, int]] = {}
    for each in exchanges:
        calls, elements, total = found.get(each.operation, (0, 0, 0))
        found[each.operation] = (calls + each.calls, elements + each.calls * each.elements, total + each.bytes)
    return found


def repeated(exchanges: Sequence[Exchange], times: int) -> list[Exchange]:
    """Each of them `times` times as often."""
    return [Exchange(each.operation, each.elements, each.element_bytes, each.calls * times) for each in exchanges]
