"""Floating-point operations of a layer, counted from its matrix products alone.

A product of [m, k] by [k, n] counts 2 m k n. Not counted are norms, activations, softmax, dropout, biases, rotations,
table look-ups and the recomputation inside fused attention: these are the model's FLOPs (Narayanan et al., 2021,
arXiv 2104.04473, equation 3), the numerator of MFU. Causal attention counts in full, as that paper does: every query
meets all keys of the sequence, or all of its sliding window. Of experts those count that a token goes to.
"""

from dataclasses import dataclass

from megapipe.config.model import ModelConfig
from megapipe.spec.experts import used_elements
from megapipe.spec.parameters import LayerSpec


@dataclass(frozen=True)
class Flops:
    """FLOPs of one micro-batch through one layer, over all tensor-parallel ranks together.

    backward_input: gradients of activations. backward_weight: gradients of weights. A whole backward is their sum and
    what is `recomputed` of the forward.
    """

    forward: int
    backward_input: int
    backward_weight: int
    recomputed: int = 0

    @property
    def total(self) -> int:
        """Forward and backward, nothing recomputed."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def executed(self) -> int:
        """Forward and backward with what is recomputed: the measure of a stage's work, not of the model's."""
        return self.total + self.recomputed


ONCE_A_SAMPLE = ("pooler.weight", "sentence.weight")
"""Matrices of a head that multiply one row of each sample."""


def layer_flops(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    predictions: int | None = None,
    recompute_logits: bool = False,
) -> Flops:
    """FLOPs of a micro-batch of `micro_size` samples of `sequence_length` tokens; vocabulary padding is not counted.

    predictions: tokens of a sample that the head predicts, by default all. recompute_logits: the head computes them
    again in the backward.

    Attention's two products have no weights: their backward is four products, all in the input half (Qi et al., 2023,
    arXiv 2401.10241, table 1).
    """
    if layer.kind == "embedding":
        return Flops(0, 0, 0)
    if layer.kind == "head":
        rows = sequence_length if predictions is None else predictions
        projections = (
            2
            * micro_size
            * sum(
                spec.num_elements * (1 if path in ONCE_A_SAMPLE else rows)
                for path, spec in layer.parameters.items()
                if spec.matrix or path == "output.weight"
            )
        )
        logits = 2 * micro_size * rows * layer.parameters["output.weight"].num_elements
        return Flops(projections, projections, projections, logits if recompute_logits else 0)
    projections = 2 * micro_size * sequence_length * _multiplied_elements(model, layer)
    attention = _attention_flops(model, micro_size, sequence_length)
    return Flops(projections + attention, projections + 2 * attention, projections)


def model_flops_per_token(
    model: ModelConfig, layers: tuple[LayerSpec, ...], sequence_length: int, predictions: int | None = None
) -> int:
    """FLOPs of forward and backward per trained token: times tokens per second, over the devices' peak, gives MFU."""
    per_sample = sum(layer_flops(model, layer, 1, sequence_length, predictions).total for layer in layers)
    return per_sample // sequence_length


def _multiplied_elements(model: ModelConfig, layer: LayerSpec) -> int:
    """Elements of all weights that every token's activations are multiplied by: of experts its own alone."""
    return sum(used_elements(model, layer, path, spec) for path, spec in layer.parameters.items() if spec.matrix)


def _attention_flops(model: ModelConfig, micro_size: int, sequence_length: int) -> int:
    """Queries by keys, and probabilities by values."""
    keys = sequence_length if model.sliding_window is None else min(model.sliding_window, sequence_length)
    return 2 * 2 * micro_size * model.num_heads * sequence_length * keys * model.head_dim
