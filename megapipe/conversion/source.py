"""A checkpoint that is read: any slice of any tensor, when it is asked for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megapipe.conversion.contents import Contents, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

Index = tuple[slice, ...]
"""Part of a tensor: a slice with start and stop for each of its axes; the empty tuple is the whole."""


@dataclass(frozen=True)
class SourceOptions:
    """How a checkpoint may be read.

    allow_pickle: pickles may be read, in a confined process that accepts only listed classes.
    """

    allow_pickle: bool = False


class Source(Protocol):
    """An open checkpoint.

    contents: what it holds, known without reading an element.
    """

    contents: Contents

    def read(self, tensor: StoredTensor, index: Index = ()) -> "Tensor":
        """The elements of one of `contents.tensors`, in its dtype and in memory of their own, contiguous.

        No more is read and held than a few times what is asked for, or one tensor as the format stores it. Raises
        CheckpointError naming file and tensor where bytes cannot be read or are not those that were written.
        """

    def verify(self, tensor: StoredTensor) -> list[str]:
        """Read all of one of `contents.tensors`: what is wrong with it, one message for each bad file; empty if
        nothing is."""

    def close(self) -> None:
        """Close its files."""
