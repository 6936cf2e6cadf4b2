"""How many blocks a stage can get at most, without cutting the model."""

import math
from dataclasses import dataclass
from functools import cache

from megapipe.config.run import PretrainConfig
from megapipe.layout.stages import layers_of, predictions_of
from megapipe.spec.layers import layer_flops

SLACK = 1e-9
"""Relative, on the side of more blocks, against the rounding of sums of FLOPs."""


@dataclass(frozen=True)
class StageLimits:
    """most: blocks of any stage. last: blocks of the last one, beside the head."""

    most: int
    last: int


class StageLimiter:
    """What `schedules.balance.balance_layers` gives stages at most: it takes the least possible FLOPs of the fullest
    stage, which follows from counts alone, as all blocks are alike."""

    def __init__(self, base: PretrainConfig) -> None:
        self._by_hand = base.parallel.layers_per_stage
        self._blocks = base.model.num_layers
        by_kind = {layer.kind: layer for layer in layers_of(base)}
        flops = {
            kind: layer_flops(
                base.model, layer, 1, base.data.sequence_length, predictions_of(base), base.recompute.logits
            ).executed
            for kind, layer in by_kind.items()
        }
        self._embedding, self._block, self._head = (float(flops[kind]) for kind in ("embedding", "block", "head"))
        self.of = cache(self._of)

    def _of(self, num_stages: int) -> StageLimits:
        """Of a model cut into so many stages."""
        if self._by_hand is not None:
            return StageLimits(max(self._by_hand), max(self._by_hand))
        if num_stages == 1:
            return StageLimits(self._blocks, self._blocks)
        edges = (0.0, self._embedding, self._head)
        tried = sorted({edge + count * self._block for edge in edges for count in range(self._blocks + 1)})
        least = next(each for each in tried if self._fits(each, num_stages))
        return StageLimits(self._room(least, 0.0), self._room(least, self._head))

    def _fits(self, bottleneck: float, num_stages: int) -> bool:
        if bottleneck < max(self._embedding, self._head):
            return False
        room = (num_stages - 2) * self._room(bottleneck, 0.0)
        return room + self._room(bottleneck, self._embedding) + self._room(bottleneck, self._head) >= self._blocks

    def _room(self, bottleneck: float, taken: float) -> int:
        return math.floor((bottleneck - taken) / self._block * (1 + SLACK) + SLACK)
