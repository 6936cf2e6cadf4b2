"""Where each token's document begins: what attention within documents and reset positions follow from."""

from collections.abc import Sequence

import numpy as np


def document_starts(boundaries: Sequence[np.ndarray], length: int) -> np.ndarray:
    """For every token of b samples the place in its sample where its document begins: int64 [b, length].

    boundaries: of each sample the places at which documents begin, 0 left out. A document that began before the sample
    begins at 0. Token i may attend to tokens [starts[i], i] and stands at position i - starts[i] of its document.
    """
    starts = np.zeros((len(boundaries), length), dtype=np.int64)
    for row, places in zip(starts, boundaries, strict=True):
        inside = places[places < length]
        row[inside] = inside
    return np.asarray(np.maximum.accumulate(starts, axis=1))
