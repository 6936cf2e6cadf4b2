"""What every order of samples answers."""

from typing import Protocol

import numpy as np
import numpy.typing as npt


class SampleSet(Protocol):
    """Samples of one split, named by ordinals: how many samples a run consumed before.

    Lengths and boundaries are known without reading a token, so every rank can have them. Safe to use from threads.
    """

    sequence_length: int
    """Predictions of a full sample."""

    def __len__(self) -> int:
        """Samples until the first one comes again, or until an order that repeats nothing ends."""
        ...

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Predictions in samples, int64 of the shape of `ordinals`, at most sequence_length."""
        ...

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Token ids of samples, int64 [..., sequence_length + 1]; behind a sample's last label stand zeros."""
        ...

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """For each sample the places p, 0 < p <= its labels, in its tokens at which a document begins, ascending."""
        ...
