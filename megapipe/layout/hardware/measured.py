"""Measurements of a machine: layers of one model, collectives, and the cost of busy neighbours.

All times are seconds. `megapipe.calibration` measures, a hardware file stores the results, and `planner.measured` uses
them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from megapipe.config.field_types import Bound, NaturalFloat, PositiveFloat
from megapipe.spec.ops import Operation

LayerKind = Literal["embedding", "block", "head"]
Transport = Literal["gloo", "shared_memory", "nccl"]
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
Count = Annotated[int, Bound(1, 10**9)]
_ISO_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True)
class LayerRow:
    """Seconds of one micro-batch in a layer on one rank.

    tensor, context: numbers of ranks over which the layer is sharded. micro_size: samples. backward: of the whole
    backward; backward_input and backward_weight: of its halves, run separately.
    """

    kind: LayerKind
    tensor: Count
    context: Count
    micro_size: Count
    forward: NaturalFloat
    backward: NaturalFloat
    backward_input: NaturalFloat
    backward_weight: NaturalFloat


@dataclass(frozen=True)
class MeasuredLayer(LayerRow):
    """Times of the rank's own work, without communication and with nothing else running; the two halves together are
    slower than the whole.

    recompute: time of a recomputed forward, 0 for layers that are never recomputed.
    """

    recompute: NaturalFloat


@dataclass(frozen=True)
class MeasuredWait(LayerRow):
    """Time that ranks of one layer wait for each other, in addition to their own work.

    They wait for messages, and for ranks that are late.
    """


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective of `ranks` ranks of one node: a call takes latency + bytes / bandwidth.

    Bytes are those of the whole buffer, as `spec.ops.Exchange` counts them. over: transport. busy: CPU seconds that a
    rank spends per second of it, 0 if a separate device does the work.
    """

    operation: Operation
    ranks: Count
    over: Transport
    latency: NaturalFloat
    bandwidth: PositiveFloat
    busy: NaturalFloat = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one call."""
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Contention:
    """Factor by which the same work takes longer while `ranks` ranks of a node compute at the same time."""

    ranks: Count
    factor: PositiveFloat


@dataclass(frozen=True)
class Measurements:
    """Results of `profile`.

    date: ISO, of the day. torch: version. shape: settings on which the layers' times depend
    (`planner.measured.shape_of`). update_seconds: of an optimizer step with its gradient norm, per element that a rank
    updates. action_seconds: overhead of the engine for every forward and backward. contention: ascending in ranks, the
    first for one rank. waits: within layers that are sharded over ranks, for numbers of ranks that the machine has;
    models estimate the others.
    """

    date: str
    torch: str
    update_seconds: NaturalFloat
    action_seconds: NaturalFloat
    layers: tuple[MeasuredLayer, ...]
    shape: Mapping[str, str] = field(default_factory=dict)
    contention: tuple[Contention, ...] = (Contention(1, 1.0),)
    waits: tuple[MeasuredWait, ...] = ()

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for each rule that the fields break."""
        if not _ISO_DAY.fullmatch(self.date):
            yield "date", f"is {self.date!r}, which is not a date: write it as 2026-01-31"
        ranks = [each.ranks for each in self.contention]
        if ranks != sorted({1, *ranks}):
            yield (
                "contention",
                f"is for {', '.join(map(str, ranks))} ranks: write each number once, in ascending order, starting "
                "with 1",
            )

    def slowdown(self, ranks: float) -> float:
        """Return the factor while `ranks` ranks compute: interpolated linearly between rows, and in proportion to the
        ranks after the last row."""
        before = self.contention[0]
        for each in self.contention:
            if each.ranks >= ranks:
                if each.ranks == before.ranks:
                    return each.factor
                share = (ranks - before.ranks) / (each.ranks - before.ranks)
                return before.factor + share * (each.factor - before.factor)
            before = each
        return before.factor * ranks / before.ranks
