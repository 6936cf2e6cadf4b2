"""What all contestants share: the model, the batch, the optimizer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from plain_gpt import Shape
from torch import Tensor

LEARNING_RATE, CLIP, BETAS, DECAY = 1e-4, 1.0, (0.9, 0.95), 0.1

Step = Callable[[], float]
"""One optimizer step of this rank; returns the mean loss of the batch, or of this rank's share of it."""


@dataclass(frozen=True)
class Setting:
    """A model and the share of a step's batch that each rank computes: num_microbatches of micro_size samples."""

    shape: Shape
    micro_size: int
    num_microbatches: int

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """(tokens, labels) [b, s] of every micro-batch of a rank."""
        size = (self.num_microbatches, self.micro_size, self.shape.sequence_length + 1)
        tokens = torch.randint(self.shape.vocabulary_size, size, generator=torch.Generator().manual_seed(rank))
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


SIZES = {
    "toy": Setting(Shape(512, 2, 64, 2, 32), 2, 2),
    "12m": Setting(Shape(8192, 5, 384, 6, 256), 2, 2),
}
"""12m: the quickstart's kind of model, 12.1 million parameters; toy tries the script."""
