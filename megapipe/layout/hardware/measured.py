"""What was measured on a machine: layers of one model, collectives, and what busy neighbours cost.

All times are seconds. `megapipe.calibration` fills this in, a hardware file carries it, `planner.measured`
answers from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LAYER_KINDS = ("embedding", "block", "head")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
TRANSPORTS = ("gloo", "shared_memory", "nccl")
LayerKind = Literal["embedding", "block", "head"]
Transport = Literal["gloo", "shared_memory", "nccl"]


@dataclass(frozen=True)
class LayerRow:
    """Seconds of one micro-batch in a layer on one rank.

    tensor, context: ranks that the layer is shared by. micro_size: samples. backward: whole; backward_input and
    backward_weight: its halves where they run apart.
    """

    kind: LayerKind
    tensor: int
    context: int
    micro_size: int
    forward: float
    backward: float
    backward_input: float
    backward_weight: float


@dataclass(frozen=True)
class MeasuredLayer(LayerRow):
    """The rank's own work, nothing else running, communication left out; both halves are slower than the whole.

    recompute: the forward again, 0 for layers that never do.
    """

    recompute: float


@dataclass(frozen=True)
class MeasuredWait(LayerRow):
    """What ranks that share the layer wait in it for one another, beside their own work.

    Messages, and that ranks come to each other early and late by turns.
    """


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective of `ranks` ranks of one node: a call takes latency + bytes / bandwidth.

    Bytes are those of the whole buffer, as `spec.ops.Exchange` counts them. over: what carries it. busy:
    processor seconds that a rank spends in a second of it, 0 where a device of its own does the work.
    """

    operation: str
    ranks: int
    over: Transport
    latency: float
    bandwidth: float
    busy: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Of one call."""
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Contention:
    """How many times longer the same work takes while `ranks` ranks of a node compute at once."""

    ranks: int
    factor: float


@dataclass(frozen=True)
class Measurements:
    """What `profile` found.

    date: ISO, of the day. torch: version. shape: what the layers' times depend on (`planner.measured.shape_of`).
    update_seconds: of an optimizer step with its gradient norm, per element that a rank updates. action_seconds: that
    the engine takes around every forward and backward. contention: ascending in ranks, the first for one rank. waits:
    inside layers that ranks share, as far as the machine has ranks for that; where there is no row, models tell.
    """

    date: str
    torch: str
    shape: Mapping[str, str]
    update_seconds: float
    action_seconds: float
    layers: tuple[MeasuredLayer, ...]
    contention: tuple[Contention, ...] = (Contention(1, 1.0),)
    waits: tuple[MeasuredWait, ...] = ()

    def slowdown(self, ranks: float) -> float:
        """Factor while that many ranks compute: in between by straight lines, beyond the last by its share a rank."""
        before = self.contention[0]
        for each in self.contention:
            if each.ranks >= ranks:
                if each.ranks == before.ranks:
                    return each.factor
                share = (ranks - before.ranks) / (each.ranks - before.ranks)
                return before.factor + share * (each.factor - before.factor)
            before = each
        return before.factor * ranks / before.ranks
