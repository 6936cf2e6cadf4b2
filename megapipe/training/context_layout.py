"""Which tokens of its samples a rank trains on."""

from dataclasses import dataclass

import numpy as np

from megapipe.config.run import PretrainConfig
from megapipe.layout.token_order import token_numbers
from megapipe.layout.validation import token_order
from megapipe.parallel.mesh import Mesh


def runs_ring(config: PretrainConfig) -> bool:
    """Whether attention is a ring's, which has kernels and paths of its own."""
    return config.parallel.context > 1 and config.parallel.context_attention == "ring"


@dataclass(frozen=True)
class HeldTokens:
    """The tokens of every sample that a rank holds, and so the part of every array that it needs.

    numbers: int64 [s], their places in a sample, ascending; None for all. gathers: attention gathers whole samples.
    """

    numbers: np.ndarray | None = None
    gathers: bool = False

    @classmethod
    def of(cls, config: PretrainConfig, mesh: Mesh) -> "HeldTokens":
        """Those of this rank."""
        size = mesh.size("context")
        if size == 1:
            return cls()
        length = config.data.sequence_length
        numbers = token_numbers(token_order(config), mesh.coordinate("context"), size, length)
        return cls(numbers, config.parallel.context_attention == "all_to_all")

    def part(self, array: np.ndarray) -> np.ndarray:
        """Of an array [b, whole length] its columns [b, s] of the tokens in hand."""
        return array if self.numbers is None else array[:, self.numbers]

    @property
    def has_first(self) -> bool:
        """Whether the first token of every sample is in hand."""
        return self.numbers is None or bool(self.numbers[0] == 0)

    def predictions(
        self, positions: np.ndarray, labels: np.ndarray, loss_mask: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The predictions [b, n] about tokens in hand, of those [b, p] about all: positions among the tokens in hand,
        labels and loss mask. n is the largest number of a sample's, at least 1; length: of a whole sample."""
        if self.numbers is None:
            return positions, labels, loss_mask
        place = np.full(length, -1, dtype=np.int64)
        place[self.numbers] = np.arange(len(self.numbers))
        local = place[positions]
        owned = (local >= 0) & (loss_mask > 0)
        most = max(1, int(owned.sum(axis=1).max()))
        first = np.argsort(~owned, axis=1, kind="stable")[:, :most]
        local, labels, loss_mask, owned = (
            np.take_along_axis(each, first, axis=1) for each in (local, labels, loss_mask, owned)
        )
        return np.where(owned, local, 0), labels, np.where(owned, loss_mask, 0).astype(loss_mask.dtype)


ALL_TOKENS = HeldTokens()
