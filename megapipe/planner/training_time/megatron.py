"""Megatron-LM's closed forms of model size, work and training time.

Narayanan et al. (2021), "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv
2104.04473 (SC21). Sections and equations below are that paper's.
"""

from dataclasses import dataclass

from megapipe.planner.checks import require_counts, require_positive


@dataclass(frozen=True)
class GptShape:
    """A GPT model: layers l, hidden size h, vocabulary V and sequence length s, both in tokens.

    Raises ValueError when one of them is not an integer of at least 1.
    """

    num_layers: int
    hidden_size: int
    vocabulary_size: int
    sequence_length: int

    def __post_init__(self) -> None:
        require_counts(dict(vars(self)))

    @property
    def parameters(self) -> float:
        """Number of parameters: 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)), section 5.1, equation 2."""
        layers, hidden = self.num_layers, self.hidden_size
        rest = 13 / (12 * hidden) + (self.vocabulary_size + self.sequence_length) / (12 * layers * hidden)
        return 12 * layers * hidden**2 * (1 + rest)

    def flops(self, batch_size: int) -> float:
        """FLOPs of an iteration over `batch_size` sequences, every layer's forward recomputed.

        96 B s l h^2 (1 + s / (6 h) + V / (16 l h)), section 5.1, equation 3.
        """
        require_counts({"batch size": batch_size})
        layers, hidden, length = self.num_layers, self.hidden_size, self.sequence_length
        rest = length / (6 * hidden) + self.vocabulary_size / (16 * layers * hidden)
        return 96 * batch_size * length * layers * hidden**2 * (1 + rest)


def training_seconds(parameters: float, tokens: float, devices: int, device_flops: float) -> float:
    """End-to-end training time in seconds, 8 T P / (n X): section 5.1, equation 4.

    Args:
        parameters: P, of the model. tokens: T, that it is trained on. devices: n.
        device_flops: X, the FLOP/s that each device achieves, recomputation counted.

    Raises:
        ValueError: a value that is not above 0.
    """
    require_positive({"parameters": parameters, "tokens": tokens, "FLOP/s of a device": device_flops})
    require_counts({"devices": devices})
    return 8 * tokens * parameters / (devices * device_flops)
