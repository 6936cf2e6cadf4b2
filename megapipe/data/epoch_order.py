"""From the number of a sample in the run to what it reads, epoch by epoch."""

from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from megapipe.data.errors import DataError
from megapipe.random.permutation import KeyedPermutation

FEW = 256
"""Ordinals that are remembered: a micro-batch's lengths, boundaries and tokens all ask for the same ones."""


class EpochOrder:
    """The order of `size` things: each epoch by a permutation keyed by (seed, epoch), or front to back, once.

    Ordinals past the end of an order that is not shuffled give `size`.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool) -> None:
        self.size = size
        self.shuffle = shuffle
        # Samples come one at a time, an epoch's permutation is the same for all of them.
        self._permutation = lru_cache(maxsize=2)(partial(KeyedPermutation, size, seed))
        self._few = lru_cache(maxsize=16)(self._found_bytes)

    def __call__(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Numbers of things for sample ordinals, int64 of the same shape. Raises DataError for negative ordinals."""
        ordinals = np.asarray(ordinals, dtype=np.int64)
        if ordinals.size > FEW:
            return self._found(ordinals)
        return np.frombuffer(self._few(ordinals.tobytes()), dtype=np.int64).reshape(ordinals.shape)

    def _found(self, ordinals: np.ndarray) -> np.ndarray:
        if ordinals.size and ordinals.min() < 0:
            raise DataError(f"sample ordinal {ordinals.min()} is negative; ordinals start at 0")
        if not self.shuffle:
            return np.asarray(np.minimum(ordinals, self.size))
        epochs, positions = np.divmod(ordinals, self.size)
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = self._permutation(int(epoch))(positions[here])
        return found

    def _found_bytes(self, ordinals: bytes) -> bytes:
        return self._found(np.frombuffer(ordinals, dtype=np.int64)).tobytes()
