"""A checkpoint that is written: tensors one by one, into a folder that appears when it is whole."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from megapipe.conversion.contents import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Largest file of a Hugging Face folder, as its users know it."""


@dataclass(frozen=True)
class TargetOptions:
    """How a checkpoint is laid out, where a format leaves it open.

    max_shard_bytes: largest file of weights (one tensor may exceed it). tensor, pipeline, chunks: ranks that share a
    Megatron-LM `torch` checkpoint, and model chunks on each stage. layer_names: of its norms, as its two layer
    implementations have them.
    """

    max_shard_bytes: int = SHARD_BYTES
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    layer_names: Literal["local", "transformer_engine"] = "local"


class Target(Protocol):
    """A checkpoint in the making, opened with the Contents that it is to hold.

    `finish` makes it durable and gives it its name; until then, and after `abandon`, there is nothing at its path.
    """

    def add(self, tensor: StoredTensor, values: "Tensor") -> None:
        """Take one tensor, in the order of the Contents. values: of the tensor's shape and dtype.

        Raises CheckpointError where it cannot be written.
        """

    def finish(self) -> list[str]:
        """Complete the folder. Returns what the user should know of it, a line each."""

    def abandon(self) -> None:
        """Remove what was written."""
