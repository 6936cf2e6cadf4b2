"""Sizes of the trained models."""

from dataclasses import dataclass

from plain_gpt import Shape


@dataclass(frozen=True)
class Training:
    """A model, and the batch of one step: num_microbatches micro-batches of micro_size samples."""

    shape: Shape
    micro_size: int
    num_microbatches: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens in one step."""
        return self.num_microbatches * self.micro_size * self.shape.sequence_length


MODELS = {
    "toy": Training(Shape(512, 2, 64, 2, 32), 2, 2),
    "5m": Training(Shape(8192, 4, 256, 4, 256), 4, 4),
    "124m": Training(Shape(50304, 12, 768, 12, 1024), 16, 4),
    "350m": Training(Shape(50304, 24, 1024, 16, 2048), 8, 4),
    "1.3b": Training(Shape(50304, 24, 2048, 16, 2048), 4, 4),
}
"""124m is the smallest GPT-2, and 350m and 1.3b are GPT-3 Medium and XL (Brown et al. 2020, 2005.14165, table 2.1),
with the vocabulary padded to a multiple of 128. 5m is a size for CPUs; toy is for trying the script."""
