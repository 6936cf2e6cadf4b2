"""What a mixture of experts changes in the formulas of a block, on one of the tensor ranks that share the experts.

Which experts tokens choose, the data decide. Counted are rows shared out evenly: k tokens' rows over t ranks are
tokens x k / t on each. A rank whose experts are chosen more often keeps more and computes longer by the same ratio.
"""

import math
from collections.abc import Sequence

from megapipe.config.model import ModelConfig
from megapipe.spec.gpt import ROUTER
from megapipe.spec.parameters import LayerSpec, ParameterSpec

EXPERT_MATRICES = ("mlp.up.weight", "mlp.down.weight")
OF_EXPERTS = (*EXPERT_MATRICES, "mlp.up.bias", "mlp.down.bias")
INDEX_BYTES = 8
"""Bytes of the number of a token, a row or an expert."""
SCORE_BYTES = 4
"""Bytes of a score and a share: fp32 in every precision."""


def has_experts(layer: LayerSpec) -> bool:
    """Whether a layer is a block with experts."""
    return ROUTER in layer.parameters


def used_elements(model: ModelConfig, layer: LayerSpec, path: str, spec: ParameterSpec) -> int:
    """Elements of a parameter that one token's hidden state meets: of the experts' those of the chosen ones."""
    if model.num_experts is not None and path in OF_EXPERTS and has_experts(layer):
        return spec.num_elements // model.num_experts * model.experts_per_token
    return spec.num_elements


def active_parameters(model: ModelConfig, layers: Sequence[LayerSpec]) -> int:
    """Parameters that one token uses, tied ones once: all but those of the experts that it does not choose."""
    found = {
        spec.name: used_elements(model, layer, path, spec)
        for layer in layers
        for path, spec in layer.parameters.items()
    }
    return sum(found.values())


def rows_of_rank(model: ModelConfig, tokens: int, tensor_size: int) -> int:
    """Rows that the experts of one rank work on, evenly shared out. tokens: of a micro-batch on all tensor ranks."""
    return tokens * model.experts_per_token // tensor_size


def load_variations(model: ModelConfig, squared_loads: Sequence[float], tokens: int) -> list[float]:
    """Of each block, the standard deviation of how many tokens its experts got over their mean: 0 where all got as
    many, and the one that got most has at most 1 + variation x sqrt(experts - 1) times the mean.

    squared_loads: of each block the sum over its experts of squared loads, a load being what an expert got beyond the
    mean, times the number of experts. tokens: that the experts shared out.
    """
    pairs = tokens * model.experts_per_token
    return [math.sqrt(squares / (model.num_experts or 1)) / pairs for squares in squared_loads]


def expert_bytes(model: ModelConfig, tokens: int, size: int, *, tensor_size: int, shards: int, again: bool) -> int:
    """What one rank keeps of a block's experts from forward to backward, behind the router's input.

    Of every row its input, the activation's one or two inputs and, unless made `again`, its result, the expert's
    result and its share; of every token its scores and shares, and whose rows are which. shards: tensor ranks that
    share the tokens outside of the experts.
    """
    rows, choices = rows_of_rank(model, tokens, tensor_size), tokens * model.experts_per_token
    inner = model.ffn_size * ((2 if model.activation == "swiglu" else 1) + (not again))
    kept = rows * ((2 * model.hidden_size + inner + 1) * size + INDEX_BYTES) + choices * INDEX_BYTES
    scores = tokens * (model.num_experts or 0) * SCORE_BYTES
    chosen = choices * ((SCORE_BYTES if model.normalize_expert_shares else 0) + INDEX_BYTES)
    return kept + (scores + chosen) // shards


def waiting_expert_bytes(
    model: ModelConfig, tokens: int, size: int, *, tensor_size: int, shards: int, again: bool
) -> int:
    """What one rank keeps of them between the halves of a split backward, beside the router's input: its scores'
    gradient, and of both products the input and the gradient of the output. Arguments as in `expert_bytes`."""
    up = model.ffn_size * (2 if model.activation == "swiglu" else 1)
    row = 2 * model.hidden_size + up + (up if again else model.ffn_size)
    scores = tokens * (model.num_experts or 0) * SCORE_BYTES // shards
    return rows_of_rank(model, tokens, tensor_size) * row * size + scores
