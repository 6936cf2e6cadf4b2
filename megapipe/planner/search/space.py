"""What a search may vary."""

from dataclasses import dataclass
from typing import Literal

ZeroStage = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"]

FIELDS = (
    "parallel.data",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.context",
    "parallel.sequence",
    "batch.micro_size",
    "schedule.name",
    "schedule.chunks",
    "zero.stage",
    "recompute.method",
)
"""Fields of the configuration that a search sets unless they are pinned; it leaves all others as they are."""


@dataclass(frozen=True)
class SearchSpace:
    """The values that a search tries where a field is not pinned.

    Sizes of tensor, pipeline, context and data parallelism are all divisors of the devices, micro-batch sizes all
    divisors of a replica's batch, numbers of chunks all up to the layers a rank; the bounds here cut these down.
    max_context: 1 leaves samples whole, as shorter samples than some tens of thousands of tokens never need it.
    schedules: names of pipeline schedules. 2bw and pipedream train with older weights, so they are left to the caller
    to name.
    """

    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b")
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    sequence: tuple[bool, ...] = (False, True)
    max_tensor: int | None = None
    max_pipeline: int | None = None
    max_context: int = 1
    max_micro_size: int | None = 64
    max_chunks: int | None = 8
