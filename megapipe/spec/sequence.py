"""What tensor ranks exchange where they share the tokens between their matrices (sequence parallelism)."""

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.spec.communication import LOSS_STATISTICS, Exchange, Operation, repeated
from megapipe.spec.experts import INDEX_BYTES, SCORE_BYTES, has_experts
from megapipe.spec.memory import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.parameters import LayerSpec


def sequence_exchanges(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    *,
    tensor_size: int,
    predictions: int | None = None,
    forwards: int = 1,
    halves: bool = False,
    chunks: int = 1,
) -> list[Exchange]:
    """What the tensor ranks exchange for one micro-batch through one layer, forward and backward, in place of
    `communication.tensor_exchanges` (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

    A block gathers its residual stream [b, s, h] ahead of attention and MLP and scatters their sums behind them; the
    backward does the reverse, and gathers both inputs again for the gradients of the weights: 10 b s h (t - 1) / t
    elements sent, two more than tensor parallelism's. The weight half of a split backward gathers the gradients of
    the sums a second time too. The embedding scatters its sum, and a head gathers what it reads. Experts keep the rows
    that they picked of what was gathered, and gather nothing again; with the tokens they gather what these chose.

    sequence_length: tokens of a sample that the tensor ranks have together. predictions, forwards: as in
    `tensor_exchanges`. halves: the backward is split. chunks: pieces in which tokens are gathered and scattered.
    """
    size, hidden = ELEMENT_BYTES[precision], model.hidden_size
    stream = micro_size * sequence_length * hidden

    def of(operation: Operation, passes: int, pieces: int = 1) -> Exchange:
        return Exchange(operation, stream // pieces, size, passes * pieces)

    if layer.kind == "embedding":
        return [of("reduce_scatter", 1), of("all_gather", 1)]
    if layer.kind == "block" and has_experts(layer):
        choices = micro_size * sequence_length * model.experts_per_token
        attention = [of("all_gather", 1, chunks), of("reduce_scatter", 1, chunks)]
        experts = [of("all_gather", 1), of("reduce_scatter", 1)]
        chosen = [Exchange("all_gather", choices, SCORE_BYTES), Exchange("all_gather", choices, INDEX_BYTES)]
        backward = [of("all_gather", 2 if halves else 1), Exchange("reduce_scatter", choices, SCORE_BYTES)]
        return [*repeated([*attention, *experts, *chosen], forwards), *attention, *experts, *backward]
    if layer.kind == "block":
        forward = [of("all_gather", 2, chunks), of("reduce_scatter", 2, chunks)]
        again = of("all_gather", 4 if halves else 2)
        return [*repeated(forward, forwards), *forward, again]
    rows = micro_size * (sequence_length if predictions is None else predictions)
    statistics = Exchange("all_gather", tensor_size * LOSS_STATISTICS * rows, FULL_BYTES)
    if isinstance(model, BertModelConfig):  # behind the gather every rank does the same, and keeps its own gradient
        return [of("all_gather", 1), Exchange("all_reduce", rows * hidden, size), statistics]
    return [of("all_gather", 2), of("reduce_scatter", 1), statistics]


def partial_elements(model: ModelConfig, layer: LayerSpec) -> int:
    """Elements of a layer's weights that every tensor rank holds whole and uses on its own tokens: their gradients are
    summed over the ranks, in fp32, ahead of any other sum."""
    whole = {path: spec for path, spec in layer.parameters.items() if spec.partition_axis is None}
    if layer.kind == "head" and isinstance(model, BertModelConfig):
        whole = {path: spec for path, spec in whole.items() if path.startswith("norm.")}
    return sum(spec.num_elements for spec in whole.values())
