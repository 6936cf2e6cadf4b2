"""The model, the batch and the optimizer, which are the same for all contestants."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from plain_gpt import Shape
from torch import Tensor

LEARNING_RATE, CLIP, BETAS, DECAY = 1e-4, 1.0, (0.9, 0.95), 0.1

Step = Callable[[], float]
"""Runs one optimizer step of this rank; returns the mean loss of the batch, or of this rank's part of it."""


@dataclass(frozen=True)
class Setting:
    """A model, and each rank's part of a step's batch: num_microbatches micro-batches of micro_size samples."""

    shape: Shape
    micro_size: int
    num_microbatches: int

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Return (tokens, labels) [b, s] of every micro-batch of a rank."""
        size = (self.num_microbatches, self.micro_size, self.shape.sequence_length + 1)
        tokens = torch.randint(self.shape.vocabulary_size, size, generator=torch.Generator().manual_seed(rank))
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


SIZES = {
    "toy": Setting(Shape(512, 2, 64, 2, 32), 2, 2),
    "12m": Setting(Shape(8192, 5, 384, 6, 256), 2, 2),
}
"""12m: a model like the quickstart's, with 12.1 million parameters. toy: a tiny model, to try the script."""
