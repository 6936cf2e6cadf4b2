"""A transformer of equal blocks for the PipeDream-2BW planner, by closed forms instead of a profile.

The paper's models (Narayanan et al., 2021, arXiv 2006.09503, section 5) have 16-bit weights beside fp32 masters under
Adam. What appendix A calls `|W|` is per version here 16 bytes a parameter, which makes two versions 32.
"""

from dataclasses import dataclass, replace

from megapipe.planner.checks import require_counts, require_positive
from megapipe.planner.pipedream.memory import Footprint, stage_bytes
from megapipe.planner.pipedream.two_buffered import BlockModel, Machine

VERSION_BYTES = 16
"""Of a parameter: 16-bit weight and gradient, fp32 master weight and Adam's two moments."""
GRADIENT_BYTES = 2


@dataclass(frozen=True)
class TransformerShape:
    """Layers l of hidden size h with a heads, on sequences of s tokens with a vocabulary of V tokens."""

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int = 512
    vocabulary_size: int = 51200

    def __post_init__(self) -> None:
        require_counts(dict(vars(self)))

    @property
    def parameters(self) -> int:
        """Of all blocks and the embeddings: 12 l h^2 + (V + s) h, biases and norms left out."""
        blocks = 12 * self.num_layers * self.hidden_size**2
        return blocks + (self.vocabulary_size + self.sequence_length) * self.hidden_size

    def footprint(self, micro_size: int) -> Footprint:
        """Bytes at a micro-batch of `micro_size` sequences.

        A layer's activations are s b (34 h + 5 a s): Korthikanti et al. (2022), arXiv 2205.05198, equation 1.
        """
        tokens = micro_size * self.sequence_length
        layer = tokens * (34 * self.hidden_size + 5 * self.num_heads * self.sequence_length)
        return Footprint(VERSION_BYTES * self.parameters, self.num_layers * layer, 2 * tokens * self.hidden_size)

    def block_flops(self, micro_size: int) -> float:
        """Of one layer's forward and backward: 72 b s h^2 (1 + s / (6 h)), arXiv 2104.04473, section 5.1."""
        length, hidden = self.sequence_length, self.hidden_size
        return 72 * micro_size * length * hidden**2 * (1 + length / (6 * hidden))

    def blocks(self, device_flops: float) -> BlockModel:
        """The planner's model on devices that achieve `device_flops` FLOP/s at every micro-batch size.

        Raises ValueError when that is not above 0.
        """
        require_positive({"FLOP/s of a device": device_flops})
        return BlockModel(
            self.num_layers,
            lambda micro_size: self.block_flops(micro_size) / device_flops,
            self.footprint,
            GRADIENT_BYTES * self.parameters,
        )


def largest_that_fits(shape: TransformerShape, machine: Machine) -> TransformerShape:
    """The model of most layers of the shape's width that 2BW trains: one stage a device, recomputed, one sequence.

    Appendix A's memory alone decides, in whole layers a stage.

    Raises:
        ValueError: one layer a stage is too much already.
    """
    fitting = None
    layers = machine.devices
    while True:
        trial = replace(shape, num_layers=layers)
        memory = stage_bytes(trial.footprint(1), machine.devices, "recomputed")
        if memory > machine.memory_bytes:
            break
        fitting, layers = trial, layers + machine.devices
    if fitting is None:
        raise ValueError(
            f"a stage of one layer of hidden size {shape.hidden_size} needs {memory:.4g} bytes, but a device has "
            f"{machine.memory_bytes:.4g}; use more memory or a narrower model"
        )
    return fitting
