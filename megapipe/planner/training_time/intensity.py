"""Arithmetic intensity of every kind of traffic of a training, in FLOPs per byte sent, beside what a link needs.

After the analysis of Lamy-Poirier (2021), "Layered gradient accumulation and modular pipeline parallelism", arXiv
2106.02679; the constants are counted here, for 16-bit weights, gradients and activations and a device's FLOPs with
every layer's forward recomputed: 8 a token and parameter, of which 6 in the backward, so 96 h^2 a token and layer.
"""

from dataclasses import dataclass

from megapipe.planner.checks import require_counts, require_positive

GPT3_PARAMETERS = 175e9
GPT3_BATCH_TOKENS = 3.2e6
"""Brown et al. (2020), arXiv 2005.14165, table 2.1: the batch size in tokens of the largest model."""


@dataclass(frozen=True)
class Transformer:
    """Layers L of hidden size h with `num_heads` heads, on sequences of s tokens; embeddings are left out.

    Raises ValueError when a field is not an integer of at least 1.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int

    def __post_init__(self) -> None:
        require_counts(dict(vars(self)))

    @property
    def parameters(self) -> int:
        """Weights of all layers, biases and norms left out: 12 L h^2."""
        return 12 * self.num_layers * self.hidden_size**2

    @property
    def checkpoint_bytes(self) -> int:
        """Inputs of all layers for one sequence, 16 bits a number: 2 s h L."""
        return 2 * self.sequence_length * self.hidden_size * self.num_layers


def link_threshold(peak_flops: float, bytes_per_second: float) -> float:
    """FLOPs that a device computes while its link carries a byte: traffic of a higher intensity can be hidden.

    peak_flops: of a device. bytes_per_second: of its link, both directions together as its data sheet states them.
    Raises ValueError when one is not above 0.
    """
    require_positive({"peak FLOP/s": peak_flops, "bytes per second": bytes_per_second})
    return peak_flops / bytes_per_second


def data_intensity(model: Transformer, micro_size: int, microbatches: int = 1) -> float:
    """Of the gradients' all-reduce, 4 bytes a parameter beside a backward of 6 FLOPs a token: 1.5 s b m.

    micro_size: b, sequences. microbatches: m, whose backward the all-reduce overlaps; 1 for usual accumulation, which
    has the last one's alone, all of them for layered accumulation.
    """
    return 1.5 * model.sequence_length * micro_size * microbatches


def partitioned_intensity(model: Transformer, micro_size: int, microbatches: int = 1) -> float:
    """Of a partitioned state, two restores and one reduction of 2 bytes each beside 8 FLOPs a token: 4/3 s b m.

    microbatches: m, for which a layer is restored once; 1 for usual accumulation, which restores it for each of them,
    all of them for layered accumulation.
    """
    return 4 / 3 * model.sequence_length * micro_size * microbatches


def pipeline_intensity(model: Transformer, layers_per_chunk: float) -> float:
    """Of activations and their gradients, 4 h bytes a token, sent once per chunk of layers: 24 h times its layers.

    layers_per_chunk: L / p in a contiguous pipeline, as few as 1 in the modular one.
    """
    return 24 * model.hidden_size * layers_per_chunk


def tensor_intensity(model: Transformer, tensor: int) -> float:
    """Of the six all-reduces of a layer among `tensor` devices, recomputation's two among them: 4 h / (n_a - 1).

    They do not overlap with compute: threshold over intensity is their share on top of it. Infinite for one device.
    """
    return 4 * model.hidden_size / (tensor - 1) if tensor > 1 else float("inf")


def critical_batch_tokens(parameters: float) -> float:
    """Tokens of the batch beyond which larger ones no longer save steps in proportion.

    Grows with the cube root of the number of parameters, here through GPT-3's batch: 572 P^(1/3).
    Raises ValueError when `parameters` is not above 0.
    """
    require_positive({"parameters": parameters})
    return float(GPT3_BATCH_TOKENS * (parameters / GPT3_PARAMETERS) ** (1 / 3))
