"""What replicas of the weights add to a step: sums of gradients beside backwards, gathers of weights, updates."""

from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.layout.hardware.collectives import GroupLinks, ring_time
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.layout.traffic import scalar_exchanges
from megapipe.layout.units import Unit
from megapipe.planner.cost.exchanges import group_seconds
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.ops import Exchange

Floats = npt.NDArray[np.float64]

PERSISTENT_ELEMENTS = 100_000
"""Of a weight that DeepSpeed's ZeRO-3 keeps whole, at the most: its default `stage3_param_persistence_threshold`."""


class Beside(NamedTuple):
    """Seconds of a rank's compute, and of traffic that runs beside it, in `pieces` as its units come and go."""

    compute: float
    traffic: float
    pieces: int

    def exposed(self, slow_down: float) -> float:
        """What the traffic adds: each piece starts behind its own part of the compute, so that the last one, or what
        the compute was too short for, ends later; while both run each slows the other down."""
        if not self.traffic:
            return 0.0
        piece = self.traffic / self.pieces
        hidden = min(self.traffic - piece, self.compute * (1 - 1 / self.pieces))
        return (slow_down - 1) * max(0.0, hidden) + max(piece, self.traffic - self.compute * (1 - 1 / self.pieces))


def side_by_side(compute: Floats, traffic: Floats, slow_down: float) -> Floats:
    """Seconds of each stage's compute with traffic beside it, as `planner.galvatron.costs.overlapped` has it."""
    shorter = np.minimum(compute, traffic)
    return shorter * slow_down + np.maximum(compute, traffic) - shorter


def tensor_by_tensor_seconds(run: RunLayout, unit: Unit, group: GroupLinks) -> tuple[float, float]:
    """Of one sum of a unit's gradients and of one gather of its weights as DeepSpeed's first ZeRO-3 did both.

    Each tensor has a call of its own, in the compute precision, and its ring runs through all replicas, a step's
    latency for each: `_allgather_param` and `_reduce_scatter_gradient` of its runtime/zero/partition_parameters.py in
    version 0.3. Small weights are not gathered (`PERSISTENT_ELEMENTS`), but summed like all.
    """
    precision: Precision = run.config.training.precision  # type: ignore[assignment]
    reduction = gather = 0.0
    for spec in unit.specs:
        elements = prod(spec.local_shape(run.config.parallel.tensor, VOCABULARY_ALIGNMENT))
        num_bytes = elements * ELEMENT_BYTES[precision]
        reduction += ring_time("reduce_scatter", num_bytes, group).seconds
        if elements > PERSISTENT_ELEMENTS:
            gather += ring_time("all_gather", num_bytes, group).seconds
    return reduction, gather


def tied_seconds(run: RunLayout) -> float:
    """Of the sum of tied weights' gradients, over all replicas of the ranks that use them."""
    total = 0.0
    for name, users in zip(run.tied, run.stages.tied, strict=True):
        ranks = sorted({run.ranks[stage] for stage in users})
        group = _tied_group(run, ranks)
        if group.size > 1:
            spec = next(spec for layer in run.stages.layers for spec in layer.parameters.values() if spec.name == name)
            elements = run.costs.of_units.elements(Unit((spec,), tied=True))
            total += group_seconds([Exchange("all_reduce", elements, FULL_BYTES)], group)
    return total


def _tied_group(run: RunLayout, ranks: list[int]) -> GroupLinks:
    """Replicas of several pipeline ranks together: their links are those of replicas, as many more of them."""
    replicas = run.placement.groups("data", "context")[0]
    if len(ranks) == 1:
        return replicas
    pair = run.placement.groups("pipeline")[0]
    if not pair.crosses:
        return GroupLinks(
            tuple(each * len(ranks) for each in replicas.members),
            replicas.inside,
            replicas.crossing,
            replicas.crossing_latency,
        )
    members = replicas.members * len(ranks)
    crossing = replicas.crossing or pair.crossing / max(pair.members) * max(members)
    return GroupLinks(members, replicas.inside, crossing, pair.crossing_latency)


def scalar_seconds(run: RunLayout) -> float:
    """Of the counts and norms that all ranks sum once a step."""
    if run.world_size == 1:
        return 0.0
    names = len({spec.name for index in run.kinds for spec in run.stages.layers[index].parameters.values()})
    blocks = len(run.stages.layers)
    exchanges = scalar_exchanges(names * blocks, run.costs.loss_terms)
    group = run.placement.groups("data", "pipeline", "context", "tensor")[0]
    return group_seconds(exchanges, group)
